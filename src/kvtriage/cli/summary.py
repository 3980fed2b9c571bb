"""What a verdict and a dry run look like on the terminal."""

from __future__ import annotations

import shlex
import textwrap

from kvtriage.cli.terminal import one_line
from kvtriage.records.case import Plan, RepairChoice, Verdict

__all__ = ["render_choice", "render_verdict"]


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


def render_choice(choice: RepairChoice | None, num_layers: int) -> str:
    """'FP8 with per-head scales, 3 of 18 layers in BF16 (5, 11, 17)'."""
    match choice:
        case None:
            return "none"
        case RepairChoice(scaling="native"):
            return "BF16 in every layer"
        case RepairChoice(scaling=scaling, skip_layers=skip):
            scales = {"unit": "without calibration", "per_tensor": "with per-tensor scales"}.get(
                scaling, "with per-head scales"
            )
            if not skip:
                return f"FP8 {scales}, all {num_layers} layers"
            named = ", ".join(map(str, skip))
            return f"FP8 {scales}, {len(skip)} of {num_layers} layers in BF16 ({named})"
