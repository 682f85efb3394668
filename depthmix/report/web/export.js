// Copy a figure as SVG or PNG. Where the browser has no clipboard for the page, the figure is downloaded.

const EXPORTED = ["fill", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "opacity", "font-size", "font-weight", "font-family", "text-anchor"];

// Browsers compute mixed colours as color(srgb r g b / a), which few programs read.
function plainColour(value) {
  const parts = value.match(/^color\(srgb ([\d.e-]+) ([\d.e-]+) ([\d.e-]+)(?: \/ ([\d.e-]+))?\)$/);
  if (!parts) return value;
  const [r, g, b] = parts.slice(1, 4).map((part) => Math.round(255 * part));
  return parts[4] ? `rgba(${r}, ${g}, ${b}, ${parts[4]})` : `rgb(${r}, ${g}, ${b})`;
}

// Write a drawing as a file of its own, with the styles that the page gives it.
function svgText(drawing, title) {
  const copy = drawing.cloneNode(true);
  const originals = [drawing, ...drawing.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((node, i) => {
    const style = getComputedStyle(originals[i]);
    for (const name of EXPORTED) node.setAttribute(name, plainColour(style.getPropertyValue(name)));
    node.removeAttribute("class");
    node.removeAttribute("style");
  });
  copy.querySelectorAll("[data-unseen]").forEach((node) => node.remove());
  copy.querySelectorAll("[data-exported]").forEach((node) => node.removeAttribute("display"));
  const [width, height, margin] = sizeOf(drawing), head = 0.07 * width, page = getComputedStyle(document.body);
  const box = { x: -margin, y: -head - margin, width, height };
  const ground = svg("rect", { ...box, fill: plainColour(page.backgroundColor) });
  const letters = Math.min(0.6 * head, (1.7 * width) / title.length);
  const said = svg("text", { y: -0.4 * head, "font-size": letters, "font-weight": 600, "font-family": page.fontFamily, fill: plainColour(page.color) }, title);
  copy.prepend(ground, said);
  fill(copy, { xmlns: SVG, width, height, viewBox: Object.values(box).join(" ") }, []);
  return new XMLSerializer().serializeToString(copy);
}

// The size of a drawing with its title and margin, in its own units, and the margin.
function sizeOf(drawing) {
  const { width, height } = drawing.viewBox.baseVal, margin = 0.02 * width, whole = width + 2 * margin;
  return [whole, height + 0.07 * whole + 2 * margin, margin];
}

async function pngOf(drawing, title) {
  const [width, height] = sizeOf(drawing), scale = Math.max(2, 1200 / width);
  const image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(svgText(drawing, title))}`;
  await image.decode();
  const canvas = el("canvas", { width: scale * width, height: scale * height });
  canvas.getContext("2d").drawImage(image, 0, 0, scale * width, scale * height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

function download(blob, name) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// The buttons of a figure. `find` returns its drawing when a button is pressed.
function exportButtons(title, find) {
  const name = title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "figure";
  const said = el("span", { role: "status" });
  const button = (text, hint, make) => {
    const made = el("button", { type: "button", title: hint, "aria-label": `${hint}: ${title}` }, text);
    made.addEventListener("click", async () => {
      const drawing = find();
      said.textContent = drawing ? await make(drawing) : "";
      setTimeout(() => (said.textContent = ""), 2500);
    });
    return made;
  };
  const asSvg = button("SVG", "Copy the figure as SVG", async (drawing) => {
    const text = svgText(drawing, title);
    try {
      await navigator.clipboard.writeText(text);
      return "copied";
    } catch {
      download(new Blob([text], { type: "image/svg+xml" }), `${name}.svg`);
      return "downloaded";
    }
  });
  const asPng = button("PNG", "Copy the figure as PNG", async (drawing) => {
    const blob = await pngOf(drawing, title);
    try {
      await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
      return "copied";
    } catch {
      download(blob, `${name}.png`);
      return "downloaded";
    }
  });
  return el("span", { class: "export" }, said, asSvg, asPng);
}

// A figure with its title, export buttons, caption and the table behind it. `body` holds one svg.
function figure(title, body, { caption = "", table = null, controls = [] } = {}) {
  const head = el("div", { class: "head" }, el("h3", {}, ...breakable(title)), ...controls, exportButtons(title, () => body.querySelector("svg")));
  const made = el("figure", {}, head, body);
  if (caption) made.append(el("figcaption", {}, caption));
  if (table) tableBehind(made, title, table);
  return made;
}
