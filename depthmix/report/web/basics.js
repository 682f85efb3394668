// Elements, numbers and names that all figures share. Text from outside enters the page as text nodes and attributes only.

const SVG = "http://www.w3.org/2000/svg";
const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
// Shares are sent as whole numbers of 1/1000, and changes of the loss as whole numbers of 1/1000 nats.
const SHARE = 1e3;
const NATS = 1e3;

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
const range = (n) => Array.from({ length: n }, (_, i) => i);
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

// Write a number with few digits and a true minus sign.
function number(value, digits = 3) {
  if (!known(value)) return "not a number";
  return String(+value.toPrecision(digits)).replaceAll("-", "−");
}

const signed = (value, digits) => (value > 0 ? "+" : "") + number(value, digits);

function percent(share) {
  if (!known(share)) return "not a number";
  const value = 100 * share;
  return `${number(value, Math.abs(value) < 1 ? 1 : Math.abs(value) < 99.5 ? 2 : 3)}%`;
}

// Write a probability as "1 in 82".
function oneIn(probability) {
  if (!known(probability)) return "not a number";
  if (probability < 1e-300) return "less than 1 in 10³⁰⁰";
  const n = 1 / probability;
  if (n >= 1e6) return `1 in ${number(n / 1e6, 2)} million`;
  return `1 in ${n < 9.95 ? n.toFixed(1).replace(/\.0$/, "") : Math.round(+n.toPrecision(3)).toLocaleString("en")}`;
}

const MARKS = { " ": "·", "\n": "↵", "\r": "␍", "\t": "⇥" };

// Split a token into text and marks for what cannot be seen: white space, control characters, and a combining mark's missing base.
function written(piece) {
  const code = (c) => `U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
  const parts = (/^\p{M}/u.test(piece) ? `◌${piece}` : piece).split(/([\p{C}\p{Z}])/u);
  return piece ? parts.map((part, i) => (i % 2 ? el("i", {}, MARKS[part] ?? code(part)) : part)) : [el("i", {}, "⋯")];
}

const visible = (piece) => written(piece).map((part) => part.textContent ?? part).join("");
// Text inside a sentence of the page: white space between words stays, what else cannot be seen is written out.
const running = (text) => text.trim().split(/(\s+)/).map((part, i) => (i % 2 ? " " : visible(part))).join("");
const word = (piece) => (/\S/.test(piece) ? running(piece) : visible(piece));
const quoted = (piece) => `“${word(piece)}”`;

// Name a token. One without text holds further bytes of the character before it.
function tokenName(tokens, i) {
  if (tokens[i]) return quoted(tokens[i]);
  const from = tokens.findLastIndex((piece, j) => j < i && piece);
  return from < 0 ? "without text" : `more bytes of ${quoted(tokens[from])}`;
}

// Names in figures, where space is short.
const brief = (name) => {
  const text = name.replace("attention", "attn");
  return text.length > 12 ? `${text.slice(0, 11)}…` : text;
};
// A label that may break after its colons and commas.
const breakable = (label) => label.split(/(?<=[:,/])/).flatMap((part, i) => (i ? [el("wbr"), part] : [part]));
const ALL = "all it reads";
// The names of the ways of the model with most of them, to choose from; empty if every reader has one.
const wayChoices = (models) => models.reduce((most, model) => (model.ways.length > most.length ? model.ways : most), []);

// Return a reader's values for the way of this name, or their mean over all ways. Models with fewer ways read queries and keys together.
function ofWay(model, ways, name) {
  if (name === ALL) return ways[0].map((_, s) => sum(ways.map((way) => way[s])) / ways.length);
  const own = model.ways.findIndex((way) => way === name || way.split(" and ").includes(name));
  return ways[clamp(own, 0, ways.length - 1)];
}

// Make the last focused element of a group its only tab stop; arrow keys move inside the group.
function oneTabStop(group) {
  group.addEventListener("focusin", ({ target }) => {
    group.querySelectorAll("[tabindex='0']").forEach((other) => (other.tabIndex = -1));
    target.tabIndex = 0;
  });
}

function select(label, options, value, onChange) {
  const made = el("select", { "aria-label": label }, ...options.map((text, i) => el("option", { value: i }, text)));
  made.value = value;
  made.addEventListener("change", () => onChange(+made.value));
  return made;
}

// A group of buttons of which one is pressed.
function choice(label, options, value, onChange) {
  const buttons = options.map((text, i) => el("button", { type: "button", "aria-pressed": i === value }, text));
  buttons.forEach((button, i) =>
    button.addEventListener("click", () => {
      buttons.forEach((other) => other.setAttribute("aria-pressed", other === button));
      onChange(i);
    }),
  );
  return el("span", { class: "choice", role: "group", "aria-label": label }, ...buttons);
}

// The numbers behind a figure as a table, built when it is opened and when the figure in `root` is drawn again.
function tableBehind(root, caption, { heading, rows }) {
  const details = el("details", { class: "numbers" }, el("summary", {}, "Show as a table"));
  const build = () => {
    details.querySelector(".scroll")?.remove();
    if (!details.open) return;
    const cells = (line, tag) => line.map((cell, i) => el(i ? tag : "th", { scope: tag === "th" ? "col" : i ? null : "row" }, cell));
    const body = rows().map((line) => el("tr", {}, ...cells(line, "td")));
    const table = el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, ...cells(heading(), "th"))), el("tbody", {}, ...body));
    details.append(el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, table));
  };
  details.addEventListener("toggle", build);
  root.addEventListener("redrawn", build);
  root.append(details);
}

const redrawn = (drawing) => drawing.dispatchEvent(new CustomEvent("redrawn", { bubbles: true }));
