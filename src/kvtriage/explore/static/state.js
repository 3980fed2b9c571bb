// What is looked at, and the address that says so. A link reproduces the view; the part after # never leaves the browser.

const NUMBERS = ["context", "requests", "memory", "batched", "tp"];
const MOST_UNDONE = 200;

export function readRanges(text, count) {
  const found = new Set();
  for (const entry of text ? text.split(",") : []) {
    const ends = /^(\d{1,6})(?:-(\d{1,6}))?$/.exec(entry);
    if (!ends) continue;
    const last = Math.min(Number(ends[2] ?? ends[1]), count - 1);
    for (let layer = Number(ends[1]); layer <= last; layer += 1) found.add(layer);
  }
  return found;
}

export function nameRanges(layers) {
  const runs = [];
  for (const layer of [...layers].sort((a, b) => a - b)) {
    const run = runs.at(-1);
    if (run && layer === run[1] + 1) run[1] = layer;
    else runs.push([layer, layer]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(",");
}

export class State {
  constructor(model, onChange) {
    this.model = model;
    this.onChange = onChange;
    this.undone = [];
    this.read();
  }

  start() {
    const { start } = this.model;
    const settings = {
      context: start.context_len, requests: start.requests, memory: start.memory_bytes,
      batched: start.max_num_batched_tokens, tp: start.tensor_parallel_size,
    };
    return { skip: new Set(start.skip_layers), scaling: start.scaling, settings, pinned: null };
  }

  // Values that make no sense are passed over, so that an old or a mistyped link still opens.
  read() {
    const words = new URLSearchParams(location.hash.slice(1));
    const now = this.start();
    const holds = (layer) => this.model.layers[layer].holds;
    const layersOf = (text) => new Set([...readRanges(text, this.model.layers.length)].filter(holds));
    const scaling = (text) => (["per_head", "per_tensor", "unit"].includes(text) ? text : now.scaling);
    if (words.has("skip")) now.skip = layersOf(words.get("skip"));
    if (words.has("scaling")) now.scaling = scaling(words.get("scaling"));
    for (const name of NUMBERS) {
      const text = words.get(name) ?? "";
      if (/^\d{1,15}$/.test(text) && Number(text) > 0) now.settings[name] = Number(text);
    }
    now.settings.context = Math.min(now.settings.context, this.model.max_model_len);
    if (words.has("a")) now.pinned = { skip: layersOf(words.get("a")), scaling: scaling(words.get("a-scaling")) };
    this.now = now;
  }

  write() {
    const { skip, scaling, settings, pinned } = this.now;
    const words = new URLSearchParams({ skip: nameRanges(skip), scaling, ...settings });
    if (pinned) {
      words.set("a", nameRanges(pinned.skip));
      words.set("a-scaling", pinned.scaling);
    }
    history.replaceState(null, "", `#${words.toString().replaceAll("%2C", ",")}`);
  }

  // `keep` false is a step of a gesture that goes on: only its end can be undone.
  change(changes, keep = true) {
    if (keep) this.remember(this.now);
    this.now = { ...this.now, ...changes };
    this.onChange();
  }

  remember(before) {
    this.undone.push(before);
    if (this.undone.length > MOST_UNDONE) this.undone.shift();
  }

  undo() {
    if (!this.undone.length) return;
    this.now = this.undone.pop();
    this.onChange();
  }

  query({ skip, scaling } = this.now) {
    return new URLSearchParams({ skip: nameRanges(skip), scaling, ...this.now.settings }).toString();
  }
}
