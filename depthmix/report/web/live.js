// `depthmix explore`: a text goes to the server, and what layers read for it comes back.

function live(words) {
  const form = document.getElementById("words-form"), box = document.getElementById("words-text");
  const status = document.getElementById("words-status"), counter = document.getElementById("words-count");
  const button = form.querySelector("button");
  let shown = "";

  function say(text, wrong = false) {
    status.textContent = text;
    status.classList.toggle("wrong", wrong);
  }

  // Return the server's answer to a request, or throw its sentence.
  async function post(path, body) {
    let answer, found;
    try {
      answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
      found = await answer.json();
    } catch {
      throw new Error("There is no answer: is depthmix explore still running?");
    }
    if (!answer.ok) throw new Error(found.error);
    return found;
  }

  async function ask() {
    try {
      const text = box.value, { models } = await post("/text", { text });
      words.load(models);
      shown = text;
      say("");
    } catch (error) {
      // Maps of an earlier text would look like those of this one.
      words.load([]);
      say(error.message, true);
    }
  }

  async function count() {
    const text = box.value;
    if (!text.trim()) return void (counter.textContent = "");
    try {
      const { tokens, most } = await post("/count", { text });
      if (text !== box.value) return;
      counter.textContent = `${tokens} of at most ${most} tokens`;
      counter.classList.toggle("wrong", tokens > most);
    } catch {
      counter.textContent = "";
    }
  }

  words.ask = async (model, reader, source) => {
    try {
      return (await post("/cut", { text: shown, model, reader, source })).losses;
    } catch (error) {
      say(error.message, true);
      return null;
    }
  };
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    say("Computing…");
    await ask();
    button.disabled = false;
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !button.disabled) form.requestSubmit();
  });
  let waiting;
  box.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(count, 250);
  });
  return (models) => {
    box.value = shown = models.length ? models[0].text.tokens.join("") : "";
    count();
  };
}
