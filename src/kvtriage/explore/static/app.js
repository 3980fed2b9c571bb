// The wiring: what changes the state, and what is asked and shown when it has changed.

import { byId, make, setText } from "./dom.js";
import { Front } from "./front.js";
import { showAnswer } from "./panel.js";
import { Sliders } from "./sliders.js";
import { State } from "./state.js";
import { Strip, showKey, showStored } from "./strip.js";
import { Study } from "./study.js";

const WRITE_AFTER_MS = 250;

class Asking {
  constructor(path, onAnswer) {
    this.path = path;
    this.onAnswer = onAnswer;
    this.asked = null;
    this.busy = false;
  }

  // One question at a time; while it is open only the last of the next ones is kept.
  async ask(query) {
    if (query === this.asked) return;
    this.asked = query;
    if (this.busy) return;
    this.busy = true;
    let asked;
    let found;
    do {
      asked = this.asked;
      found = await get(`${this.path}?${asked}`);
    } while (asked !== this.asked);
    this.busy = false;
    document.querySelector("main").removeAttribute("aria-busy");
    if (found) this.onAnswer(found);
    else this.asked = null;
  }
}

async function get(path) {
  let found;
  try {
    const response = await fetch(path);
    found = await response.json();
  } catch {
    complain("The explorer does not answer. If you stopped it, start it again and reload.");
    return null;
  }
  complain(found.error ? `${found.error}: ${found.hint}` : "");
  return found.error ? null : found;
}

function complain(text) {
  const problem = byId("problem");
  setText(problem, text);
  problem.hidden = !text;
}

function showTitle(model) {
  const gpu = model.gpu ? `, on ${model.gpu}` : "";
  setText(byId("title"), model.title);
  document.title = `${model.title} · kvtriage explore`;
  setText(byId("subtitle"), `${model.model_type}, ${model.layers.length} layers, reads up to ${model.max_model_len.toLocaleString("en")} tokens${gpu}`);
}

function setUpButtons(model, state) {
  const holders = model.layers.flatMap((layer, index) => (layer.holds ? [index] : []));
  const toggleKind = (kind) => {
    const layers = holders.filter((index) => model.layers[index].kind === kind);
    const keep = layers.some((index) => !state.now.skip.has(index));
    const skip = new Set(state.now.skip);
    for (const index of layers) {
      if (keep) skip.add(index);
      else skip.delete(index);
    }
    state.change({ skip });
  };
  byId("kinds").replaceChildren(
    ...(model.kinds.length > 1 ? model.kinds : []).map((kind) => {
      const button = make("button", { type: "button", "data-kind": kind }, `Toggle ${kind}`);
      button.addEventListener("click", () => toggleKind(kind));
      return button;
    }),
  );
  byId("suspects").hidden = !model.suspects.length;
  byId("all-fp8").addEventListener("click", () => state.change({ skip: new Set() }));
  byId("all-bf16").addEventListener("click", () => state.change({ skip: new Set(holders) }));
  byId("suspects").addEventListener("click", () => state.change({ skip: new Set(state.model.suspects) }));
  byId("undo").addEventListener("click", () => state.undo());
  byId("reset").addEventListener("click", () => state.change(state.start()));
  byId("pin").addEventListener("click", () => state.change({ pinned: { skip: state.now.skip, scaling: state.now.scaling } }));
  byId("unpin").addEventListener("click", () => state.change({ pinned: null }));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "z" || !(event.ctrlKey || event.metaKey) || event.shiftKey) return;
    event.preventDefault();
    state.undo();
  });
}

async function begin() {
  const found = await get("/model");
  if (!found) return;
  let { model } = found;
  const answers = { mine: null, pinned: null };
  const state = new State(model, () => changed());
  const strip = new Strip(model, state);
  const sliders = new Sliders(model, state);
  const front = new Front(state);
  const present = () => answers.mine && showAnswer(answers.mine, state.now.pinned && answers.pinned);
  const mine = new Asking("/price", (answer) => {
    answers.mine = answer;
    strip.setToggles(answer.toggles);
    sliders.tell(answer.settings);
    showStored(answer.stored);
    present();
  });
  const pinned = new Asking("/price", (answer) => {
    answers.pinned = answer;
    present();
  });
  const fronts = new Asking("/front", (answer) => front.load(answer));
  let writing = 0;

  function changed() {
    strip.show();
    sliders.show();
    front.show();
    showKey(model, state.now.pinned !== null);
    byId("undo").disabled = !state.undone.length;
    byId("unpin").hidden = state.now.pinned === null;
    mine.ask(state.query());
    if (state.now.pinned) pinned.ask(state.query(state.now.pinned));
    else present();
    fronts.ask(state.query({ skip: new Set(), scaling: state.now.scaling }));
    clearTimeout(writing);
    writing = setTimeout(() => state.write(), WRITE_AFTER_MS);
  }

  // A record has appeared: the layers may have sensitivities now, and every answer may know more.
  async function refresh() {
    const fresh = await get("/model");
    if (!fresh) return;
    model = fresh.model;
    state.model = strip.model = model;
    strip.heated = null;
    byId("suspects").hidden = !model.suspects.length;
    for (const asking of [mine, pinned, fronts]) asking.asked = null;
    changed();
  }

  showTitle(model);
  setUpButtons(model, state);
  window.addEventListener("hashchange", () => {
    state.read();
    changed();
  });
  changed();
  if (found.is_case) new Study(refresh);
}

begin();
