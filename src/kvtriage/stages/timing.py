"""How an arm's times compare with BF16's over the traffic, in one sentence."""

from __future__ import annotations

from kvtriage.records.latency import crossing_of, expected_times, traffic
from kvtriage.records.pairing import BASELINE
from kvtriage.stages.clauses import slowdown
from kvtriage.stages.findings import Findings
from kvtriage.stages.wording import format_interval, name_arm
from kvtriage.stats import Ratio, ratio_of

__all__ = ["compare_times"]


def compare_times(found: Findings) -> str:
    """ITL, TTFT and one stream's throughput over the traffic, and where the lines cross; '' where there is no line."""
    rung, rule = found.leaning, found.plan.study.rule
    itl = slowdown(found.trials, BASELINE, rung.arm.name, traffic(found.plan.study), rule.confidence)
    met = crossing_of(found.trials, BASELINE, rung.arm.name, found.plan.study, found.plan.max_model_len)
    if rung.scaling == "native" or itl is None or met is None:
        return ""
    weight = "" if rule.latency_weight else "; this rule gives latency no weight"
    return (
        f"Measured here, over the traffic a decoded token takes {_times(itl)} times BF16's{_whole(found)}: "
        f"{met.in_words()}{weight}.{_why_larger(found)}"
    )


def _whole(found: Findings) -> str:
    """', the first token 1.10 (..) and a request of 128 tokens 1.05 (..)'; '' without the curves."""
    workload, confidence = traffic(found.plan.study), found.plan.study.rule.confidence
    before, after = (expected_times(found.trials, arm, workload) for arm in (BASELINE, found.leaning.arm.name))
    if before is None or after is None or not (before.ttft and before.request and after.ttft and after.request):
        return ""
    first, whole = ratio_of(before.ttft, after.ttft, confidence), ratio_of(before.request, after.request, confidence)
    if first is None or whole is None:
        return ""
    return f", the first token {_times(first)} and a request of {workload.output_tokens:,} tokens {_times(whole)}"


def _times(ratio: Ratio) -> str:
    return format_interval(ratio.value, ratio.low, ratio.high, lambda value: f"{value:.2f}")


def _why_larger(found: Findings) -> str:
    """What the choice saves in time against the smaller arm that holds too; '' where it is the smallest."""
    if not found.preferred:
        return ""
    rule, smaller = found.plan.study.rule, found.remedy
    saved = slowdown(found.trials, smaller.arm.name, found.leaning.arm.name, traffic(found.plan.study), rule.confidence)
    if saved is None:
        return ""
    more = found.leaning.price.policy_bytes / smaller.price.policy_bytes - 1
    holds = f"{100 * more:.2f} % more tokens" if more else "as many tokens"
    return (
        f" {name_arm(smaller.arm, found.plan.layers)} holds {holds} in the same memory, and a token of this "
        f"choice takes {_times(saved)} times its time: at latency_weight {rule.latency_weight:g} that is worth more."
    )
