// The words of a text and where their predictions came from, in one model or in two side by side.
//
// The reads at one token predict the next: the word at place i was predicted by the reads at place i − 1.

const CONTEXT = 6; // words shown before the one that is asked about
const PACE = 1300; // milliseconds per word while playing

class Words {
  /* root: the section. ask(model, r, s): resolves to the losses of all words with a connection cut, from a server; null without one. */
  constructor(root, ask) {
    Object.assign(this, { root, ask, models: [], shown: [], word: 1, way: ALL, band: null, cut: null });
    addEventListener("hashchange", () => this.readLink());
  }

  load(given) {
    this.stop();
    // Only models of one text can be compared word by word.
    const textOf = (model) => model.text.tokens.join("");
    const models = given.filter((model) => textOf(model) === textOf(given[0]));
    Object.assign(this, { models, leftOut: given.length - models.length });
    this.root.querySelector(".panels").replaceChildren();
    this.root.classList.toggle("empty", !models.length);
    if (!models.length) return;
    if (this.shown.length !== Math.min(2, models.length) || Math.max(...this.shown) >= models.length) this.shown = range(Math.min(2, models.length));
    this.word = this.mostDifferent();
    this.band = this.cut = null;
    if (!this.readLink()) this.build();
  }

  model(side) {
    return this.models[this.shown[side]];
  }

  // A server's texts have no address, and a frame in a notebook may not change its own.
  get linked() {
    return !this.ask && location.protocol !== "about:";
  }

  get pair() {
    return this.shown.length > 1 && this.model(0).text.tokens.join("\0") === this.model(1).text.tokens.join("\0");
  }

  // The word that one model finds hardest compared with the other, or of a single model the hardest.
  mostDifferent() {
    const [a, b] = this.shown.map((_, side) => this.model(side).text.losses);
    // The first words have little to go by, and whole words say more than pieces.
    const first = Math.min(4, a.length >> 2) || 1, { tokens } = this.model(0).text;
    const whole = tokens.map((piece, i) => /^\s\p{L}{2}/u.test(piece) && !/^\p{L}/u.test(tokens[i + 1] ?? ""));
    const size = a.map((loss, i) => (i >= first && known(loss) && (whole[i] || !whole.some((is, j) => is && j >= first)) ? Math.abs(this.pair && known(b[i]) ? loss - b[i] : loss) : -1));
    return Math.max(1, size.indexOf(Math.max(...size)));
  }

  // Another model may cut the text differently: find its token in which word i of the first model begins.
  wordOf(side, i = this.word) {
    if (!side || this.pair) return i;
    const own = this.model(0).text.tokens, other = this.model(side).text.tokens;
    if (i >= own.length) return other.length;
    const begin = own.slice(0, i).join("").length;
    let end = 0;
    const there = other.findIndex((piece) => (end += piece.length) > begin);
    return there < 0 ? other.length : Math.max(1, there);
  }

  build() {
    this.stop();
    const several = this.models.length > 1;
    const names = this.models.map((model) => model.label);
    const pick = (side) => several && select(side ? "second model" : "first model", names, this.shown[side], (i) => this.pick(side, i));
    this.title = el("h2", { id: "words-title" });
    this.sentence = new Sentence(this.model(0).text, (i) => this.choose(i));
    this.sides = this.shown.map((_, side) => this.side(side, pick(side)));
    this.readout = el("div", { class: "readout" });
    this.player = el("button", { type: "button", class: "play", "aria-pressed": false }, "▶ Play");
    this.player.addEventListener("click", () => (this.timer ? this.stop() : this.play()));
    const link = el("button", { type: "button" }, "Copy link");
    link.addEventListener("click", () => this.copyLink(link));
    const ways = [ALL, ...wayChoices(this.shown.map((_, side) => this.model(side)))];
    if (!ways.includes(this.way)) this.way = ALL;
    const choose = ways.length > 1 && select("what attention reads for", ways, ways.indexOf(this.way), (i) => ((this.way = ways[i]), this.update()));
    const bar = el("div", { class: "bar" }, this.player, ...(this.linked ? [link] : []), ...(choose ? [el("label", {}, "attention reads for ", choose)] : []));
    const hero = el("div", { class: `hero of${this.shown.length}` }, ...this.sides.map((side) => side.root), this.mapFigure());
    const panels = this.root.querySelector(".panels");
    panels.replaceChildren(this.title, this.explanation(), this.sentence.root, bar, hero, this.readout);
    this.root.setAttribute("aria-labelledby", "words-title");
    this.update();
  }

