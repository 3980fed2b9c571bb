// Sets of layers as points: tokens to the right, loss upwards; the line joins those that nobody would pass over.

import { byId, draw, setText } from "./dom.js";

const HEIGHT = 300;
const EDGE = { left: 56, right: 24, top: 30, bottom: 44 };
const NAMED = 5;

export class Front {
  constructor(state) {
    this.state = state;
    this.points = [];
    new ResizeObserver(() => this.points.length && this.width !== byId("front").clientWidth && this.render()).observe(byId("front"));
  }

  load({ loss_name: name, better, points }) {
    this.lossName = name;
    this.points = [...points].sort((a, b) => a.tokens - b.tokens || b.loss - a.loss);
    setText(byId("front-lead"), `To the right more tokens, downwards ${better}. Pick a point to try it.`);
    this.render();
  }

  render() {
    if (!this.points.length) {
      byId("front").replaceChildren("No set can be priced on this server.");
      return;
    }
    this.width = byId("front").clientWidth;
    const most = Math.max(...this.points.map((point) => point.tokens));
    const least = Math.min(...this.points.map((point) => point.tokens));
    const worst = Math.max(...this.points.map((point) => point.loss)) || 1;
    const span = most - least || 1;
    this.x = (tokens) => EDGE.left + ((tokens - least) / span) * (this.width - EDGE.left - EDGE.right);
    this.y = (loss) => HEIGHT - EDGE.bottom - (loss / worst) * (HEIGHT - EDGE.top - EDGE.bottom);
    const number = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
    const ground = HEIGHT - EDGE.bottom;
    const best = this.points.filter((point) => point.best);
    this.ring = draw("circle", { class: "now", r: 9, visibility: "hidden" });
    this.dots = this.points.map((point) => this.makeDot(point));
    byId("front").replaceChildren(
      draw(
        "svg",
        { width: this.width, height: HEIGHT, role: "group", "aria-label": `Sets of layers: reported tokens against ${this.lossName}` },
        draw("line", { class: "rule", x1: EDGE.left, x2: this.width - EDGE.right, y1: ground, y2: ground }),
        ...[least, (least + most) / 2, most].map((tokens) =>
          draw("text", { x: this.x(tokens), y: ground + 18, "text-anchor": "middle" }, number.format(tokens)),
        ),
        ...[0, worst / 2, worst].map((loss) => draw("text", { x: EDGE.left - 10, y: this.y(loss) + 4, "text-anchor": "end" }, number.format(loss))),
        draw("text", { x: this.width - EDGE.right, y: HEIGHT - 6, "text-anchor": "end" }, "reported tokens"),
        draw("text", { x: 0, y: 12 }, this.lossName),
        draw("path", { class: "line", d: best.map((point, index) => `${index ? "L" : "M"}${this.x(point.tokens)},${this.y(point.loss)}`).join("") }),
        ...this.dots,
        ...this.names(),
        this.ring,
      ),
    );
    this.show();
  }

  makeDot(point) {
    const at = { cx: this.x(point.tokens), cy: this.y(point.loss) };
    const dot = draw("circle", { ...at, class: `dot${point.best ? " best" : ""}`, r: point.best ? 5 : 4, tabindex: -1, role: "button", "aria-label": point.text });
    const pick = () => this.state.change({ skip: new Set(point.skip_layers) });
    dot.addEventListener("click", pick);
    for (const kind of ["pointerenter", "focus"]) dot.addEventListener(kind, () => setText(byId("point"), point.text));
    dot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (event.key === "Enter" || event.key === " ") pick();
      else if (step === undefined) return;
      else this.focus(this.dots.indexOf(dot) + step);
      event.preventDefault();
    });
    return dot;
  }

  focus(index) {
    const next = Math.min(this.dots.length - 1, Math.max(0, index));
    for (const dot of this.dots) dot.setAttribute("tabindex", "-1");
    this.dots[next].setAttribute("tabindex", "0");
    this.dots[next].focus();
  }

  // Names of their own for a few, where they run neither into each other nor into the line.
  names() {
    const taken = [];
    return this.points
      .filter((point) => !/most worth it/.test(point.name))
      .slice(0, 3 * NAMED)
      .flatMap((point) => {
        const [x, y] = [this.x(point.tokens), this.y(point.loss)];
        const right = x > this.width * 0.6;
        const box = { from: right ? x - 7 * point.name.length : x, to: right ? x : x + 7 * point.name.length, y };
        if (taken.some((other) => Math.abs(other.y - y) < 15 && box.from < other.to + 8 && box.to > other.from - 8)) return [];
        taken.push(box);
        const under = point.best && !right && point.loss > 0;
        return [draw("text", { class: "name", x: x + (right ? -10 : 10), y: under ? y + 15 : y - 6, "text-anchor": right ? "end" : "start" }, point.name)];
      });
  }

  // A ring around the point that is looked at, where it is one of them.
  show() {
    if (!this.dots?.length) return;
    const { skip } = this.state.now;
    const here = this.points.findIndex((point) => point.skip_layers.length === skip.size && point.skip_layers.every((layer) => skip.has(layer)));
    this.ring.setAttribute("visibility", here < 0 ? "hidden" : "visible");
    if (here >= 0) {
      this.ring.setAttribute("cx", `${this.x(this.points[here].tokens)}`);
      this.ring.setAttribute("cy", `${this.y(this.points[here].loss)}`);
    }
    if (!this.dots.some((dot) => dot === document.activeElement)) {
      this.dots.forEach((dot, index) => dot.setAttribute("tabindex", index === Math.max(0, here) ? "0" : "-1"));
    }
  }
}
