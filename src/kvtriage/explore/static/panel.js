// What the explorer answered, shown as it stands: no figure is worked out here.

import { byId, make, setText } from "./dom.js";

const ROWS = [["held in decode", "held"], ["peak if steps overlap", "peak"], ["reserved for it", "reserved"], ["reported tokens", "tokens"], ["requests at once", "requests"]];

export function showAnswer(answer, pinned) {
  showTiles(answer, pinned);
  showColumns(answer, pinned);
  showCauses(answer.causes);
  showEffects(answer, pinned);
  showSaid(answer.said);
  showServe(answer, pinned);
  const load = byId("load");
  setText(load, answer.load);
  load.classList.toggle("over", !answer.fits);
}

function showTiles(answer, pinned) {
  const mine = answer.columns.at(-1);
  const theirs = pinned?.columns.at(-1);
  const tiles = [
    ["reported tokens", mine?.tokens, theirs?.tokens],
    ["held by a request", mine?.held, theirs?.held],
    ["tokens held, against BF16", answer.ratio_text, pinned?.ratio_text],
  ];
  setText(byId("summary"), `${mine?.tokens ?? "-"} tokens · ${mine?.held ?? "-"} held · ${answer.ratio_text}`);
  byId("tiles").replaceChildren(
    ...tiles.map(([name, value, other]) => {
      const tile = make("div", {}, make("dt", {}, name), make("dd", {}, ...(pinned ? [make("b", {}, "B")] : []), value ?? "not priced"));
      if (pinned) tile.append(make("dd", { class: "pinned" }, make("b", {}, "A"), other ?? "not priced"));
      return tile;
    }),
  );
}

function showColumns(answer, pinned) {
  const columns = answer.columns.map((column, index) => ({ ...column, mine: index === answer.columns.length - 1 }));
  if (pinned?.columns.length) columns.splice(-1, 0, { ...pinned.columns.at(-1), name: "A" });
  if (pinned && columns.length) columns.at(-1).name = "B, this policy";
  const cell = (column, text) => make("td", { class: `num${column.mine ? " mine" : ""}` }, text);
  const [head, body] = byId("columns").querySelectorAll("thead, tbody");
  head.replaceChildren(
    make("tr", {}, make("td"), ...columns.map((column) => make("th", { scope: "col", class: `num${column.mine ? " mine" : ""}` }, column.name))),
  );
  body.replaceChildren(
    ...ROWS.map(([name, key]) => make("tr", {}, make("th", { scope: "row" }, name), ...columns.map((column) => cell(column, column[key])))),
  );
}

function showCauses(causes) {
  byId("gap").hidden = causes.length === 0;
  byId("causes").querySelector("tbody").replaceChildren(
    ...causes.map((cause) =>
      make("tr", {}, make("th", { scope: "row" }, cause.name), make("td", { class: "num" }, cause.size), make("td", { class: "num" }, cause.tokens)),
    ),
  );
}

function showEffects(answer, pinned) {
  const rows = [];
  for (const [key, name] of [["damage", "expected damage: the sum of its layers', a guess"], ["latency", "a decoded token"]]) {
    const found = answer[key];
    if (!found) continue;
    const row = make("div", {}, make("dt", {}, name), make("dd", {}, found.text));
    if (pinned?.[key]) row.append(make("dd", { class: "note" }, `A: ${pinned[key].text}`));
    row.append(...found.notes.map((note) => make("dd", { class: "note" }, note)));
    rows.push(row);
  }
  byId("effects").hidden = rows.length === 0;
  byId("effects-list").replaceChildren(...rows);
}

function showSaid(said) {
  const line = ({ severity, sentence, hint }) =>
    make("li", { class: severity === "said" ? "said-so" : severity }, make("span", { class: "unseen" }, `${severity}: `), sentence, ...(hint ? [make("span", { class: "hint" }, hint)] : []));
  const lines = said.length ? said.map(line) : [make("li", { class: "said-so" }, "nothing is known against it")];
  const list = byId("said");
  const before = list.textContent;
  const fresh = make("ul", {}, ...lines);
  if (fresh.textContent !== before) list.replaceChildren(...fresh.children);
}

function showServe(answer, pinned) {
  const commands = [["", answer]];
  if (pinned) commands.splice(0, 1, ["B", answer], ["A", pinned]);
  byId("serve").replaceChildren(...commands.map(([name, each]) => command(name, each)));
}

function command(name, { serve, said }) {
  const label = name ? `Copy ${name}` : "Copy";
  const button = make("button", { type: "button", "aria-label": `${label}: the vllm serve line` }, label);
  button.addEventListener("click", () => copy(serve));
  const refused = said.some(({ severity }) => severity === "refused");
  const why = refused ? [make("p", { class: "why" }, "vLLM would not start with this")] : [];
  return make("div", { class: "command" }, ...why, make("pre", { tabindex: 0, "aria-label": `vllm serve line ${name}` }, ...flags(serve)), button);
}

// A flag and its value stay on one line where they fit on one.
function flags(serve) {
  return serve.split(/(?<= )(?=--)/).map((flag) => make("span", { class: "flag" }, flag));
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    setText(byId("copied"), "Copied.");
  } catch {
    setText(byId("copied"), "The browser did not allow it: select the line and copy it.");
  }
}