  explanation() {
    const [a, b] = this.shown.map((_, side) => el("b", { class: `m${side}` }, ...breakable(this.model(side).label)));
    const mark = this.pair
      ? ["The line below a word shows which model found it easier: ", a, " or ", b, ". "]
      : ["The line below a word is the stronger, the less the model expected it. "];
    const left = this.leftOut ? ` Left out: ${this.leftOut} with another text.` : "";
    return el("p", { class: "soft" }, ...mark, "Choose a word. A band is as thick as the part of the prediction that it carries, by size. ",
      "Attention also brings in what earlier words carried; the bands follow this word only. ", `At the right is what each depth would have predicted.${left}`);
  }

  side(side, pick) {
    const model = this.model(side);
    const river = new River(model, side, (r, s) => this.chooseBand(r, s));
    const chance = el("p", { class: "chance", "aria-live": "polite" }), top = el("ol", { class: "top" });
    const head = el("div", { class: `head m${side}` }, pick || el("h3", {}, ...breakable(model.label)), exportButtons(`Where a word came from: ${model.label}`, () => river.svg));
    const root = el("div", { class: "side" }, head, chance, el("div", {}, river.svg), top);
    const heading = () => ["reader", "source", "share of the read", "share of the prediction"];
    tableBehind(root, `What the prediction of ${model.label} is made of`, { heading, rows: () => this.bandRows(side) });
    return { river, chance, top, root };
  }

  bandRows(side) {
    const model = this.model(side), shares = this.shares(side), { carried } = this.sides[side].river;
    const rows = carried.flatMap((row, r) => row.map((value, s) => [value, model.readers[r], model.sources[s], percent(shares[r][s]), percent(value)]));
    return rows.sort((a, b) => b[0] - a[0]).slice(0, 60).map(([, ...cells]) => cells);
  }

  mapFigure() {
    const same = this.shown.length > 1 && this.model(0).readers.length === this.model(1).readers.length;
    this.compared = same;
    const model = this.model(0), title = same ? "Difference: who is read more" : "What each reader reads for this word";
    const names = this.shown.map((_, side) => `more in ${this.model(side).label}`);
    const scale = same ? { ...SCALES.difference, legend: [[-CLASSES, names[0]], [0, "same"], [CLASSES, names[1]]] } : SCALES.even;
    const say = (r, s) => (same ? this.saidOfBoth(r, s) : `${model.readers[r]}: ${percent(this.shares(0)[r][s])} of what it reads is ${model.sources[s]}.`);
    this.map = new DepthMap(model, { scale, label: title, say, choose: (r, s) => this.chooseBand(r, s) });
    const body = el("div", {}, this.map.svg, legendOf(scale), this.map.readout);
    return figure(title, body, { table: this.map.table((value) => (same ? `${signed(100 * value, 2)} points` : percent(value))) });
  }

  saidOfBoth(r, s) {
    const parts = this.sides.map((_, side) => `${percent(this.shares(side)[r][s])} in ${this.model(side).label}`);
    return `${this.model(0).readers[r]} reads ${this.model(0).sources[s]}: ${parts.join(", ")}.`;
  }

  // The shares of every read that predicted the word, [reader][source].
  shares(side) {
    const { text } = this.model(side), at = this.wordOf(side) - 1;
    return text.share[at].map((ways) => ofWay(this.model(side), ways, this.way).map((share) => share / SHARE));
  }

