"""What scales, sensitivities and a verdict look like on the terminal."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import click

from kvtriage.cli.case_folder.layout import CHECKPOINTS
from kvtriage.cli.terminal import one_line, say
from kvtriage.records.plan import Plan
from kvtriage.records.scales import HeldOutRow, ScaleRecord
from kvtriage.records.sensitivities import OperandRow, Sensitivities
from kvtriage.records.verdict import RepairChoice, Verdict
from kvtriage.report.numbers import percent
from kvtriage.report.terms import explain_terms
from kvtriage.stages.probes import UNIT

__all__ = ["print_scales", "print_told", "render_choice", "render_scales", "render_sensitivities", "render_verdict"]

_WORST = 5
"""Layers that are shown."""


def print_told(told: str) -> None:
    """Data on stdout; what terms in it mean, which a newcomer need not know, behind it on stderr."""
    click.echo(told)
    for meaning in explain_terms([told]):
        say(f"note: {meaning[:1].lower()}{meaning[1:]}")


def print_scales(record: ScaleRecord, case: Path) -> None:
    """`render_scales` on stdout; where the checkpoints lie, behind it on stderr."""
    click.echo(render_scales(record))
    for scaling, name in CHECKPOINTS.items():
        if (case / name).exists():
            say(f"checkpoint for vLLM, scales {scaling.replace('_', ' ')}: {case / name}")
    say(f"whether they are needed: kvtriage diagnose {case}")


def render_verdict(verdict: Verdict, plan: Plan, width: int | None = None) -> str:
    """Five lines, and below them the command to paste when there is one.

    Lines are folded at `width` columns, but for the command; None is for what is no terminal, where a line stays one.
    """
    longest = max(plan.study.buckets)
    if verdict.ratio_vs_bf16 is None:
        cache = "not chosen yet"
    else:
        cache = f"{verdict.ratio_vs_bf16:.2f}x the tokens of BF16 in the same memory, at {longest:,} tokens of context"
    why = verdict.sentences[0] if verdict.sentences else verdict.headline
    told = (
        ("verdict", verdict.headline),
        ("choice", render_choice(verdict.choice, len(plan.layers))),
        ("why", why),
        ("cache", cache),
        ("next", verdict.next_step),
    )
    lines = [line for name, text in told for line in _folded(f"{name:<{_HANGING}}{one_line(text)}", width)]
    if verdict.vllm_args:
        lines += ["", one_line(shlex.join([*verdict.server_env, "vllm", "serve", *verdict.vllm_args]))]
    return "\n".join(lines)


_HANGING = 9


def _folded(line: str, width: int | None) -> list[str]:
    if width is None:
        return [line]
    return textwrap.wrap(line, width, subsequent_indent=" " * _HANGING, break_on_hyphens=False)


_SCALINGS = {"unit": "scale 1", "per_tensor": "per tensor", "per_head": "per head"}


def render_scales(record: ScaleRecord) -> str:
    """What share of the held-out text leaves E4M3's range under each scaling, in the worst head of all layers."""
    lines = [f"{'held-out text, worst head':<30}{''.join(f'{name:>12}' for name in _SCALINGS.values())}"]
    for tensor in "kv":
        for what in ("saturated", "below the normal range"):
            shares = (_worst_share(record.held_out, scaling, tensor, what) for scaling in _SCALINGS)
            lines.append(f"{f'  {tensor.upper()} {what}':<30}{''.join(f'{share:>12}' for share in shares)}")
    return "\n".join(lines)


def _worst_share(rows: Sequence[HeldOutRow], scaling: str, tensor: str, what: str) -> str:
    shares = [
        row.saturated if what == "saturated" else row.below_normal
        for row in rows
        if (row.scaling, row.tensor) == (scaling, tensor)
    ]
    return percent(max(shares)) if shares else "-"


def render_sensitivities(record: Sensitivities) -> str:
    """The most damaged layers, what scales can repair, and what the probes cost."""
    damage = {row.layers[0]: row for row in record.layer_probes if row.format == UNIT}
    quality = {
        (row.layer_idx, row.operand): row for row in record.anatomy if row.treatment == "unit" and row.operand in "kv"
    }
    lines = ["layer   KL at scale 1   K dB   V dB   error of K and V by saturation, underflow, mantissa"]
    for layer, row in sorted(damage.items(), key=lambda item: -fmean(item[1].kl))[:_WORST]:
        sides = [quality[layer, operand] for operand in "kv" if (layer, operand) in quality]
        mark = " " if row.exact else "~"
        lines.append(
            f"{layer:>5} {mark}{fmean(row.kl):>14.2g} {''.join(map(_worst_db, sides))}  {_causes(sides)}".rstrip()
        )
    if quality:
        lines.append("(dB: signal over the noise of rounding, in the worst head; a healthy one has about 31)")
    if any(not row.exact for row in damage.values()):
        lines.append("(~ estimated)")
    lines += ["", *record.findings, f"Suspects: {record.explanation}."]
    if record.cost is not None and record.cost.screened:
        share = record.cost.evaluated / record.cost.naive
        probes = record.cost.exact + record.cost.screened
        lines.append(
            f"Of {probes} probes {record.cost.exact} were measured and the others estimated, "
            f"for {100 * share:.0f} % of the price of measuring all."
        )
    return "\n".join(lines)


def _worst_db(row: OperandRow) -> str:
    """Of the head with the least signal over noise."""
    known = [db for db in row.sqnr_db if db is not None]
    return f"{min(known):>7.1f}" if known else f"{'-':>7}"


def _causes(rows: Sequence[OperandRow]) -> str:
    """'0 %, 3 %, 97 %' of the squared error of K and V, all heads together."""
    parts = [sum(row.saturated) for row in rows], [sum(row.flushed) + sum(row.subnormal) for row in rows]
    saturated, underflow = (sum(part) for part in parts)
    whole = saturated + underflow + sum(sum(row.mantissa) for row in rows)
    if whole == 0:
        return ""
    return ", ".join(f"{100 * part / whole:.0f} %" for part in (saturated, underflow, whole - saturated - underflow))


def render_choice(choice: RepairChoice | None, num_layers: int) -> str:
    """'FP8 with per-head scales, 3 of 18 layers in BF16 (5, 11, 17)'."""
    match choice:
        case None:
            return "none"
        case RepairChoice(scaling="native"):
            return "BF16 in every layer"
        case RepairChoice(scaling=scaling, skip_layers=skip):
            scales = {"unit": "at scale 1", "per_tensor": "with per-tensor scales"}.get(scaling, "with per-head scales")
            if not skip:
                return f"FP8 {scales}, all {num_layers} layers"
            named = ", ".join(map(str, skip))
            return f"FP8 {scales}, {len(skip)} of {num_layers} layers in BF16 ({named})"
