"""What a verdict and a dry run look like on the terminal."""

from __future__ import annotations

import shlex

from kvtriage.records.case import Plan, RepairChoice, Verdict

__all__ = ["render_choice", "render_verdict"]


def render_verdict(verdict: Verdict, plan: Plan) -> str:
    """Five lines, and below them the command to paste when there is one."""
    longest = max(plan.study.buckets)
    if verdict.ratio_vs_bf16 is None:
        cache = "not chosen yet"
    else:
        cache = f"{verdict.ratio_vs_bf16:.2f}x the tokens of BF16 in the same memory, at {longest:,} tokens of context"
    why = verdict.sentences[0] if verdict.sentences else verdict.headline
    lines = [
        f"verdict  {verdict.headline}",
        f"choice   {render_choice(verdict.choice, len(plan.layers))}",
        f"why      {why}",
        f"cache    {cache}",
        f"next     {verdict.next_step}",
    ]
    if verdict.vllm_args:
        lines += ["", shlex.join([*verdict.server_env, "vllm", "serve", *verdict.vllm_args])]
    return "\n".join(lines)


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
