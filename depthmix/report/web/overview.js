// All models at once: their depth maps on one scale, one chart over depth, the loss curves, and what was measured inside each model.

const QUANTITIES = {
  input_rms: ["Size of what each site reads", "RMS", "Where it grows with depth, later outputs must be ever larger to count.", true],
  output_rms: ["Size of each site's output", "RMS", "A rising line means that deep layers need ever larger outputs to have an effect.", true],
  gradient_norm: ["Gradient at each site", "gradient norm", "The flatter the line, the more evenly layers learn.", true],
  embedding: ["How much of a read is the embedding", "share", "The embedding is the token alone. What is left came from layers.", false],
  effective: ["How widely each site reads", "effective sources", "As many equal sources would spread the weights as widely. 1 is a single source.", false],
  skips: ["What each site is worth", "rise of the loss, nats", "How much the loss rises when a site's output is replaced by zero.", false],
};

// Small maps of all models: contributions by default, weights on demand.
class Maps {
  constructor(root, models) {
    Object.assign(this, { root, models, weights: false, way: ALL });
    const ways = [ALL, ...wayChoices(models)];
    const what = choice("what the maps show", ["contribution", "weight"], 0, (i) => ((this.weights = Boolean(i)), this.draw()));
    const way = ways.length > 1 && select("what attention reads for", ways, 0, (i) => ((this.way = ways[i]), this.draw()));
    this.bar = el("div", { class: "bar" }, what, ...(way ? [el("label", {}, "attention reads for ", way)] : []));
    this.caption = el("p", { class: "soft" });
    this.grid = el("div", { class: "multiples" });
    root.append(this.caption, this.bar, this.grid);
    this.draw();
  }

  draw() {
    const scale = this.weights ? SCALES.share : SCALES.even;
    this.caption.textContent = this.weights
      ? "Each row is a reader and each column a source. Colour: the source's weight as a share of all weights of its reader. Weights leave out how large a source is."
      : "Each row is a reader and each column a source. Colour: how much more or less of what is read comes from a source than an even share. A contribution is weight times size.";
    const figures = this.models.map((model) => {
      const values = (this.weights ? model.weight : model.share).map((ways) => ofWay(model, ways, this.way).map((share) => share / SHARE));
      const map = new DepthMap(model, { scale, label: `depth map of ${model.label}`, say: (r, s) => this.say(model, r, s) });
      map.show(values);
      return figure(model.label, el("div", {}, map.svg, map.readout), { table: map.table(percent) });
    });
    this.grid.replaceChildren(legendOf(scale), ...figures);
  }

  say(model, r, s) {
    const weights = model.weight[r].map((way, w) => number((way[s] / SHARE) * model.total[r][w], 3));
    return `${model.readers[r]}: ${percent(ofWay(model, model.share[r], this.way)[s] / SHARE)} of what it reads is ${model.sources[s]}; weight ${weights.join(", ")}.`;
  }
}

// One chart over depth with all models of one depth.
function depthChart(root, models) {
  const readers = models[0].readers.length, same = models.filter((model) => model.readers.length === readers);
  const names = models[0].readers;
  const keys = Object.keys(QUANTITIES).filter((key) => same.some((model) => model.depth[key]?.some(known)));
  const plot = new Plot({ label: "over depth", names });
  const note = el("p", { class: "soft" });
  const show = (i) => {
    const [title, y, caption, log] = QUANTITIES[keys[i]];
    const left = models.length - same.length;
    note.textContent = caption + (left ? ` Left out: ${left} of another depth.` : "");
    const series = same.map((model, colour) => ({ label: model.label, colour, x: range(readers).filter((r) => r < (model.depth[keys[i]] ?? []).length), y: model.depth[keys[i]] ?? [] }));
    plot.show(series.filter((line) => line.y.length), { label: title, y, logY: log });
  };
  const options = keys.map((key) => QUANTITIES[key][0]);
  root.append(figure("By site, for all models", plot.root, { table: plot.table(), controls: [select("quantity", options, 0, show)] }), note);
  show(0);
}

function lossCurves(root, curves, units) {
  const plot = new Plot({ label: "validation loss", y: `nats per ${units[0].slice(0, -1)}` });
  const show = (i) => {
    const time = Boolean(i);
    const series = curves.map((curve, colour) => ({ label: curve.label, colour, x: time ? curve.seconds : curve.tokens, y: curve.mean, low: curve.low, high: curve.high }));
    plot.show(series, { x: time ? `${units[1]} of training` : units[0] });
  };
  const axis = choice("against", [units[0], "time"], 0, show);
  root.append(figure("Validation loss", plot.root, { table: plot.table(), controls: [axis], caption: "Lower is better. A shaded band spans the seeds. Only the end of a line is a finished schedule." }));
  show(0);
}