  choose(word) {
    this.word = clamp(word, 1, this.model(0).text.tokens.length);
    this.cut = null;
    this.update();
    this.writeLink();
  }

  pick(side, i) {
    // The same place of the text in another first model.
    const { tokens } = this.model(0).text, begin = tokens.slice(0, this.word).join("").length;
    this.shown[side] = i;
    const own = this.model(0).text.tokens;
    let end = 0;
    const there = own.findIndex((piece) => (end += piece.length) > begin);
    this.word = there < 0 ? own.length : Math.max(1, there);
    this.band = this.cut = null;
    this.build();
    this.writeLink();
    this.root.querySelectorAll(".side select")[side]?.focus();
  }

  chooseBand(r, s) {
    this.band = this.band && this.band[0] === r && this.band[1] === s ? null : [r, s];
    this.cut = null;
    this.update();
  }

  update() {
    const { tokens } = this.model(0).text, ends = this.word >= tokens.length;
    const before = tokens.slice(Math.max(0, this.word - CONTEXT), this.word).join("");
    const asked = ends ? "the next word" : quoted(tokens[this.word]);
    this.title.textContent = `Where does ${asked} come from, after “${this.word > CONTEXT ? "…" : ""}${word(before)}”?`;
    this.sentence.show(this.word, this.pair ? this.model(1).text.losses : null);
    this.sides.forEach((_, side) => this.updateSide(side));
    const [first, second] = this.sides.map((_, side) => this.shares(side));
    this.map.show(this.compared ? second.map((row, r) => row.map((share, s) => share - first[r][s])) : first);
    if (this.band && this.band[0] < this.map.n) this.map.point(...this.band);
    this.tellBand();
  }

  updateSide(side) {
    const { text } = this.model(side), { river, chance, top } = this.sides[side], at = this.wordOf(side);
    const actual = text.tokens[at] ?? null, loss = text.losses[at];
    const of = actual === null ? "the end of the text" : tokenName(text.tokens, at);
    const after = this.cut?.[side];
    const told = actual === null ? "a guess at what comes next" : known(loss) ? oneIn(Math.exp(-loss)) : "not a number";
    chance.replaceChildren(`read at ${tokenName(text.tokens, at - 1)}, predicting ${of}: `, el("b", {}, told));
    if (known(after)) chance.append(" → ", el("b", { class: "after" }, oneIn(Math.exp(-after))), " cut");
    const guesses = text.lens?.[at - 1] ?? null;
    const label = `${this.model(side).label}: what the prediction of ${of} is made of`;
    river.show(this.shares(side), { guesses, actual, chosen: this.band, cut: Boolean(this.cut), label });
    top.replaceChildren(...(text.predictions?.[at - 1] ?? []).map(([token, probability]) =>
      el("li", { class: token === actual ? "right" : "", style: `--share: ${(100 * probability).toFixed(1)}%` }, el("span", {}, word(token)), el("span", {}, percent(probability)))));
    top.setAttribute("aria-label", `most probable words of ${this.model(side).label}`);
  }

  // Say what the chosen band carries, and offer to cut it.
  tellBand() {
    this.readout.replaceChildren();
    if (!this.band) return void this.readout.append(el("p", { class: "soft" }, "Choose a band or a cell of the map to see what it carries, and what happens without it."));
    const [r, s] = this.band;
    const lines = this.sides.flatMap((_, side) => {
      const model = this.model(side);
      if (r >= model.readers.length) return [];
      const at = this.wordOf(side) - 1, ways = model.text.weight[at][r], total = model.text.total[at][r];
      const weights = ways.map((row, w) => number((row[s] / SHARE) * total[w], 3));
      const said = `: ${percent(this.shares(side)[r][s])} of what ${model.readers[r]} reads is ${model.sources[s]} (weight ${weights.join(", ")}), and it carries ${percent(this.sides[side].river.carried[r][s])} of the prediction.`;
      return [el("p", {}, el("b", { class: `m${side}` }, model.label), said)];
    });
    const able = this.ask || this.sides.every((_, side) => this.model(side).text.cuts);
    const button = el("button", { type: "button", "aria-pressed": Boolean(this.cut) }, this.cut ? "Join it again" : "Cut it");
    button.addEventListener("click", () => this.toggleCut());
    this.readout.append(...lines, ...(able ? [el("p", {}, button, " ", this.cut ? this.saidOfCut() : "for the whole text: its reader then takes more of its other sources. See how probable the word is without it.")] : []));
  }

