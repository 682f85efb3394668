// The box of `depthmix explore`: its text goes to the server, what comes back to the explorer.
"use strict";
(() => {
  const form = document.getElementById("explorer-form");
  const box = document.getElementById("explorer-text");
  const status = document.getElementById("explorer-status");
  const button = form.querySelector("button");

  function say(text, wrong = false) {
    status.textContent = text;
    status.classList.toggle("wrong", wrong);
  }

  async function ask() {
    const headers = { "Content-Type": "application/json" };
    const body = JSON.stringify({ text: box.value });
    let answer, found;
    try {
      answer = await fetch("/text", { method: "POST", headers, body });
      found = await answer.json();
    } catch {
      return say("There is no answer: is depthmix explore still running?", true);
    }
    if (!answer.ok) return say(found.error, true);
    document.getElementById("explorer").dispatchEvent(new CustomEvent("explore", { detail: found.models }));
    say("");
  }

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
  const [first] = JSON.parse(document.getElementById("explorer-data").textContent);
  box.value = first ? first.tokens.join("") : "";
})();
