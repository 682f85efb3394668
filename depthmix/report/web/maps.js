// Depth maps: a triangle of cells, readers downwards and sources to the right. Cells of one colour are one path, so that a map of a
// hundred sites has a few dozen elements.

const CLASSES = 8; // colours on each side of the middle
const CELL = 10; // user units
const GAP = 1;

// What a map's colours mean. A scale turns a share of a reader's read into a colour from −8 to 8, given the number of its sources.
const SCALES = {
  // How much more or less than an even share, from an eighth to eight times.
  even: {
    level: (share, sources) => (share <= 0 ? -CLASSES : clamp(Math.round((CLASSES / 3) * Math.log2(share * sources)), -CLASSES, CLASSES)),
    legend: [[-CLASSES, "⅛ of an even share"], [0, "an even share"], [CLASSES, "8 times"]],
  },
  // The share itself. Colours grow with its root, so that small shares can be told apart.
  share: {
    level: (share) => Math.sign(share) * Math.min(CLASSES, Math.ceil(CLASSES * Math.sqrt(Math.abs(share)) - 0.25)),
    legend: [[-CLASSES, "−100%"], [-CLASSES / 2, "−25%"], [0, "0"], [CLASSES / 2, "25%"], [CLASSES, "100%"]],
  },
  // Differences of shares in percentage points, by their root, in the colours of the two models.
  difference: {
    css: "d",
    level: (share) => Math.sign(share) * Math.min(CLASSES, Math.round(CLASSES * Math.sqrt(Math.abs(share) / 0.3))),
  },
  // Changes of the loss in nats, by their root, up to one nat.
  nats: {
    level: (change) => Math.sign(change) * Math.min(CLASSES, Math.round(CLASSES * Math.sqrt(Math.abs(change)))),
    legend: [[-CLASSES, "−1 nat"], [0, "0"], [CLASSES / 2, "+0.25"], [CLASSES, "+1 nat"]],
  },
};

const classOf = (scale, level) => `${scale.css ?? "c"}${level}`;

function legendOf(scale) {
  const swatches = scale.legend.map(([level, text]) => el("span", {}, el("i", { class: `swatch ${classOf(scale, level)}` }), el("span", {}, ...breakable(text))));
  return el("p", { class: "legend" }, ...swatches);
}

class DepthMap {
  /* model: names the readers and sources. scale: one of SCALES. say(r, s): the sentence for a cell. choose(r, s): a cell was chosen. */
  constructor(model, { scale, label, say, choose = null, names = true }) {
    Object.assign(this, { model, scale, say, choose, rows: [] });
    this.n = model.readers.length;
    // Names are as large on the page for a model of a hundred sites as for one of ten; a map of fewer sites is smaller.
    this.letters = Math.max(0.45 * this.n, 4.6);
    const wide = this.n * CELL, room = names ? 6.6 * this.letters : 0;
    this.left = room;
    this.svg = svg("svg", { viewBox: `0 0 ${room + wide} ${wide + room}`, role: "application", "aria-label": `${label}: arrow keys move${choose ? ", Enter chooses" : ""}`, tabindex: 0, class: "depth-map" });
    if (this.n < 11) this.svg.style.maxWidth = `${3 * (room + wide)}px`;
    this.paths = new Map();
    for (const level of range(2 * CLASSES + 1)) {
      const path = svg("path", { class: classOf(scale, level - CLASSES) });
      this.paths.set(level - CLASSES, path);
      this.svg.append(path);
    }
    this.mark = svg("rect", { class: "mark", width: CELL, height: CELL, visibility: "hidden", "data-unseen": "" });
    this.svg.append(this.mark, ...(names ? this.names() : []), this.legend());
    this.readout = el("p", { class: "readout", "aria-live": "polite" });
    this.at = null;
    this.listen();
  }

  names() {
    const every = Math.ceil(this.n / 13);
    const shown = [...range(this.n).filter((i) => i % every === 0 && i + every < this.n), this.n - 1];
    const style = { "text-anchor": "end", style: `font-size: ${this.letters}px` }, low = 0.45 * CELL + 0.36 * this.letters;
    const rows = shown.map((i) => svg("text", { ...style, x: this.left - 0.4 * this.letters, y: i * CELL + low }, brief(this.model.readers[i])));
    const columns = shown.map((i) => {
      const x = this.left + i * CELL + low, y = (this.n + 0.2) * CELL;
      return svg("text", { ...style, x, y, transform: `rotate(-90 ${x} ${y})` }, brief(this.model.sources[i]));
    });
    return [...rows, ...columns];
  }

  // In the empty half of a figure that is copied: what the colours mean.
  legend() {
    const x = this.left + 0.56 * this.n * CELL, size = this.letters;
    const lines = this.scale.legend.flatMap(([level, text], i) => [
      svg("rect", { x, y: (1.5 * i + 0.5) * size, width: 0.8 * size, height: 0.8 * size, class: classOf(this.scale, level) }),
      svg("text", { x: x + 1.2 * size, y: (1.5 * i + 1.2) * size, style: `font-size: ${0.8 * size}px` }, text),
    ]);
    return svg("g", { "data-exported": "", display: "none" }, ...lines);
  }

  /* rows: the value of each cell [reader][source]. */
  show(rows) {
    this.rows = rows;
    const parts = new Map(), size = CELL - GAP;
    rows.forEach((row, r) =>
      row.forEach((value, s) => {
        if (!known(value)) return;
        const level = this.scale.level(value, row.length) || 0;
        if (!parts.has(level)) parts.set(level, []);
        parts.get(level).push(`M${this.left + s * CELL} ${r * CELL}h${size}v${size}h${-size}z`);
      }),
    );
    for (const [level, path] of this.paths) path.setAttribute("d", (parts.get(level) ?? []).join(""));
    if (this.at) this.point(...this.at);
    redrawn(this.svg);
  }

  place(event) {
    const box = this.svg.getBoundingClientRect(), unit = this.svg.viewBox.baseVal.width / box.width;
    const s = Math.floor(((event.clientX - box.left) * unit - this.left) / CELL), r = Math.floor(((event.clientY - box.top) * unit) / CELL);
    return r >= 0 && r < this.n && s >= 0 && s <= r ? [r, s] : null;
  }

  listen() {
    this.svg.addEventListener("pointermove", (event) => this.place(event) && this.point(...this.place(event)));
    this.svg.addEventListener("click", (event) => {
      const at = this.place(event);
      if (!at) return;
      this.point(...at);
      this.choose?.(...at);
    });
    this.svg.addEventListener("keydown", (event) => {
      const [r, s] = this.at ?? [this.n - 1, 0], by = ARROWS[event.key];
      if (by) {
        event.preventDefault();
        const to = clamp(r + by[0], 0, this.n - 1);
        this.point(to, clamp(s + by[1], 0, to));
      } else if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        this.choose?.(r, s);
      }
    });
  }

  point(r, s) {
    this.at = [r, s];
    fill(this.mark, { x: this.left + s * CELL - 0.5, y: r * CELL - 0.5, visibility: "visible" }, []);
    this.readout.textContent = this.say(r, s);
  }

  table(form) {
    return {
      heading: () => ["reader", ...this.model.sources],
      rows: () => this.rows.map((row, r) => [this.model.readers[r], ...row.map(form)]),
    };
  }
}
