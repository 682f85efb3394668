// Draws the figures of page.py with plotly: in the page's colours, when they come into sight, and again when something changes.
// Text of the user's goes into the page as text nodes, and into plotly escaped.
"use strict";
(() => {
  const { figures, runs } = JSON.parse(document.getElementById("page-data").textContent);
  const COLOURS = new Set(["color", "fillcolor", "bgcolor", "bordercolor", "colorscale", "gridcolor", "zerolinecolor"]);
  const FONT = "system-ui, sans-serif";
  const LINE = 15.6; // pixels from one line of text to the next, as plotly sets it
  const drawn = new Map(); // by the figure's id: the width it was drawn at
  const state = runs.map((run) => ({ way: 0, chosen: run.readers.length - 1, at: run.readers.length - 1 }));
  const touch = matchMedia("(pointer: coarse)").matches;
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `12px ${FONT}`;

  const widthOf = (text) => pen.measureText(text).width;
  const plain = (text) => text.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
  const shown = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const number = (value) => (value === null ? "not a number" : String(+value.toPrecision(3)).replace("-", "−"));

  // "@name" is a colour of the style, "@name/0.2" a fifth of it, and a list of colours is a scale.
  function colour(token) {
    const [, name, share] = token.match(/^@([a-z]+\d*)(?:\/([\d.]+))?$/);
    const found = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim().split(/\s*,\s*/);
    if (found.length > 1) return found.map((value, i) => [i / (found.length - 1), value]);
    return share ? found[0] + Math.round(255 * share).toString(16).padStart(2, "0") : found[0];
  }

  function coloured(value, key) {
    if (typeof value === "string") return COLOURS.has(key) && value.startsWith("@") ? colour(value) : value;
    if (Array.isArray(value)) return typeof value[0] === "object" ? value.map((item) => coloured(item, key)) : value;
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, coloured(item, name)]));
  }

  // A label in lines that fit: broken where its parts end, and anywhere if a part is too long.
  function wrapped(text, room) {
    const lines = [""];
    for (const part of text.match(/[^:,/\s]*[:,/\s]?/g)) {
      for (const piece of widthOf(part) > room ? part : [part]) {
        if (lines.at(-1) && widthOf(lines.at(-1) + piece) > room) lines.push("");
        lines[lines.length - 1] += piece;
      }
    }
    return lines;
  }

  const named = (end, room) => wrapped(end.value ? `${end.value} ${end.text}` : end.text, room);
  const tall = (lines) => LINE * lines.length + 3;

  // Names of lines at their ends, none on another: pushed down where they would be, then up from the bottom.
  function labels(figure, size, layout) {
    const [x0, x1] = layout.xaxis.range, [y0, y1] = layout.yaxis.range;
    const placed = figure.ends.map((end) => ({
      ...end,
      left: clamp((end.x - x0) / (x1 - x0), 0, 1),
      from: size.height * clamp((y1 - end.y) / (y1 - y0), 0, 1),
      lines: named(end, size.room),
    }));
    placed.sort((a, b) => a.from - b.from);
    const half = (label) => tall(label.lines) / 2;
    let edge = -Infinity;
    for (const label of placed) edge = (label.to = Math.max(label.from, edge + half(label))) + half(label);
    edge = size.height + size.below;
    for (const label of placed.reverse()) edge = (label.to = Math.min(label.to, edge - half(label))) - half(label);
    return placed.map((label) => ({
      xref: "paper", yref: "paper", x: label.left, y: 1 - label.from / size.height, showarrow: true, arrowhead: 0, arrowwidth: 1,
      ax: size.width * (1 - label.left) + 10, ay: label.to - label.from, xanchor: "left", align: "left", standoff: 3,
      text: label.lines.map(shown).join("<br>"), arrowcolor: colour("@line"), font: { color: colour(label.color), size: 12 },
    }));
  }

  // Every margin is set here, so that labels and clicks know where the axes lie.
  function arranged(figure, width) {
    const own = coloured(figure.layout), names = own.xaxis.categoryarray, rows = own.yaxis.categoryarray;
    const longest = (list) => Math.max(...list.map((name) => widthOf(plain(name))));
    const margin = { t: own.showlegend ? 44 : 12, l: rows ? longest(rows) + 12 : width < 500 ? 52 : 66, r: rows ? 62 : 14 };
    const size = { room: 0 };
    if (figure.ends) {
      const wide = Math.max(0, ...figure.ends.map((end) => widthOf(`${end.value} ${end.text}`)));
      size.room = Math.min(wide + 2, width * 0.36);
      margin.r = size.room + 24;
    }
    size.width = width - margin.l - margin.r;
    const n = figure.square, cell = n ? clamp(size.width / n, 5, Math.max(30, 250 / n)) : 0;
    if (n) margin.r += Math.max(0, size.width - cell * n);
    margin.b = own.xaxis.title ? 48 : 14;
    if (names) {
      const flat = longest(names) + 8 < (n ? cell : size.width / names.length);
      own.xaxis.tickangle = flat ? 0 : -90;
      margin.b = flat ? 30 : longest(names) + 14;
    }
    size.below = margin.b - 16;
    const least = (figure.ends ?? []).reduce((sum, end) => sum + tall(named(end, size.room)), margin.t + 16);
    const height = n ? margin.t + margin.b + cell * n : Math.max(figure.height, least);
    size.height = height - margin.t - margin.b;
    const axis = { gridcolor: colour("@line"), zerolinecolor: colour("@line"), linecolor: colour("@soft"), exponentformat: "e", fixedrange: touch || !figure.ends };
    const layout = { ...own, width, height, margin, dragmode: touch || !figure.ends ? false : "zoom", hovermode: "closest", autosize: false };
    layout.showlegend = Boolean(own.showlegend);
    layout.font = { family: FONT, size: 12, color: colour("@ink") };
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.hoverlabel = { bgcolor: colour("@card"), bordercolor: colour("@soft"), align: "left", font: { color: colour("@ink"), size: 13 } };
    layout.xaxis = { ...axis, ...thinned(own.xaxis, size.width) };
    layout.yaxis = { ...axis, ...thinned(own.yaxis, size.height) };
    if (figure.ends && names) layout.xaxis.range = [-0.5, names.length - 0.5];
    if (figure.ends) layout.annotations = labels(figure, size, layout);
    return [layout, size];
  }

  // As many names on an axis as can be read.
  function thinned(axis, room) {
    if (!axis.categoryarray) return axis;
    const every = Math.ceil((LINE * axis.categoryarray.length) / room);
    return { ...axis, tickmode: "array", tickvals: axis.categoryarray.filter((_, i) => i % every === 0) };
  }

  function figureOf(place) {
    const run = runs[place.closest(".run")?.dataset.run], now = state[place.closest(".run")?.dataset.run];
    if (place.dataset.kind === "row") return rowFigure(run, now);
    const own = figures[place.id], figure = own[Math.min(own.length - 1, now?.way ?? 0)];
    if (place.dataset.kind !== "map") return figure;
    const outline = (row, dash) => ({
      type: "rect", xref: "paper", x0: 0, x1: 1, y0: row - 0.5, y1: row + 0.5, line: { color: "@series2", width: 2, dash },
    });
    const shapes = [outline(now.chosen, "solid"), ...(now.at === now.chosen ? [] : [outline(now.at, "dot")])];
    return { ...figure, layout: { ...figure.layout, shapes } };
  }

  const ofWay = (values, row, way) => values[row][Math.min(way, values[row].length - 1)];

  function rowFigure(run, now) {
    const quantile = (q) => ofWay(run.quantiles[q], now.chosen, now.way);
    const names = run.sources.slice(0, now.chosen + 1).map(shown);
    const box = {
      type: "box", x: names, lowerfence: quantile("0.05"), q1: quantile("0.25"), median: quantile("0.5"), q3: quantile("0.75"),
      upperfence: quantile("0.95"), line: { color: "@series1", width: 1.5 }, fillcolor: "@series1/0.3", name: "", width: 0.6,
    };
    const xaxis = { type: "category", categoryarray: names };
    return { data: [box], layout: { xaxis, yaxis: { title: { text: "weight" }, hoverformat: ".4f", rangemode: "tozero" } }, height: 340 };
  }

  function readout(section, run, now) {
    const mean = ofWay(run.mean, now.chosen, now.way), several = run.mean[now.chosen].length > 1;
    const order = mean.map((_, i) => i).sort((a, b) => Math.abs(mean[b]) - Math.abs(mean[a])).slice(0, 3);
    const low = ofWay(run.quantiles["0.05"], now.chosen, now.way), high = ofWay(run.quantiles["0.95"], now.chosen, now.way);
    const parts = order.map((i) => `${run.sources[i]}: ${number(mean[i])} (${number(low[i])} to ${number(high[i])})`);
    const who = run.readers[now.chosen] + (several ? ` (${run.ways[now.way]})` : "");
    const alike = mean.length > 1 && Math.max(...mean) - Math.min(...mean) < 1e-6;
    const said = alike ? `all it can alike: ${number(mean[0])}` : `most of ${parts.join(", ")}. In brackets: the middle 90% of tokens`;
    section.querySelector(".readout").textContent = `${who} reads ${said}.`;
  }

  function draw(place) {
    const width = Math.floor(place.clientWidth);
    if (!width) return;
    const figure = figureOf(place), [layout, size] = arranged(figure, width), first = !drawn.has(place.id);
    drawn.set(place.id, width);
    Plotly.react(place, coloured(figure.data), layout, { displayModeBar: false, responsive: false });
    place.style.minHeight = "";
    place.arranged = { layout, size };
    if (place.dataset.kind === "row") readout(place.closest(".run"), runs[place.closest(".run").dataset.run], state[place.closest(".run").dataset.run]);
    if (first && figure.ends) place.on("plotly_relayout", (change) => relabel(place, figure, change));
  }

  // After a zoom the names stand at the new ends.
  function relabel(place, figure, change) {
    if (!Object.keys(change).some((key) => /axis\.(range|autorange)/.test(key))) return;
    Plotly.relayout(place, { annotations: labels(figure, place.arranged.size, place.layout) });
  }

  const again = (places) => places.forEach((place) => drawn.has(place.id) && draw(place));
  const all = () => [...document.querySelectorAll(".plot")];

  for (const section of document.querySelectorAll(".run")) {
    const now = state[section.dataset.run], last = runs[section.dataset.run].readers.length - 1;
    const map = section.querySelector("[data-kind=map]"), row = section.querySelector("[data-kind=row]");
    const choose = (to) => {
      now.chosen = now.at = clamp(to, 0, last);
      again([map, row]);
    };
    map.addEventListener("click", (event) => {
      const { size, layout } = map.arranged;
      const down = (event.clientY - map.getBoundingClientRect().top - layout.margin.t) / size.height;
      if (down >= 0 && down < 1) choose(Math.floor(down * (last + 1)));
    });
    map.addEventListener("keydown", (event) => {
      const to = { ArrowUp: now.at - 1, ArrowDown: now.at + 1, Home: 0, End: last }[event.key];
      if (to === undefined && event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      if (to === undefined) return choose(now.at);
      now.at = clamp(to, 0, last);
      again([map]);
    });
    section.querySelector(".way")?.addEventListener("change", (event) => {
      now.way = Number(event.target.value);
      again([...section.querySelectorAll(".plot")]);
    });
  }

  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting || drawn.has(target.id)) continue;
      seen.unobserve(target);
      draw(target);
    }
  }, { rootMargin: "800px" });
  all().forEach((place) => seen.observe(place));

  let waiting;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => again(all().filter((place) => drawn.get(place.id) !== Math.floor(place.clientWidth))), 120);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => again(all()));
  addEventListener("beforeprint", () => {
    document.documentElement.classList.add("printing");
    all().forEach(draw);
  });
  addEventListener("afterprint", () => {
    document.documentElement.classList.remove("printing");
    all().forEach(draw);
  });
})();
