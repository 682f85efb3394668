// Lines and points over two axes, redrawn when the width changes.

const HEIGHT = 300;
const FLAT = 5;
const COLOURS = 8; // further lines are dashed
const LETTER = 6.9; // width of a letter of 12 pixels, about

// Ticks at round numbers: 1, 2, 5 times powers of ten.
function ticks(low, high, log, most) {
  if (log) {
    const powers = range(Math.ceil(Math.log10(high)) - Math.floor(Math.log10(low)) + 1).map((i) => i + Math.floor(Math.log10(low)));
    for (const [steps, every] of [[[1, 2, 5], 1], [[1, 3], 1], [[1], 1], [[1], 2], [[1], 3], [[1], 5]]) {
      const chosen = powers.filter((power) => power % every === 0);
      const found = chosen.flatMap((power) => steps.map((step) => +(step * 10 ** power).toPrecision(2))).filter((t) => t >= low && t <= high);
      if (found.length <= most && found.length > 1) return found;
    }
    return [low, high];
  }
  const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const first = Math.ceil(low / step - 1e-9);
  return range(Math.floor(high / step + 1e-9) - first + 1).map((i) => +((first + i) * step).toPrecision(12));
}

const shortNumber = (value) => (Math.abs(value) >= 1e9 ? `${number(value / 1e9)}B` : Math.abs(value) >= 1e6 ? `${number(value / 1e6)}M` : Math.abs(value) >= 1e4 ? `${number(value / 1e3)}k` : number(value, 4));

class Scale {
  constructor(values, from, to, log, margin = 0) {
    const shown = values.filter((v) => known(v) && (!log || v > 0));
    // A logarithmic axis is for values that differ much.
    this.log = log && shown.length > 0 && Math.max(...shown) > FLAT * Math.min(...shown);
    let low = shown.length ? Math.min(...shown) : 0, high = shown.length ? Math.max(...shown) : 1;
    if (low === high) [low, high] = this.log ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
    const [a, b] = [low, high].map((v) => (this.log ? Math.log10(v) : v));
    [this.a, this.b, this.from, this.to] = [a - margin * (b - a), b + margin * (b - a), from, to];
  }
  at(value) {
    const v = this.log ? Math.log10(value) : value;
    return this.from + ((v - this.a) / (this.b - this.a)) * (this.to - this.from);
  }
  ticks(most) {
    return ticks(...[this.a, this.b].map((v) => (this.log ? 10 ** v : v)), this.log, most);
  }
}

class Plot {
  /* x, y: titles of the axes. names: names of the places along x, if it has names and not numbers. logX, logY: logarithmic axes. */
  constructor({ label, x = "", y = "", names = null, logX = false, logY = false }) {
    Object.assign(this, { label, x, y, names, logX, logY, series: [] });
    this.box = el("div", { class: "plot" });
    this.readout = el("p", { class: "readout", "aria-live": "polite" });
    this.root = el("div", {}, this.box, this.readout);
    new ResizeObserver(() => this.box.clientWidth !== this.width && this.draw()).observe(this.box);
  }

  /* series: [{label, x, y, low, high, colour, dash, points, names}], where colour is the number of a series colour. */
  show(series, options = {}) {
    Object.assign(this, options, { series });
    this.draw();
  }

  draw() {
    this.width = this.box.clientWidth;
    if (!this.width) return;
    const lines = this.series.some((s) => !s.points), right = lines ? this.labelRoom() : 8;
    const left = 52, top = 10, bottom = HEIGHT - (this.names ? 54 : 36);
    const all = (key) => this.series.flatMap((s) => s[key] ?? []);
    this.across = new Scale(all("x"), left, this.width - right, this.logX, lines ? 0 : 0.03);
    this.up = new Scale([...all("y"), ...all("low"), ...all("high")], bottom, top, this.logY, 0.04);
    const drawing = svg("svg", { viewBox: `0 0 ${this.width} ${HEIGHT}`, role: "application", "aria-label": `${this.label}: arrow keys move`, tabindex: 0 });
    drawing.append(...this.axes(left, right, bottom), ...this.series.flatMap((s) => this.marks(s)), ...(lines ? this.endLabels(bottom, right) : []));
    this.line = svg("line", { y1: top, y2: bottom, class: "cursor", visibility: "hidden", "data-unseen": "" });
    drawing.append(this.line);
    drawing.addEventListener("pointermove", (event) => this.pointAt(event));
    drawing.addEventListener("keydown", (event) => this.step(event));
    this.box.replaceChildren(drawing);
    redrawn(this.box);
  }

  labelRoom() {
    return Math.min(0.4 * this.width, 16 + LETTER * Math.max(0, ...this.series.map((s) => s.label.length)));
  }

