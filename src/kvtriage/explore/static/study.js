// A study as it runs: one event for each change, none while nobody looks.

import { byId, draw, make, setText } from "./dom.js";

const WIDTH = 224;
const MARKS = { met: "✓", unmet: "✕", cannot_tell: "?" };
const WORDS = { met: "met", unmet: "not met", cannot_tell: "can't tell" };

export class Study {
  constructor(onRecord) {
    this.onRecord = onRecord;
    this.statuses = new Map();
    byId("study").hidden = false;
    document.addEventListener("visibilitychange", () => this.follow());
    this.follow();
  }

  follow() {
    if (document.hidden) {
      this.source?.close();
      this.source = null;
    } else if (!this.source) {
      this.source = new EventSource("/events");
      this.source.onmessage = (event) => this.show(JSON.parse(event.data));
      this.source.onerror = () => setText(byId("study-stage"), "not connected");
    }
  }

  show(snapshot) {
    const stage = byId("study-stage");
    if (this.records === undefined) byId("study-details").open = snapshot.stage !== "done";
    setText(stage, snapshot.stage === "done" ? "done" : `${snapshot.stage}: not done yet`);
    stage.classList.toggle("done", snapshot.stage === "done");
    const { problem, judgement } = snapshot;
    setText(byId("study-headline"), problem ? `${problem.sentence} (${problem.hint})` : judgement.headline);
    const widest = Math.max(snapshot.kl_margin, ...snapshot.arms.map((arm) => arm.high ?? arm.kl ?? 0));
    byId("study-arms").replaceChildren(...snapshot.arms.map((arm) => this.row(arm, judgement.clauses, widest, snapshot.kl_margin)));
    if (this.records !== undefined && this.records !== snapshot.records) this.onRecord();
    this.records = snapshot.records;
  }

  row(arm, clauses, widest, margin) {
    const done = arm.scored + arm.timed;
    const asked = arm.asked + arm.to_time;
    const count = arm.to_time ? `${arm.scored}/${arm.asked}, ${arm.timed}/${arm.to_time}` : `${arm.scored}/${arm.asked}`;
    const bar = make("progress", { max: asked, value: done, "aria-label": `${arm.label}: ${done} of ${asked}` });
    const chips = clauses.filter((clause) => clause.arm === arm.name).map((clause) => this.chip(clause));
    return make(
      "tr",
      { class: `arm-${arm.name}` },
      make("th", { scope: "row", class: "arm" }, arm.label),
      make("td", {}, bar, " ", make("span", { class: "count" }, count)),
      make("td", {}, ...(arm.kl === null ? [] : [interval(arm, widest, margin), make("span", { class: "count" }, arm.text)])),
      make("td", {}, make("div", { class: "chips" }, ...chips)),
    );
  }

  chip({ arm, clause, status, text }) {
    const key = `${arm} ${clause}`;
    const flipped = this.statuses.has(key) && this.statuses.get(key) !== status;
    this.statuses.set(key, status);
    const name = make("span", { class: "unseen" }, `: ${WORDS[status]}. ${text}`);
    return make("span", { class: `chip ${status}${flipped ? " flipped" : ""}`, title: text }, `${MARKS[status]} ${clause}`, name);
  }
}

function interval({ kl, low, high, label, text }, widest, margin) {
  const x = (value) => Math.min(WIDTH, Math.max(0, (value / widest) * WIDTH));
  const parts = [
    draw("line", { class: "base", x1: 0, x2: WIDTH, y1: 10, y2: 10 }),
    draw("line", { class: "margin", x1: x(margin), x2: x(margin), y1: 1, y2: 19 }),
  ];
  if (low !== null) parts.push(draw("line", { class: "band", x1: x(low), x2: x(high), y1: 10, y2: 10 }));
  parts.push(draw("circle", { class: "mean", cx: x(kl), cy: 10, r: 4 }));
  return draw("svg", { viewBox: `0 0 ${WIDTH} 20`, role: "img", "aria-label": `${label}: ${text}` }, ...parts);
}