  saidOfCut() {
    const said = this.sides.map((_, side) => {
      const loss = this.model(side).text.losses[this.wordOf(side)], after = this.cut[side];
      if (this.band[0] >= this.model(side).readers.length) return `${this.model(side).label} has no such reader`;
      if (!known(after) || !known(loss)) return `${this.model(side).label}: there is no word to predict`;
      return `${this.model(side).label}: ${oneIn(Math.exp(-loss))} becomes ${oneIn(Math.exp(-after))} (${signed(after - loss, 2)} nats)`;
    });
    return `${said.join("; ")}.`;
  }

  async toggleCut() {
    if (this.cut) {
      this.cut = null;
      return this.update();
    }
    const [r, s] = this.band, asked = this.word;
    let failed = false; // the page already says why
    const found = await Promise.all(this.sides.map(async (_, side) => {
      const { text, readers } = this.model(side), i = this.wordOf(side);
      if (r >= readers.length) return null;
      const rise = text.cuts?.[i - 1]?.[r][s];
      if (text.cuts) return known(text.losses[i]) && known(rise) ? text.losses[i] + rise / NATS : null;
      const losses = await this.ask(this.model(side).place, r, s);
      failed ||= !losses;
      return losses?.[i] ?? null;
    }));
    if (failed || asked !== this.word || this.band?.[0] !== r || this.band?.[1] !== s) return;
    this.cut = found;
    this.update();
    this.readout.querySelector("button")?.focus();
  }

  play() {
    const last = this.model(0).text.tokens.length - 1;
    if (this.word >= last) this.choose(1);
    this.quiet(true);
    this.player.textContent = "❚❚ Pause";
    this.player.setAttribute("aria-pressed", true);
    this.timer = setInterval(() => {
      this.choose(this.word + 1);
      if (this.word >= last) this.stop();
    }, PACE);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    if (!this.player) return;
    this.quiet(false);
    this.player.textContent = "▶ Play";
    this.player.setAttribute("aria-pressed", false);
  }

  // A screen reader would read every word while they play.
  quiet(is) {
    for (const { chance } of this.sides) chance.setAttribute("aria-live", is ? "off" : "polite");
  }

  // A link names the word and the models: #word=14&models=0,2
  writeLink() {
    if (this.linked) history.replaceState(null, "", `#word=${this.word}&models=${this.shown.join(",")}`);
  }

  readLink() {
    const asked = new URLSearchParams(location.hash.slice(1));
    if (!asked.has("word") || !this.models.length || !this.linked) return false;
    this.stop();
    this.band = this.cut = null;
    const models = (asked.get("models") ?? "").split(",").map(Number);
    if (models.length === this.shown.length && models.every((i) => Number.isInteger(i) && this.models[i])) this.shown = models;
    this.word = clamp(parseInt(asked.get("word"), 10) || 1, 1, this.model(0).text.tokens.length);
    this.build();
    return true;
  }

  async copyLink(button) {
    this.writeLink();
    try {
      await navigator.clipboard.writeText(location.href);
      button.textContent = "Copied";
    } catch {
      button.textContent = "The address bar has the link";
    }
    setTimeout(() => (button.textContent = "Copy link"), 2500);
  }
}
