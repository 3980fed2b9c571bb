// The layers as a strip of toggles. One of them takes part in the tab order; arrow keys move along.

import { byId, make, setText } from "./dom.js";

const CELL_PX = 37;

export class Strip {
  constructor(model, state) {
    this.model = model;
    this.state = state;
    this.toggles = new Map();
    this.shown = [];
    this.differing = new Set();
    this.gesture = null;
    this.root = byId("strip");
    this.cells = model.layers.map((layer, index) => this.makeCell(layer, index));
    this.root.replaceChildren(...this.cells);
    this.focused = Math.max(0, model.layers.findIndex((layer) => layer.holds));
    this.cells[this.focused].tabIndex = 0;
    this.listen();
    new ResizeObserver(() => this.fill()).observe(this.root);
  }

  // Rows of one length, the last one aside: as few rows as the width allows.
  fill() {
    const fit = Math.max(1, Math.floor(this.root.clientWidth / CELL_PX));
    const rows = Math.ceil(this.cells.length / fit);
    this.root.style.setProperty("--columns", `${Math.ceil(this.cells.length / rows)}`);
  }

  makeCell(layer, index) {
    const classes = `cell ${layer.kind}${layer.holds ? "" : " empty"}`;
    const cell = make("button", { type: "button", class: classes, tabindex: -1, "data-layer": index }, `${index}`);
    if (layer.holds) cell.setAttribute("aria-pressed", "false");
    else cell.setAttribute("aria-disabled", "true");
    cell.setAttribute("aria-label", this.name(index, false));
    return cell;
  }

  name(index, kept) {
    const layer = this.model.layers[index];
    return `Layer ${index}, ${layer.text}${layer.holds ? `, in ${kept ? "BF16" : "FP8"}` : ""}`;
  }

  // Only the cells that changed are touched.
  show() {
    const { skip, scaling, pinned } = this.state.now;
    this.cells.forEach((cell, index) => {
      const kept = skip.has(index);
      if (this.model.layers[index].holds && kept !== this.shown[index]) {
        cell.classList.toggle("kept", kept);
        cell.setAttribute("aria-pressed", `${kept}`);
        cell.setAttribute("aria-label", this.name(index, kept));
        this.shown[index] = kept;
      }
      const differs = pinned !== null && pinned.skip.has(index) !== kept;
      if (differs !== this.differing.has(index)) {
        cell.classList.toggle("differs", differs);
        if (differs) this.differing.add(index);
        else this.differing.delete(index);
      }
    });
    if (scaling !== this.heated) this.heat(scaling);
    this.describe();
  }

  heat(scaling) {
    const found = this.model.sensitivities[scaling];
    this.heated = scaling;
    this.cells.forEach((cell, index) => {
      const kl = found?.kl[index];
      cell.style.setProperty("--s", kl && found.worst ? `${Math.max(0, kl / found.worst)}` : "0");
    });
  }

  setToggles(toggles) {
    this.toggles = new Map(toggles.flatMap((toggle) => toggle.layers.map((layer) => [layer, toggle.text])));
    this.describe();
  }

  describe(index = this.pointed ?? null) {
    if (index === null) return;
    const { skip, scaling } = this.state.now;
    const layer = this.model.layers[index];
    const parts = [layer.text];
    if (layer.holds) {
      const alone = this.model.sensitivities[scaling]?.text[index];
      if (alone) parts.push(alone);
      const [is, becomes] = skip.has(index) ? ["BF16", "FP8"] : ["FP8", "BF16"];
      parts.push(`in ${is}; toggled to ${becomes}: ${this.toggles.get(index) ?? "…"}`);
    }
    const text = ` ${parts.join(" · ")}`;
    const line = byId("layer");
    if (line.textContent !== `Layer ${index}${text}`) line.replaceChildren(make("strong", {}, `Layer ${index}`), text);
  }

  focus(index) {
    this.cells[this.focused].tabIndex = -1;
    this.focused = index;
    this.cells[index].tabIndex = 0;
    this.cells[index].focus();
  }

