// The token explorer: a text as a row of tokens and, for the chosen one, the weights with which every reader read.
// The data comes from explorer.py. Text of the user's goes into the page as text nodes and attributes alone.
"use strict";
(() => {
  const root = document.getElementById("explorer");
  if (!root) return;
  const WAYS = { 2: ["queries and keys", "values"], 3: ["queries", "keys", "values"] };
  const MARKS = { " ": "·", "\n": "↵", "\r": "␍", "\t": "⇥" };
  const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  let models = [];
  let shown = []; // which of them, by panel
  let panels = [];
  let worst = 1; // the largest loss of any model, so that one colour means one loss

  function el(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  const clamp = (i, last) => Math.min(last, Math.max(0, i));
  const number = (w, digits = 4) => (w === null ? "not a number" : String(+w.toPrecision(digits)).replaceAll("-", "−"));
  const readerName = (reader) => (reader.name === "finish" ? "finish" : `${reader.name} ${reader.block}`);

  // What cannot be seen is written out, in <i>: white space and control characters; a mark that would join what stands before it gets a place.
  function written(piece) {
    const code = (c) => `U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
    const parts = (/^\p{M}/u.test(piece) ? `◌${piece}` : piece).split(/([\p{C}\p{Z}])/u);
    return piece ? parts.map((part, i) => (i % 2 ? el("i", {}, MARKS[part] ?? code(part)) : part)) : [el("i", {}, "⋯")];
  }

  const visible = (piece) => written(piece).map((part) => part.textContent ?? part).join("");

  // A token without text has only more bytes of the character before it.
  function tokenName(tokens, i) {
    if (tokens[i]) return `“${visible(tokens[i])}”`;
    const from = tokens.findLastIndex((piece, j) => j < i && piece);
    return from < 0 ? "without text" : `more bytes of “${visible(tokens[from])}”`;
  }

  // In a group that arrow keys move through, what had the focus last has the tab stop.
  function oneStop(group) {
    group.addEventListener("focusin", ({ target }) => {
      group.querySelectorAll("[tabindex='0']").forEach((other) => (other.tabIndex = -1));
      target.tabIndex = 0;
    });
  }

  // The token nearest to this one in the line above (-1) or below (1).
  function inNextLine(buttons, i, direction) {
    const place = (button) => button.getBoundingClientRect();
    const own = place(buttons[i]);
    const beyond = buttons.filter((other) => (place(other).top - own.top) * direction > own.height / 2);
    const far = (other) => Math.abs(place(other).top - own.top) * 1000 + Math.abs(place(other).left - own.left);
    return beyond.length ? buttons.indexOf(beyond.reduce((a, b) => (far(b) < far(a) ? b : a))) : i;
  }

  class Panel {
    constructor(model, select, way) {
      this.model = model;
      const ways = Math.max(...model.readers.map((reader) => reader.ways));
      this.way = way < ways ? way : 0;
      const all = [model.mean, ...model.weights].flat(3).filter((w) => w !== null);
      this.most = all.reduce((a, w) => Math.max(a, Math.abs(w)), 0) || 1;
      this.signed = all.some((w) => w < 0);
      this.buttons = model.tokens.map((piece, i) => this.button(piece, i));
      this.about = el("p", { class: "about", "aria-live": "polite" });
      this.readout = el("p", { class: "readout" });
      this.cells = [];
      const head = el("div", { class: "head" }, select ?? el("strong", {}, model.label), ways > 1 ? this.waySelect(ways) : "");
      const deep = model.readers.length > 48; // two maps beside each other would be cut off: one below the other
      const maps = el("div", { class: deep ? "maps deep" : "maps" }, this.map("this token"), this.map(`mean over ${model.mean_over}`));
      const losses = el("p", { class: "legend" }, "loss 0 ", el("span", { class: "ramp" }), ` ${number(worst, 2)} nats`);
      this.root = el("div", { class: "panel", role: "group", "aria-label": model.label });
      this.root.append(head, this.row(), losses, this.about, this.readout, this.weightLegend(), maps);
    }

    waySelect(ways) {
      const names = WAYS[ways] ?? Array.from({ length: ways }, (_, w) => `mixture ${w + 1}`);
      const select = el("select", { class: "way" }, ...names.map((name, w) => el("option", { value: w }, name)));
      select.value = this.way;
      select.addEventListener("change", () => this.show(this.token, +select.value));
      return el("label", {}, "attention reads for ", select);
    }

    button(piece, i) {
      const loss = this.model.losses[i];
      const said = `token ${i + 1}, ${tokenName(this.model.tokens, i)}, ${loss === null ? "no loss" : `loss ${number(loss)}`}`;
      const button = el("button", { type: "button", tabindex: i ? -1 : 0, title: said, "aria-label": said });
      button.append(...written(piece));
      if (loss === null) button.classList.add("none");
      else button.style.setProperty("--part", `${100 * (loss / worst)}%`);
      button.addEventListener("click", () => choose(this, i));
      return button;
    }

    row() {
      const row = el("div", { class: "tokens", role: "group", "aria-label": "tokens: arrow keys move, Enter chooses" });
      this.model.tokens.forEach((piece, i) => {
        row.append(this.buttons[i]);
        if (piece.includes("\n")) row.append(el("span", { class: "break" }));
      });
      row.addEventListener("keydown", (event) => {
        const i = this.buttons.indexOf(document.activeElement), last = this.buttons.length - 1;
        const [up, along] = ARROWS[event.key] ?? [0, 0];
        const ends = { Home: 0, End: last };
        if (i < 0 || !(up || along || event.key in ends)) return;
        event.preventDefault();
        const to = up ? inNextLine(this.buttons, i, up) : (ends[event.key] ?? clamp(i + along, last));
        this.buttons[to].focus();
      });
      oneStop(row);
      return row;
    }

    // Colours grow with the root of the weight, or small ones could not be told apart.
    paint(box, w) {
      box.style.setProperty("--part", `${100 * Math.sqrt(Math.abs(w ?? 0) / this.most)}%`);
      box.classList.toggle("negative", w < 0);
      box.classList.toggle("unknown", w === null);
      return box;
    }

    weightLegend() {
      const weights = [...(this.signed ? [-1, -1 / 4] : []), 0, 1 / 16, 1 / 4, 9 / 16, 1].map((part) => part * this.most);
      const swatch = (w) => el("span", {}, this.paint(el("span", { class: "swatch" }), w), number(w, 2));
      return el("p", { class: "legend" }, "weight", ...weights.map(swatch));
    }

    // A triangle of cells, readers by sources: a table whose cells arrow keys move through.
    map(title) {
      const { readers, sources } = this.model;
      const names = [...new Set(readers.map((reader) => reader.name))];
      const begins = (r) => r < 1 || readers[r].block !== readers[r - 1].block;
      const kind = (r) => ({ class: begins(r) ? "begins" : "", "data-kind": r < 0 ? "" : names.indexOf(readers[r].name) });
      const heads = sources.map((name, s) => el("th", { scope: "col", ...kind(s - 1) }, el("span", {}, name)));
      const cells = readers.map((_, r) => Array.from({ length: r + 1 }, () => el("td", { role: "gridcell", tabindex: -1 })));
      cells[0][0].tabIndex = 0;
      const rows = readers.map((reader, r) => el("tr", {}, el("th", { scope: "row", ...kind(r) }, readerName(reader)), ...cells[r]));
      const body = el("tbody", {}, ...rows);
      const place = (target) => {
        const r = rows.indexOf(target.parentElement);
        return r < 0 || target.tagName !== "TD" ? null : [r, cells[r].indexOf(target)];
      };
      for (const event of ["pointerover", "focusin"]) {
        body.addEventListener(event, ({ target }) => place(target) && panels.forEach((p) => p.point(...place(target))));
      }
      body.addEventListener("keydown", (event) => {
        const at = place(event.target), by = ARROWS[event.key];
        if (!at || !by) return;
        event.preventDefault();
        const r = clamp(at[0] + by[0], cells.length - 1);
        cells[r][clamp(at[1] + by[1], r)].focus();
      });
      oneStop(body);
      this.cells.push(cells);
      const table = el("table", { role: "grid", "aria-label": `${title}: weights by reader and source` });
      table.classList.toggle("many", sources.length > 16);
      table.style.setProperty("--n", sources.length);
      table.append(el("thead", {}, el("tr", {}, el("td"), ...heads)), body);
      return el("figure", {}, el("figcaption", {}, title), el("div", { class: "scroll" }, table));
    }

    // The weights of a reader; one that reads a single mixture has it for every way.
    weights(of, r) {
      return of[r][Math.min(this.way, of[r].length - 1)];
    }

    show(token, way = this.way) {
      const { tokens, losses, readers, sources, mean, weights } = this.model;
      this.token = token;
      this.way = way;
      this.buttons.forEach((button, i) => button.setAttribute("aria-pressed", i === token));
      const row = this.buttons[token].parentElement, line = this.buttons[token].offsetTop - row.offsetTop;
      if (line < row.scrollTop || line > row.scrollTop + row.clientHeight - 32) row.scrollTop = line - 32;
      const loss = losses[token];
      let chance = token ? "its loss is not a number" : "it has no loss, since nothing comes before it";
      if (loss !== null) chance = `loss ${number(loss)} nats, a probability of ${number(100 * Math.exp(-loss), 3)}%`;
      this.about.replaceChildren(`Token ${token + 1} of ${tokens.length}, `, el("bdi", {}, tokenName(tokens, token)), `: ${chance}.`);
      [weights[token], mean].forEach((of, m) => this.cells[m].forEach((row, r) => row.forEach((cell, s) => {
        const w = this.weights(of, r)[s];
        const said = `${readerName(readers[r])} reads ${sources[s]}: ${number(w)}`;
        this.paint(cell, w);
        cell.setAttribute("aria-label", said);
        cell.title = said;
      })));
      this.point(...(this.at ?? [readers.length - 1, sources.length - 1]));
    }

    point(r, s) {
      const { readers, sources, mean, weights } = this.model;
      if (r >= readers.length) return;
      this.at = [r, s];
      this.root.querySelectorAll(".at").forEach((cell) => cell.classList.remove("at"));
      for (const cells of this.cells) cells[r][s].classList.add("at");
      const own = this.weights(weights[this.token], r);
      const most = own.map((w, j) => [Math.abs(w ?? 0), j]).sort((a, b) => b[0] - a[0]).slice(0, 3);
      let rest = `It reads most from ${most.map(([, j]) => `${sources[j]} (${number(own[j], 3)})`).join(", ")}.`;
      if (own.every((w) => w === own[0])) rest = own.length > 1 ? "It reads everything alike." : "There is nothing else to read.";
      this.readout.replaceChildren(
        el("b", {}, `${readerName(readers[r])} reads ${sources[s]}`),
        `: weight ${number(own[s])} for this token, ${number(this.weights(mean, r)[s])} in the mean. `,
        rest,
      );
    }
  }

  // Another model may cut the text differently: there it is the token in which the chosen one begins.
  function choose(panel, token) {
    const own = panel.model.tokens, begin = own.slice(0, token).join("").length;
    for (const other of panels) {
      let end = 0;
      const there = other.model.tokens.findIndex((piece) => (end += piece.length) > begin);
      other.show(other.model.tokens.join("\0") === own.join("\0") ? token : Math.max(0, there));
    }
  }

  function modelSelect(which) {
    const select = el("select", { class: "model", "aria-label": `model ${which + 1}` });
    models.forEach((model, i) => select.append(el("option", { value: i }, model.label)));
    select.value = shown[which];
    select.addEventListener("change", () => {
      shown[which] = +select.value;
      draw(1 - which, panels[1 - which].token);
      root.querySelectorAll("select.model")[which].focus();
    });
    return select;
  }

  function draw(which, token) {
    const ways = panels.map((panel) => panel.way);
    panels = shown.map((i, p) => new Panel(models[i], models.length > 1 ? modelSelect(p) : null, ways[p] ?? 0));
    root.querySelector(".panels").replaceChildren(...panels.map((panel) => panel.root));
    choose(panels[which], token);
  }

  function start(found) {
    models = found;
    if (!models.length) return;
    if (shown.length !== Math.min(2, models.length)) shown = models.slice(0, 2).map((_, i) => i);
    worst = Math.max(1e-3, ...models.flatMap((model) => model.losses));
    const losses = models[shown[0]].losses;
    draw(0, losses.reduce((hardest, loss, i) => (loss > losses[hardest] ? i : hardest), 0));
  }

  root.addEventListener("explore", (event) => start(event.detail)); // another text
  start(JSON.parse(document.getElementById("explorer-data").textContent));
})();
