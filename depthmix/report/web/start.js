// Draw the page from its data. What is out of sight is drawn when it is opened or comes near.

const data = JSON.parse(document.getElementById("page-data").textContent);

function whenNear(root, draw) {
  const watcher = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    watcher.disconnect();
    draw();
  }, { rootMargin: "600px" });
  watcher.observe(root);
  // A printer sees everything at once.
  addEventListener("beforeprint", () => {
    watcher.disconnect();
    if (!root.querySelector("svg")) draw();
  }, { once: true });
}

const wordsRoot = document.getElementById("words");
if (wordsRoot) {
  const words = new Words(wordsRoot, null);
  const begin = data.live ? live(words) : () => {};
  const models = data.live ?? data.models.filter((model) => model.text);
  begin(models);
  words.load(models);
}
const effectsRoot = document.querySelector(".effects");
if (effectsRoot) offerEffects(effectsRoot, data);
for (const [id, draw] of [
  ["maps", (root) => new Maps(root, data.models)],
  ["depth", (root) => depthChart(root, data.models)],
  ["curves", (root) => lossCurves(root, data.curves, data.units)],
]) {
  const root = document.getElementById(id);
  if (root) whenNear(root, () => draw(root));
}
document.querySelectorAll("details.inside").forEach((details, i) =>
  details.addEventListener("toggle", () => details.open && !details.querySelector(".grid") && new Inside(details, data.models[i])),
);
