// The plot of effects as a drawing of its own, for copying. The page itself shows it as a table, which needs no script.

function effectsDrawing(effects) {
  const left = 300, right = 130, line = 34, width = 760, bottom = 20 + line * effects.length;
  const ends = [0, ...effects.flatMap(({ difference, interval }) => [difference - (interval ?? 0), difference + (interval ?? 0)])];
  const scale = new Scale(ends, left, width - right, false, 0.06), zero = scale.at(0);
  const rows = effects.flatMap(({ label, difference, interval, step_ratio: ratio }, i) => {
    const y = 20 + line * (i + 0.5), half = interval ?? 0, shown = interval !== null && Math.abs(difference) > interval;
    const said = `${signed(difference, 2)}${interval === null ? "" : ` ± ${number(interval, 2)}`}`;
    return [
      svg("text", { x: 0, y: y + 4, class: "strong" }, label.length > 46 ? `${label.slice(0, 45)}…` : label),
      svg("line", { x1: scale.at(difference - half), x2: scale.at(difference + half), y1: y, y2: y, class: "whisker" }),
      svg("circle", { cx: scale.at(difference), cy: y, r: 5, class: shown ? "effect shown" : "effect" }),
      svg("text", { x: width - right + 12, y: y - 1, class: "strong" }, said),
      svg("text", { x: width - right + 12, y: y + 13 }, ratio === null ? "" : `${ratio.toFixed(2)}× step`),
    ];
  });
  const marks = scale.ticks(5).map((t) => svg("text", { x: scale.at(t), y: bottom + 14, "text-anchor": "middle" }, t ? signed(t, 2) : "same"));
  return svg("svg", { viewBox: `0 0 ${width} ${bottom + 20}` }, svg("line", { x1: zero, x2: zero, y1: 20, y2: bottom, class: "cursor" }), ...rows, ...marks);
}

function offerEffects(root, { effects, baseline }) {
  const body = el("div", { class: "unseen", "aria-hidden": true }, effectsDrawing(effects));
  root.append(el("div", { class: "head" }, exportButtons(`Validation loss against ${baseline}, nats, with the 95% interval`, () => body.firstChild)), body);
}
