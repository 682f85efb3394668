// A river: where one prediction came from. The prediction is at the top and the embedding at the bottom. A band is as thick as the share
// of the prediction that it carries, traced from the prediction down:
//
//     carried(reader, source) = carried(reader) · share(reader, source)        carried(prediction) = 1
//     carried(site) = sum of carried(reader, site) over the readers of the site's output

const RIVER = { width: 400, axis: 196, reach: 112, band: 30, least: 5e-4 };

// Return what each band carries, [reader][source], from the shares [reader][source] of every read. Shares are rounded, so each row is
// divided by its sum, or a deep river would lose water.
function carriedBy(rounded) {
  const shares = rounded.map((row) => row.map((share) => share / (sum(row) || 1)));
  const nodes = Array(shares.length + 1).fill(0);
  nodes[shares.length] = 1;
  const bands = shares.map((row) => row.map(() => 0));
  for (let r = shares.length - 1; r >= 0; r--) {
    shares[r].forEach((share, s) => {
      bands[r][s] = nodes[r + 1] * share;
      nodes[s] += bands[r][s];
    });
  }
  return { bands, nodes };
}

class River {
  /* choose(r, s): a band was chosen. */
  constructor(model, colour, choose) {
    Object.assign(this, { model, choose });
    this.n = model.readers.length;
    const kinds = [...new Set(model.kinds)];
    this.left = model.kinds.map((kind) => kind === kinds[0]);
    this.space = clamp(420 / (this.n + 1), 8, 24);
    this.top = 34;
    const height = this.top + this.n * this.space + 26;
    this.svg = svg("svg", { viewBox: `0 0 ${RIVER.width} ${height}`, class: `river m${colour}`, role: "img" });
    const others = [...kinds.slice(1), "prediction"].join(" and ");
    this.svg.append(
      svg("text", { x: 2, y: 12 }, `◂ read by ${kinds[0]}`),
      svg("text", { x: RIVER.width - 2, y: 12, "text-anchor": "end" }, `read by ${others} ▸`),
    );
    this.bands = svg("g", {});
    this.nodes = svg("g", {});
    this.hits = svg("g", { "data-unseen": "" });
    this.svg.append(this.bands, this.nodes, this.labels(), this.hits);
  }

  y(node) {
    return this.top + (this.n - node) * this.space;
  }

  labels() {
    const every = Math.ceil(13 / this.space), group = svg("g", {});
    this.guesses = new Map();
    for (const node of range(this.n + 1)) {
      const end = node === 0 || node === this.n, y = this.y(node) + 4;
      if (!end && ((this.n - node) % every || node < every)) continue;
      const name = node ? this.model.readers[node === this.n ? this.n - 1 : node - 1] : "embedding";
      group.append(svg("text", { x: 2, y, class: end ? "strong" : "" }, brief(name)));
      if (!node) continue;
      const guess = svg("text", { x: RIVER.width - 2, y, "text-anchor": "end", class: "guess" });
      this.guesses.set(node, guess);
      group.append(guess);
    }
    return group;
  }

  curve(r, s) {
    const from = this.y(s), to = this.y(r + 1), x = RIVER.axis;
    const out = x + (this.left[r] ? -1 : 1) * Math.min(1, 0.13 + (from - to) / (this.n * this.space)) * RIVER.reach * 1.33;
    return `M${x} ${from}C${out.toFixed(1)} ${from} ${out.toFixed(1)} ${to} ${x} ${to}`;
  }

  /* shares: of every read at this word, [reader][source]. guesses: what each reader's input would predict, [reader][token, probability], or
     null. actual: the word that came, or null. chosen: a band [r, s], or null; cut: it is cut. */
  show(shares, { guesses, actual, chosen, cut, label }) {
    const { bands, nodes } = carriedBy(shares);
    this.carried = bands;
    const drawn = bands.flatMap((row, r) => row.map((carried, s) => [carried, r, s])).filter(([carried]) => carried >= RIVER.least);
    drawn.sort((a, b) => b[0] - a[0]);
    const is = (r, s) => chosen && chosen[0] === r && chosen[1] === s;
    if (chosen && chosen[0] < this.n && !drawn.some(([, r, s]) => is(r, s))) drawn.push([RIVER.least, ...chosen]);
    this.bands.replaceChildren(...drawn.map(([carried, r, s]) => {
      const css = is(r, s) ? (cut ? "band chosen cut" : "band chosen") : "band";
      const opacity = is(r, s) ? 1 : 0.18 + 0.5 * Math.sqrt(carried);
      return svg("path", { d: this.curve(r, s), class: css, "stroke-width": Math.max(0.6, RIVER.band * carried).toFixed(2), opacity: opacity.toFixed(3) });
    }));
    this.hits.replaceChildren(...drawn.slice(0, 160).map(([carried, r, s]) => {
      const title = svg("title", {}, `${this.model.readers[r]} reads ${this.model.sources[s]}: ${percent(carried)} of the prediction`);
      const hit = svg("path", { d: this.curve(r, s), class: "hit", "stroke-width": Math.max(7, RIVER.band * carried) }, title);
      hit.addEventListener("click", () => this.choose(r, s));
      return hit;
    }));
    this.nodes.replaceChildren(...nodes.map((carried, node) => svg("circle", { cx: RIVER.axis, cy: this.y(node), r: (1.6 + 6 * Math.sqrt(carried)).toFixed(1) })));
    for (const [node, text] of this.guesses) {
      const guess = guesses?.[node - 1];
      text.textContent = guess ? brief(word(guess[0])) : "";
      text.classList.toggle("right", Boolean(guess) && guess[0] === actual);
      text.style.setProperty("--sure", guess ? `${Math.round(66 + 34 * Math.sqrt(guess[1]))}%` : "0%");
    }
    this.svg.setAttribute("aria-label", label);
    redrawn(this.svg);
  }
}
