"""The page: figures and tables into one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from xml.etree.ElementTree import Element

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from kvtriage.records.verdict import Verdict
from kvtriage.report.arms import style_of
from kvtriage.report.beside import encode_beside
from kvtriage.report.brief import describe_choice, tell_in_brief
from kvtriage.report.charts.svg import in_plain_sight, to_markup
from kvtriage.report.conditions import conditions, study_toml
from kvtriage.report.figures import FIGURES
from kvtriage.report.figures.base import Absent, Figure
from kvtriage.report.load import under_load
from kvtriage.report.numbers import Sentence, Shown, percent, rounded, say, signed, times
from kvtriage.report.pools import reserved_pools
from kvtriage.report.quality import METRICS, Metric, drift_of
from kvtriage.report.tables import arm_rows, held_bytes, price_table, reason_groups
from kvtriage.report.terms import explain_terms
from kvtriage.report.timings import latency_of
from kvtriage.report.view import CaseView
from kvtriage.stats import Interval, Line
from kvtriage.units import format_tokens

__all__ = ["Report", "Tile", "open_templates", "read_asset", "render_report", "serve_command"]

_TEMPLATE = "page.html.jinja"

_COPY_SCRIPT = """
for (const button of document.querySelectorAll("button[data-copy]")) {
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
"""


@dataclass(frozen=True)
class Report:
    """The page, and report.json, which holds its numbers unrounded."""

    html: str
    beside: bytes


@dataclass(frozen=True)
class Tile:
    """One thing that the choice gains or gives up: a name, a number, and what it means."""

    name: str
    value: Sentence
    meaning: Sentence

    @property
    def said(self) -> tuple[Sentence, Sentence]:
        return self.value, self.meaning


def render_report(view: CaseView) -> Report:
    """One HTML document, from the records alone. Opens without network or server.

    Its content security policy lets nothing load and only the copy button's script run.
    """
    plan, verdict = view.plan, view.verdict
    figures = {name: draw(view) for name, draw in FIGURES.items()}
    brief, prices, held, pools = tell_in_brief(view), price_table(view), held_bytes(view), reserved_pools(view)
    tiles, load = _tiles(view), under_load(view)
    page = open_templates().get_template(_TEMPLATE)
    html = page.render(
        view=view,
        brief=brief,
        terms=explain_terms(told.sentence.text for told in brief),
        plan=plan,
        verdict=verdict,
        explanation=_as_sentence(view.sensitivities.explanation),
        style=Markup(read_asset("style.css")),
        script=Markup(_COPY_SCRIPT),
        script_hash=base64.b64encode(hashlib.sha256(_COPY_SCRIPT.encode()).digest()).decode(),
        figures=figures,
        command=serve_command(verdict.vllm_args, verdict.server_env) if verdict.choice is not None else "",
        choice=describe_choice(verdict.choice, len(plan.layers)),
        excluded=_is_excluded(verdict),
        tiles=tiles,
        arms=arm_rows(view),
        buckets=[format_tokens(bucket) for bucket in plan.study.buckets],
        held=held,
        pools=pools,
        load=load,
        reasons=reason_groups(view),
        conditions=conditions(view),
        study=study_toml(view),
        run_command=f"kvtriage run {shlex.quote(plan.model.source)} --data {shlex.quote(plan.data.source)} "
        "--study study.toml --out case/",
        warnings=(*plan.warnings, *view.scales.warnings),
    )
    tables = {"prices": prices, "held": held and held[1], "pools": pools and pools[1], "load": load and load[1]}
    told = [
        *((told.lead, told.sentence) for told in brief),
        *((tile.name, part) for tile in tiles for part in tile.said),
    ]
    return Report(html, encode_beside(told, figures, tables))


def serve_command(vllm_args: Sequence[str], server_env: Sequence[str] = ()) -> str:
    """A command for a POSIX shell, one flag a line; what the environment has to hold comes before it."""
    lines = [" ".join([*map(shlex.quote, server_env), "vllm serve"])]
    for argument in vllm_args:
        if argument.startswith("--"):
            lines.append(f"  {shlex.quote(argument)}")
        else:
            lines[-1] += f" {shlex.quote(argument)}"
    return " \\\n".join(lines)


def open_templates() -> Environment:
    """Templates that escape whatever they are given."""
    environment = Environment(
        loader=FunctionLoader(read_asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=_finalize,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = _to_safe
    environment.tests["figure"] = lambda drawing: isinstance(drawing, Figure)
    environment.tests["absent"] = lambda drawing: isinstance(drawing, Absent)
    return environment


def read_asset(name: str) -> str:
    """A template or the style sheet, as it is shipped."""
    return resources.files("kvtriage.report").joinpath(name).read_text(encoding="utf-8")


def _finalize(value: object) -> object:
    """Text from elsewhere, before it is escaped; markup of our own is left as it is."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else in_plain_sight(value)


def _to_safe(drawing: Element) -> Markup:
    """ElementTree has escaped every text and attribute in it."""
    return Markup(to_markup(drawing))


def _as_sentence(said: str) -> str:
    """Capital first, full stop last."""
    whole = said[:1].upper() + said[1:]
    return whole if whole.endswith((".", "!", "?")) else whole + "."


def _is_excluded(verdict: Verdict) -> bool:
    """No choice for certain: each candidate fails a clause, and still BF16 was not chosen: the floor forbids it.

    Range alone keeps no candidate out of doubt, and a BF16 that falls short of its own floors leaves all in doubt.
    """
    if any(reason.clause == "baseline" and reason.status == "unmet" for reason in verdict.reasons):
        return False
    candidates = {reason.arm for reason in verdict.reasons if reason.clause == "capacity"}
    out = {reason.arm for reason in verdict.reasons if reason.status == "unmet" and reason.clause != "range"}
    return verdict.choice is None and bool(candidates) and candidates <= out


def _tiles(view: CaseView) -> tuple[Tile, ...]:
    """Cache, quality and speed of the chosen arm; none without a choice."""
    arm = next((arm for arm in view.evidence.arms if arm.name == view.verdict.arm), None)
    if arm is None or view.verdict.choice is None:
        return ()
    longest = Shown(max(view.plan.study.buckets), format_tokens(max(view.plan.study.buckets)))
    tiles = []
    if view.verdict.ratio_vs_bf16 is not None:
        ratio = view.verdict.ratio_vs_bf16
        tiles.append(
            Tile(
                "Cache",
                say("{ratio}", ratio=Shown(ratio, times(ratio))),
                say("the tokens of BF16, at {longest} of context.", longest=longest),
            )
        )
    kl, nll, top1 = (_measure(view, metric) for metric in METRICS[:3])
    if arm.role == "baseline":
        tiles.append(Tile("Quality", say("no drift"), say("BF16 is what everything else is compared with.")))
    elif kl is not None and nll is not None and top1 is not None:
        tiles.append(
            Tile(
                "Quality",
                say("KL {kl}", kl=Shown(kl.mean, rounded(kl.mean))),
                say(
                    "nats per token; NLL {nll}, {top1} of the most likely tokens change.",
                    nll=Shown(nll.mean, signed(nll.mean)),
                    top1=Shown(top1.mean, percent(top1.mean)),
                ),
            )
        )
    speed = _speed(view)
    return (*tiles, speed) if speed is not None else tuple(tiles)


def _measure(view: CaseView, metric: Metric) -> Interval | None:
    arm = next(arm for arm in view.evidence.arms if arm.name == view.verdict.arm)
    drift = drift_of(view, metric, arm, None)
    return None if drift is None else drift.interval


def _speed(view: CaseView) -> Tile | None:
    """ITL against BF16's at the longest length timed, from the lines; None without both."""
    timings = latency_of(view)
    baseline = next((entry.itl for entry in timings if entry.arm.role == "baseline"), None)
    chosen = next((entry for entry in timings if view.is_chosen(entry.arm) and entry.arm.role != "baseline"), None)
    if baseline is None or chosen is None or chosen.itl is None:
        return None
    longest = max(trial.context_len for trial in chosen.trials)
    if baseline.at(longest) <= 0:
        return None
    change = chosen.itl.at(longest) / baseline.at(longest) - 1
    length, arm = Shown(longest, format_tokens(longest)), style_of(chosen.arm).short
    if _overlap(chosen.itl, baseline, longest, view.plan.study.rule.confidence):
        said = say(
            "against BF16 at {longest} of context, {arm}: the lines lie within their errors.", longest=length, arm=arm
        )
        return Tile("Decoding here", say("can't tell"), said)
    return Tile(
        "Decoding here",
        say("{change} {word}", change=Shown(change, percent(abs(change))), word="slower" if change > 0 else "faster"),
        say(
            "per token at {longest} of context, {arm}, on this machine; your server's will differ.",
            longest=length,
            arm=arm,
        ),
    )


def _overlap(line: Line, other: Line, length: float, confidence: float) -> bool:
    """Whether the bands of two lines meet at `length`; a line without a band tells nothing."""
    bands = line.band_at(length, confidence), other.band_at(length, confidence)
    if bands[0] is None or bands[1] is None:
        return True
    return bands[0][0] <= bands[1][1] and bands[1][0] <= bands[0][1]