  axes(left, right, bottom) {
    const parts = [];
    for (const t of this.up.ticks(6)) {
      const y = this.up.at(t);
      parts.push(svg("line", { x1: left, x2: this.width - right, y1: y, y2: y, class: "gridline" }));
      parts.push(svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, shortNumber(t)));
    }
    if (this.names) {
      const every = Math.ceil((this.names.length * 16) / (this.width - left - right));
      range(this.names.length).filter((i) => i % every === 0).forEach((i) => {
        const x = this.across.at(i) + 4, y = bottom + 6;
        parts.push(svg("text", { x, y, "text-anchor": "end", transform: `rotate(-60 ${x} ${y})` }, brief(this.names[i])));
      });
    } else {
      for (const t of this.across.ticks(Math.max(3, Math.floor((this.width - left - right) / 70)))) {
        parts.push(svg("text", { x: this.across.at(t), y: bottom + 17, "text-anchor": "middle" }, shortNumber(t)));
      }
      parts.push(svg("text", { x: (left + this.width - right) / 2, y: HEIGHT - 4, "text-anchor": "middle", class: "axis" }, this.x));
    }
    parts.push(svg("text", { x: 12, y: bottom / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${bottom / 2})`, class: "axis" }, this.y));
    return parts;
  }

  marks(series) {
    const place = (i, y) => [this.across.at(series.x[i]).toFixed(1), this.up.at(y).toFixed(1)];
    const shown = range(series.x.length).filter((i) => known(series.y[i]) && !(this.up.log && series.y[i] <= 0));
    const css = `s${series.colour % COLOURS}`, dash = series.dash ?? (series.colour < COLOURS ? null : "8 3");
    if (series.points) {
      return shown.map((i) => {
        const [x, y] = place(i, series.y[i]);
        return svg("circle", { cx: x, cy: y, r: 3.5, class: `${css} point` }, svg("title", {}, series.names[i]));
      });
    }
    const path = (ys, which) => which.map((i, k) => `${k ? "L" : "M"}${place(i, ys[i]).join(" ")}`).join("");
    const line = svg("path", { d: path(series.y, shown), class: `${css} line`, "stroke-dasharray": dash });
    if (!series.low) return [line];
    const band = path(series.low, shown) + path(series.high, [...shown].reverse()).replace("M", "L") + "z";
    return [svg("path", { d: band, class: `${css} band` }), line];
  }

  // Names of lines at their ends. Where they would overlap they are pushed down, then up from the bottom.
  endLabels(bottom, right) {
    const labels = this.series.filter((s) => !s.points).map((s) => {
      const last = s.y.findLastIndex((y) => known(y) && !(this.up.log && y <= 0));
      return last < 0 ? null : { s, x: this.across.at(s.x[last]), y: this.up.at(s.y[last]) };
    }).filter(Boolean).sort((a, b) => a.y - b.y);
    let edge = -Infinity;
    for (const label of labels) edge = (label.to = Math.max(label.y, edge)) + 15;
    edge = bottom + 8;
    for (const label of labels.reverse()) edge = (label.to = Math.min(label.to, edge)) - 15;
    const fits = Math.floor((right - 16) / LETTER);
    return labels.flatMap(({ s, x, y, to }) => [
      svg("line", { x1: x + 2, y1: y, x2: this.width - right + 11, y2: to, class: "leader" }),
      svg("text", { x: this.width - right + 13, y: to + 4, class: `s${s.colour % COLOURS} end` }, svg("title", {}, s.label), s.label.length > fits ? `${s.label.slice(0, fits - 1)}…` : s.label),
    ]);
  }

  // Every place along x where a line has a value.
  places() {
    return [...new Set(this.series.filter((s) => !s.points).flatMap((s) => s.x))].sort((a, b) => a - b);
  }

  pointAt(event) {
    const places = this.places();
    if (!places.length) return;
    const box = this.box.getBoundingClientRect(), x = event.clientX - box.left;
    this.point(places.reduce((best, place) => (Math.abs(this.across.at(place) - x) < Math.abs(this.across.at(best) - x) ? place : best)));
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key], places = this.places();
    if (!by || !places.length) return;
    event.preventDefault();
    this.point(places[clamp(places.indexOf(this.now) + by, 0, places.length - 1)]);
  }

  point(place) {
    this.now = place;
    fill(this.line, { x1: this.across.at(place), x2: this.across.at(place), visibility: "visible" }, []);
    const values = this.series.filter((s) => !s.points && s.x.includes(place)).map((s) => `${s.label}: ${number(s.y[s.x.indexOf(place)], 4)}`);
    this.readout.textContent = `${this.names ? this.names[place] : `${shortNumber(place)} ${this.x}`}: ${values.join("; ")}`;
  }

  table() {
    if (this.series.some((s) => s.points)) {
      const rows = () => this.series.flatMap((s) => s.names.map((name, i) => [name, number(s.x[i]), number(s.y[i])]));
      return { heading: () => ["point", this.x, this.y], rows };
    }
    const lines = () => this.series.filter((s) => !s.points);
    return {
      heading: () => [this.names ? "site" : this.x, ...lines().map((s) => s.label)],
      rows: () => this.places().map((place) => [this.names ? this.names[place] : shortNumber(place), ...lines().map((s) => (s.x.includes(place) ? number(s.y[s.x.indexOf(place)], 4) : "")) ]),
    };
  }
}
