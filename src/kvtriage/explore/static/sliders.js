// The server's settings. A slider moves along stops; a value from a link may lie between them and stays as it is.

import { byId, make, setText } from "./dom.js";

const NAMES = { context: "context of a request", requests: "requests at once", memory: "cache memory of a GPU", batched: "tokens of a step", tp: "tensor parallel" };

export class Sliders {
  constructor(model, state) {
    this.state = state;
    this.stops = model.stops;
    this.inputs = new Map();
    byId("sliders").replaceChildren(...Object.keys(NAMES).map((name) => this.build(name)));
    for (const radio of document.querySelectorAll("input[name=scaling]")) {
      radio.addEventListener("change", () => state.change({ scaling: radio.value }));
    }
  }

  build(name) {
    const input = make("input", { type: "range", id: `set-${name}`, min: 0, step: 1 });
    const output = make("output", { for: `set-${name}`, id: `is-${name}` });
    input.addEventListener("input", () => {
      const settings = { ...this.state.now.settings, [name]: this.values(name)[Number(input.value)] };
      const before = this.before ?? this.state.now;
      this.before = before;
      this.state.change({ settings }, false);
    });
    input.addEventListener("change", () => {
      if (this.before) this.state.remember(this.before);
      this.before = null;
      this.state.onChange();
    });
    this.inputs.set(name, { input, output });
    return make("div", { class: "slider" }, make("label", { for: `set-${name}` }, NAMES[name]), output, input);
  }

  values(name) {
    const value = this.held?.[name] ?? this.state.now.settings[name];
    return [...new Set([...this.stops[name], value])].sort((a, b) => a - b);
  }

  // While a slider is held its stops stay as they were, so that it does not jump under the hand.
  show() {
    const { settings, scaling } = this.state.now;
    if (!this.before) this.held = { ...settings };
    for (const [name, { input }] of this.inputs) {
      const values = this.values(name);
      input.max = `${values.length - 1}`;
      input.value = `${values.indexOf(settings[name])}`;
    }
    for (const radio of document.querySelectorAll("input[name=scaling]")) radio.checked = radio.value === scaling;
  }

  tell(words) {
    for (const [name, { input, output }] of this.inputs) {
      setText(output, words[name]);
      input.setAttribute("aria-valuetext", words[name]);
    }
  }
}