// What was measured inside one model.
class Inside {
  constructor(root, model) {
    const { edges, streams, training } = model.inside;
    const parts = [...(edges ? [this.needs(model, edges), this.shareAndNeed(model, edges)] : []), ...(streams ? this.streams(model, streams) : []), ...this.training(model, training)];
    root.append(el("div", { class: "grid" }, ...parts));
  }

  needs(model, edges) {
    const change = edges.change.map((ways) => ways[0].map((_, s) => Math.max(...ways.map((way) => way[s] ?? 0))));
    const say = (r, s) => `${model.readers[r]} without ${model.sources[s]}: the loss changes by ${signed(change[r][s], 3)} nats.`;
    const map = new DepthMap(model, { scale: SCALES.nats, label: "loss without a connection", say });
    map.show(change);
    const caption = `How much the loss rises when a single connection is cut, on ${edges.tokens.toLocaleString("en")} tokens. Of several mixtures the most needed one is shown.`;
    return figure("What is needed", el("div", {}, map.svg, legendOf(SCALES.nats), map.readout), { caption, table: map.table((v) => signed(v, 3)) });
  }

  shareAndNeed(model, edges) {
    const groups = ["the embedding", "the newest output", "an older output"].map((label, colour) => ({ label, colour, points: true, x: [], y: [], names: [] }));
    let left = 0;
    edges.change.forEach((ways, r) => ways.forEach((row, w) => row.forEach((rise, s) => {
      const share = model.share[r][w][s] / SHARE;
      if (r === 0 || !known(rise)) return; // the first reader has no choice
      if (rise < 1e-6 || share < 1e-4) return void left++;
      const group = groups[s === 0 ? 0 : s === r ? 1 : 2];
      group.x.push(share);
      group.y.push(rise);
      group.names.push(`${model.readers[r]} without ${model.sources[s]}: ${percent(share)} of the read, loss ${signed(rise, 3)}`);
    })));
    const plot = new Plot({ label: "contribution against need", x: "share of what is read", y: "rise of the loss, nats", logX: true, logY: true });
    plot.show(groups.filter((group) => group.x.length));
    const keys = groups.map(({ label, colour }) => el("span", {}, el("i", { class: `swatch s${colour}` }), label));
    const { contribution, weight } = edges.correlation;
    const correlation = known(contribution) ? ` The rank correlation with need is ${number(contribution, 2)} for contributions${known(weight) ? ` and ${number(weight, 2)} for weights` : ""}; 1 would be a rising line.` : "";
    return figure("Contribution against need", el("div", {}, plot.root, el("p", { class: "legend" }, ...keys)), { table: plot.table(), caption: `Each point is one connection.${correlation} ${left} connections that are not needed or hardly read are left out.` });
  }

  streams(model, streams) {
    const names = model.readers, n = streams.rms[0].length;
    const pairs = range(n).flatMap((i) => range(i).map((j) => [i, j]));
    const alike = streams.similarity.map((matrix) => pairs.map(([i, j]) => matrix[i][j]));
    const line = (label, colour, y, dash) => ({ label, colour, x: range(y.length), y, dash });
    const chart = (title, y, caption, series, log = false) => {
      const plot = new Plot({ label: title, y, names, logY: log });
      plot.show(series);
      return figure(title, plot.root, { caption, table: plot.table() });
    };
    const gains = streams.gain[0].length > 1 ? ["forward", "backward"] : ["gain"];
    return [
      chart("How alike the streams are", "cosine", "Cosine between streams, mean over tokens. 1: all streams carry the same.", [line("mean", 0, alike.map((v) => sum(v) / v.length)), line("most", 1, alike.map((v) => Math.max(...v)), "2 3"), line("least", 2, alike.map((v) => Math.min(...v)), "6 3")]),
      chart("Size of each stream", "RMS", "RMS of every stream.", range(n).map((i) => line(`stream ${i + 1}`, i, streams.rms.map((rms) => rms[i]))), true),
      chart("Gain of all stream maps so far", "gain", "The product of all maps up to a site: how much signals (forward) and gradients (backward) may grow.", gains.map((name, g) => line(name, g, streams.composite_gain.map((gain) => gain[g]))), true),
    ];
  }

  // One line per block of the model would be too many: the first, the middle and the last site of each kind.
  training(model, lines) {
    if (lines.length < 2) return [];
    const sites = model.readers.length - 1, chosen = [...new Set([0, 1, sites >> 1, (sites >> 1) + 1, sites - 2, sites - 1])].filter((s) => s >= 0 && s < sites);
    return ["output_rms", "gradient_norm"].map((key) => {
      const [title, y] = QUANTITIES[key], plot = new Plot({ label: title, x: "step", y, logY: true });
      plot.show(chosen.map((s, colour) => ({ label: model.readers[s], colour, x: lines.map((at) => at.step), y: lines.map((at) => at[key][s]) })));
      return figure(`${title}, during training`, plot.root, { table: plot.table(), caption: "Some sites: the first, the middle and the last." });
    });
  }
}
