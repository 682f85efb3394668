// A text as a row of buttons, one per token. Arrow keys move, Enter chooses.

class Sentence {
  constructor(text, choose) {
    this.text = text;
    this.root = el("div", { class: "tokens", role: "group", "aria-label": "words: arrow keys move, Enter chooses" });
    this.buttons = text.tokens.map((piece, i) => this.button(piece, i, choose));
    const last = el("button", { type: "button", class: "next", tabindex: -1, "aria-label": "the next word, after the end of the text" }, "…?");
    last.addEventListener("click", () => choose(text.tokens.length));
    this.buttons.push(last);
    this.buttons.forEach((button, i) => {
      this.root.append(button);
      if (text.tokens[i]?.includes("\n")) this.root.append(el("span", { class: "break" }));
    });
    this.root.addEventListener("keydown", (event) => this.move(event));
    oneTabStop(this.root);
  }

  button(piece, i, choose) {
    const button = el("button", { type: "button", tabindex: i === 1 ? 0 : -1 });
    button.append(...(/^ \S/.test(piece) ? written(piece.slice(1)) : written(piece)));
    if (i && !/^\s/.test(piece)) button.classList.add("joined");
    if (!i) {
      button.setAttribute("aria-disabled", true);
      button.title = "Nothing comes before the first word, so nothing predicts it";
    }
    button.addEventListener("click", () => i && choose(i));
    return button;
  }

  move(event) {
    const i = this.buttons.indexOf(document.activeElement), last = this.buttons.length - 1;
    const [up, along] = ARROWS[event.key] ?? [0, 0], ends = { Home: 0, End: last };
    if (i < 0 || !(up || along || event.key in ends)) return;
    event.preventDefault();
    this.buttons[up ? this.inNextLine(i, up) : (ends[event.key] ?? clamp(i + along, 0, last))].focus();
  }

  // The token nearest to this one in the line above (-1) or below (1).
  inNextLine(i, direction) {
    const place = (button) => button.getBoundingClientRect(), own = place(this.buttons[i]);
    const beyond = this.buttons.filter((other) => (place(other).top - own.top) * direction > own.height / 2);
    const far = (other) => Math.abs(place(other).top - own.top) * 1000 + Math.abs(place(other).left - own.left);
    return beyond.length ? this.buttons.indexOf(beyond.reduce((a, b) => (far(b) < far(a) ? b : a))) : i;
  }

  /* chosen: the word to mark. others: the losses of a second model, or null. A line below each word shows who found it easier, or its loss. */
  show(chosen, others) {
    const { tokens, losses } = this.text;
    this.buttons.forEach((button, i) => {
      button.setAttribute("aria-pressed", i === chosen);
      button.tabIndex = i === chosen ? 0 : -1;
      if (i >= tokens.length) return;
      const loss = losses[i], gain = others && known(loss) && known(others[i]) ? loss - others[i] : null;
      const size = gain === null ? (known(loss) ? loss / 12 : 0) : Math.abs(gain) / 2;
      button.style.setProperty("--part", `${Math.round(100 * Math.sqrt(clamp(size, 0, 1)))}%`);
      button.classList.toggle("first", gain !== null && gain < 0);
      button.classList.toggle("second", gain !== null && gain > 0);
      const easier = gain === null ? "" : Math.abs(gain) < 0.005 ? ", equally easy for both" : `, ${number(Math.abs(gain), 2)} nats easier for the ${gain < 0 ? "first" : "second"} model`;
      const said = `word ${i + 1}, ${tokenName(tokens, i)}${known(loss) ? `, ${oneIn(Math.exp(-loss))}` : ""}${easier}`;
      button.setAttribute("aria-label", said);
      if (i) button.title = said;
    });
    const row = this.root, line = this.buttons[chosen].offsetTop - row.offsetTop;
    if (line < row.scrollTop || line > row.scrollTop + row.clientHeight - 32) row.scrollTop = line - 32;
  }
}