  rowLength() {
    const top = this.cells[0].offsetTop;
    const next = this.cells.findIndex((cell) => cell.offsetTop !== top);
    return next < 0 ? this.cells.length : next;
  }

  paint(first, last, keep, base, remembered) {
    const skip = new Set(base);
    for (let index = Math.min(first, last); index <= Math.max(first, last); index += 1) {
      if (!this.model.layers[index].holds) continue;
      if (keep) skip.add(index);
      else skip.delete(index);
    }
    this.state.change({ skip }, remembered);
  }

  toggle(index) {
    if (this.model.layers[index].holds) this.paint(index, index, !this.state.now.skip.has(index), this.state.now.skip, true);
  }

  layerAt(target) {
    const cell = target instanceof Element ? target.closest(".cell") : null;
    return cell && this.root.contains(cell) ? Number(cell.dataset.layer) : null;
  }

  listen() {
    this.root.addEventListener("pointerdown", (event) => this.begin(event));
    this.root.addEventListener("pointermove", (event) => this.move(event));
    this.root.addEventListener("pointerup", () => this.end());
    this.root.addEventListener("pointercancel", () => this.cancel());
    window.addEventListener("pointerup", () => this.end());
    this.root.addEventListener("click", (event) => {
      const index = this.layerAt(event.target);
      if (index !== null && !this.justPainted) this.toggle(index);
      this.justPainted = false;
    });
    this.root.addEventListener("keydown", (event) => this.press(event));
    for (const kind of ["pointerover", "focusin"]) {
      this.root.addEventListener(kind, (event) => {
        this.pointed = this.layerAt(event.target) ?? this.pointed;
        this.describe();
      });
    }
  }

  begin(event) {
    const index = this.layerAt(event.target);
    this.justPainted = false;
    if (event.button !== 0 || index === null || !this.model.layers[index].holds) return;
    const before = this.state.now;
    this.gesture = { first: index, last: index, keep: !before.skip.has(index), before };
    if (this.root.hasPointerCapture?.(event.pointerId)) this.root.releasePointerCapture(event.pointerId);
    this.paint(index, index, this.gesture.keep, before.skip, false);
  }

  move(event) {
    if (!this.gesture) return;
    const index = this.layerAt(document.elementFromPoint(event.clientX, event.clientY));
    if (index === null || index === this.gesture.last) return;
    this.gesture.last = index;
    this.paint(this.gesture.first, index, this.gesture.keep, this.gesture.before.skip, false);
  }

  end() {
    if (!this.gesture) return;
    this.state.remember(this.gesture.before);
    this.gesture = null;
    this.justPainted = true;
    this.state.onChange();
  }

  cancel() {
    if (!this.gesture) return;
    const { before } = this.gesture;
    this.gesture = null;
    this.state.change({ skip: before.skip }, false);
  }

  press(event) {
    const index = this.layerAt(event.target);
    const row = () => this.rowLength();
    const moves = { ArrowRight: () => 1, ArrowLeft: () => -1, ArrowDown: row, ArrowUp: () => -row(), Home: () => -index, End: () => this.cells.length - 1 - index };
    if (index === null || !(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const next = Math.min(this.cells.length - 1, Math.max(0, index + moves[event.key]()));
    if (event.shiftKey && next !== index) {
      const { skip } = this.state.now;
      this.paint(index, next, this.model.layers[index].holds ? skip.has(index) : true, skip, true);
    }
    this.focus(next);
  }
}

export function showKey(model, hasPinned) {
  const entry = (classes, text) => make("li", {}, make("span", { class: `swatch ${classes}` }), text);
  const rows = [entry("kept", "BF16"), entry("", "FP8")];
  if (Object.keys(model.sensitivities).length) rows.push(entry("heat", "damage alone in FP8, against the worst layer's"));
  rows.push(...model.kinds.map((kind) => entry(`kind ${kind}`, kind)));
  if (hasPinned) rows.push(entry("differs", "differs from A"));
  byId("key").replaceChildren(...rows);
}

export function showStored(text) {
  setText(byId("stored"), text);
}
