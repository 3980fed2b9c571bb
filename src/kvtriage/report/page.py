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

from kvtriage.records.case import Evidence, Plan, ScaleRecord, Sensitivities, Trial, Verdict
from kvtriage.records.frontier import Frontier
from kvtriage.report.arms import layer_ranges, style_of
from kvtriage.report.charts.svg import to_markup
from kvtriage.report.figures import FIGURES
from kvtriage.report.figures.base import Absent, Figure
from kvtriage.report.numbers import interval, percent, rounded, signed, times
from kvtriage.report.pools import reserved_pools
from kvtriage.report.quality import METRICS, Metric, drift_of
from kvtriage.report.tables import arm_rows, conditions, held_bytes, reason_groups, study_toml
from kvtriage.report.timings import latency_of
from kvtriage.report.view import CaseView
from kvtriage.stats import Interval
from kvtriage.units import format_tokens

__all__ = ["Tile", "render_report", "serve_command"]

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
class Tile:
    """One thing that the choice gains or gives up: a name, a number, and what it means."""

    name: str
    value: str
    meaning: str


def render_report(
    plan: Plan,
    scales: ScaleRecord,
    sensitivities: Sensitivities,
    evidence: Evidence,
    trials: Sequence[Trial],
    verdict: Verdict,
    frontier: Frontier | None = None,
) -> str:
    """One HTML document, from the records alone. Opens without network or server.

    Its content security policy lets nothing load and only the copy button's script run.
    """
    view = CaseView(plan, scales, sensitivities, evidence, tuple(trials), verdict, frontier)
    figures = {name: draw(view) for name, draw in FIGURES.items()}
    page = _environment().get_template(_TEMPLATE)
    return page.render(
        view=view,
        plan=plan,
        verdict=verdict,
        explanation=_as_sentence(sensitivities.explanation),
        style=Markup(_read("style.css")),
        script=Markup(_COPY_SCRIPT),
        script_hash=base64.b64encode(hashlib.sha256(_COPY_SCRIPT.encode()).digest()).decode(),
        figures=figures,
        command=serve_command(verdict.vllm_args, verdict.server_env) if verdict.choice is not None else "",
        choice=_describe_choice(view),
        excluded=_is_excluded(verdict),
        tiles=_tiles(view),
        arms=arm_rows(view),
        buckets=[format_tokens(bucket) for bucket in plan.study.buckets],
        held=held_bytes(view),
        pools=reserved_pools(view),
        reasons=reason_groups(view),
        conditions=conditions(view),
        study=study_toml(view),
        run_command=f"kvtriage run {shlex.quote(plan.model.source)} --data {shlex.quote(plan.data.source)} "
        "--study study.toml --out case/",
        warnings=(*plan.warnings, *scales.warnings),
    )


def serve_command(vllm_args: Sequence[str], server_env: Sequence[str] = ()) -> str:
    """A command for a POSIX shell, one flag a line; what the environment has to hold comes before it."""
    lines = [" ".join([*map(shlex.quote, server_env), "vllm serve"])]
    for argument in vllm_args:
        if argument.startswith("--"):
            lines.append(f"  {shlex.quote(argument)}")
        else:
            lines[-1] += f" {shlex.quote(argument)}"
    return " \\\n".join(lines)


def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["svg"] = _to_safe
    environment.tests["figure"] = lambda drawing: isinstance(drawing, Figure)
    environment.tests["absent"] = lambda drawing: isinstance(drawing, Absent)
    return environment


def _read(name: str) -> str:
    return resources.files("kvtriage.report").joinpath(name).read_text(encoding="utf-8")


def _to_safe(drawing: Element) -> Markup:
    """ElementTree has escaped every text and attribute in it."""
    return Markup(to_markup(drawing))


def _as_sentence(said: str) -> str:
    """Capital first, full stop last."""
    whole = said[:1].upper() + said[1:]
    return whole if whole.endswith((".", "!", "?")) else whole + "."


def _describe_choice(view: CaseView) -> str:
    choice = view.verdict.choice
    if choice is None:
        return "No choice yet"
    words = {"native": "BF16 cache", "unit": "FP8 at unit scale", "per_tensor": "FP8 with per-tensor scales"}
    name = words.get(choice.scaling, "FP8 with per-head scales")
    if choice.scaling == "native" or not choice.skip_layers:
        return name
    plural = "s" if len(choice.skip_layers) > 1 else ""
    return f"{name}, layer{plural} {layer_ranges(choice.skip_layers)} in BF16"


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
    longest = format_tokens(max(view.plan.study.buckets))
    tiles = []
    if view.verdict.ratio_vs_bf16 is not None:
        lost = " Every layer in FP8 would give 2.00×." if arm.skip_layers and arm.scaling != "native" else ""
        tiles.append(
            Tile("Cache", times(view.verdict.ratio_vs_bf16), f"the tokens of BF16, at {longest} of context.{lost}")
        )
    kl, nll, top1 = (_measure(view, metric) for metric in METRICS[:3])
    if arm.role == "baseline":
        tiles.append(Tile("Quality", "no drift", "BF16 is what everything else is compared with."))
    elif kl is not None and nll is not None and top1 is not None:
        tiles.append(
            Tile(
                "Quality",
                f"KL {rounded(kl.mean)}",
                f"nats per token ({interval(kl.low, kl.high)}); NLL {signed(nll.mean)}, "
                f"{percent(top1.mean)} of the most likely tokens change.",
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
    return Tile(
        "Decoding here",
        f"{percent(abs(change))} {'slower' if change > 0 else 'faster'}",
        f"per token at {format_tokens(longest)} of context, {style_of(chosen.arm).short}, on this machine; "
        "your server's will differ.",
    )
