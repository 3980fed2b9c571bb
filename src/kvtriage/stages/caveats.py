"""What these numbers cannot tell, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean

from kvtriage.records.latency import longest_timed, traffic
from kvtriage.records.pairing import AGREED, BASELINE, NEEDLE_HIT
from kvtriage.records.verdict import Reason
from kvtriage.stages.findings import Findings
from kvtriage.stages.reading import CANNOT_TELL, UNMET
from kvtriage.stages.wording import format_share, join_words, name_arm, name_layers

__all__ = ["caveats", "items_that_settle", "next_step"]

_SMALL_MODEL = 1_000_000_000
_DRAWN_OUT = 1.25
"""A line may be followed this much further than it was measured without saying so."""


def caveats(found: Findings) -> tuple[str, ...]:
    """Sentences, the weightiest first."""
    return (*_of_the_baseline(found), *_of_the_evidence(found), *_of_the_choice(found), *_of_the_engine(found))


def items_that_settle(found: Findings) -> int | None:
    """Items per cell that would settle the cheapest rung in doubt; None when not known."""
    needed = [_in_each_cell(found, reason) for rung in found.outcome.doubts[:1] for reason in rung.undecided]
    known = [count for count in needed if count is not None]
    return max(known) if known and len(known) == len(needed) else None


def next_step(found: Findings) -> str:
    """One sentence."""
    if found.broken:
        return "Mend BF16 first: try the model by hand on this text, then start a new case folder."
    if found.outcome.doubts:
        return f"{_how_to_settle(found)} {_meanwhile(found)}"
    if found.outcome.unmeasured:
        return (
            f"Measure {join_words(found.outcome.unmeasured)} too: give --arm for a server of each such arm, or let "
            "kvtriage start them. Until then BF16 is the safe choice."
        )
    if found.excluded:
        return (
            "Start a new case folder with a lower capacity_floor_ratio in study.toml, or with wider margins where they "
            "are unmet: the floor excludes everything that holds, and more items will not help."
        )
    if found.leaning.scaling in ("per_tensor", "per_head") and found.checkpoint is None:
        return "Write the scales into a checkpoint first (kvtriage calibrate does), then serve it with these flags."
    return "Serve with these flags, and repeat the study when the model or the traffic changes."


def _how_to_settle(found: Findings) -> str:
    study, undecided = found.plan.study, found.outcome.doubts[0].undecided
    if _is_generated(found):
        return (
            "Measure the arms on servers that give the likelihoods of a prompt, by prompt_logprobs or by echo with "
            "logprobs, or with --engine embedded: no number of items settles this otherwise."
        )
    if all(reason.clause == "served" for reason in undecided):
        return "Run vllm bench serve with more requests for every arm, and import them into a new case folder."
    if any(reason.clause == "latency" for reason in undecided):
        return f"Raise latency_repeats (now {study.latency_repeats}) in study.toml and run again in a new case folder."
    if any(reason.noise is not None and abs(reason.value or 0.0) <= reason.noise for reason in undecided):
        return (
            "A drift lies inside the noise of BF16 repeated, and no number of items tells it from a margin below that: "
            "start a new case folder with a wider margin."
        )
    if items_that_settle(found) is None:
        if any(reason.items < 2 for reason in undecided):
            return "Measure at least two items in every cell: one item has no interval."
        return (
            "A mean sits on its margin and no practical number of items settles it: "
            "start a new case folder with another margin."
        )
    wanted: dict[str, int] = {}
    for reason in undecided:
        key, count = _setting(found, reason)
        wanted[key] = max(wanted.get(key, 0), count)
    settings = [f"{key} = {count} (now {now})" for key, count in wanted.items() if count > (now := getattr(study, key))]
    return f"Set {' and '.join(settings)} in study.toml and run again in a new case folder."


def _setting(found: Findings, reason: Reason) -> tuple[str, int]:
    """The key of study.toml that says how many items this cell has, and how many would settle it."""
    needed, study = _in_each_cell(found, reason) or 0, found.plan.study
    match reason.clause, reason.cell.rpartition(", ")[0]:
        case "needle", "":
            return "needles_per_depth", math.ceil(needed / max(len(study.needle_depths), 1))
        case "needle", "recall":
            return "recalls_per_bucket", needed
        case "needle", _:
            return "window_needles", needed
        case "generated", _:
            return "generation_items", needed
        case _:
            return "items_per_bucket", needed


def _in_each_cell(found: Findings, reason: Reason) -> int | None:
    """Items that settle it, in each bucket: those of all buckets together are shared among them."""
    if reason.items_needed is None or not reason.cell.endswith("all"):
        return reason.items_needed
    return math.ceil(reason.items_needed / len(found.plan.study.buckets))


def _meanwhile(found: Findings) -> str:
    safe = found.outcome.choice
    return (
        f"Until then {name_arm(safe.arm, found.plan.layers)} is the safe choice."
        if safe
        else "Until then no arm is known to be safe."
    )


def _of_the_baseline(found: Findings) -> Iterator[str]:
    for reason in found.broken:
        if reason.cell != "all":
            yield (
                f"BF16 itself makes no sense of this text ({reason.text}): check the model and its tokenizer before "
                "believing anything here."
            )
        else:
            yield f"BF16 itself does not retrieve ({reason.text}): needles tell little of FP8 here."
    hits = found.trials.drift(NEEDLE_HIT, BASELINE).values
    if hits and not any(hits):
        yield f"BF16 finds none of the {len(hits)} needles: only the answers' likelihood compares retrieval here."


def _of_the_evidence(found: Findings) -> Iterator[str]:
    for arm in sorted({reason.arm for rung in found.rungs for reason in rung.reasons}):
        lost = found.trials.paired("nll", arm, BASELINE, lambda trial: True).unscored
        if lost and not _is_generated(found):
            name = name_arm(found.trials.arms[arm], found.plan.layers)
            yield f"{lost} items could not be scored under {name} or BF16 and are left out of its averages."
    for reason in found.leaning.reasons:
        if reason.clause == "found" and reason.items_needed is not None:
            yield (
                f"A loss of answers could not be shown here: {reason.items} items cannot settle that clause alone, at "
                f"least {reason.items_needed} are needed."
            )
    if not found.bound:
        yield "The scale-free bound was not measured: what an ideal scale would reach is known from other arms alone."
    elif found.evidence.conditions.probe_numerics not in (None, found.evidence.conditions.numerics):
        yield (
            "The scale-free bound and the probes round K and V alone, and the FP8 arms Q and the probabilities too: an "
            "arm may lie beyond the bound for those, and no scale wins that back."
        )
    if found.evidence.conditions.repeat == "batches":
        yield (
            "BF16 was repeated on its own server in the company of other requests, and not with its prefill in "
            "pieces: the noise floor is that of the batch alone, and may be too low."
        )
    if found.rung("per_tensor") is None and found.rungs:
        yield "No calibrated per-tensor arm was run: calibration and granularity moved together."


def _of_the_choice(found: Findings) -> Iterator[str]:
    rung, name = found.leaning, name_arm(found.leaning.arm, found.plan.layers)
    in_range = rung.status_of("range")
    if in_range == CANNOT_TELL:
        needed = next((r.items_needed for r in rung.reasons if r.clause == "range"), None)
        settle = f"; {needed} items would settle it" if needed else ""
        yield f"Whether better scales would win something back from {name} is open{settle}."
    if in_range == UNMET:
        yield f"{name} keeps the margins although its range is off: nothing better can be served here."
    if rung.arm.skip_layers and rung.scaling != "native" and not found.sensitivities.suspects_stand_out:
        named = name_layers(rung.arm.skip_layers, found.plan.layers)
        yield f"The skipped group ({named}) is only the most sensitive one found, not shown to be the smallest."
    if rung.scaling in ("per_tensor", "per_head"):
        yield from found.scales.warnings


def _is_generated(found: Findings) -> bool:
    """Whether items were continued and nothing else: no server gave likelihoods."""
    return found.evidence.conditions.scoring == "generated"


def _of_the_engine(found: Findings) -> Iterator[str]:
    ran, plan = found.evidence.conditions, found.plan
    stored = (
        "Q, K, V and the probabilities were rounded to FP8"
        if ran.numerics == "attention"
        else f"K and V were stored in FP8 and the arithmetic stayed in {ran.compute_dtype}"
    )
    other = (
        ""
        if ran.backend.lower().partition(",")[0] == plan.study.backend
        else f", not from {plan.study.backend}'s own kernels"
    )
    yield f"Quality comes from the {ran.engine} engine on {ran.device} ({ran.numerics} numerics: {stored}){other}."
    if ran.kl_top_k is not None:
        yield (
            f"Divergences count BF16's {ran.kl_top_k} most likely tokens, and all others as one: they are lower bounds."
        )
    if ran.scoring == "echo_text":
        yield "The servers name tokens by their texts: tokens that read alike were not told apart."
    if _is_generated(found):
        yield "The servers give no likelihoods: NLL and divergence were not measured."
        for rung in found.rungs:
            if alike := found.trials.drift(AGREED, rung.arm.name).values:
                name, share = name_arm(rung.arm, plan.layers), format_share(fmean(alike))
                yield f"{name} goes on as BF16 does for {share} of the tokens generated, until the two first differ."
    if ran.readback != "live":
        yield "Scales could not be read back from these servers: that each arm carried its own is what you said."
    if ran.rounding != "nearest":
        yield (
            f"{ran.backend} rounds to E4M3 {ran.rounding}, and GPUs round to nearest: every FP8 arm drifts further "
            "here than it would there."
        )
    if ran.mixed_backends:
        yield "Arms on other attention backends than BF16's were allowed: a part of a difference may be the backend's."
    where = "" if ran.device.startswith("cuda") else ", nor about a GPU"
    if other:
        yield (
            f"Latencies are of the {ran.engine} engine on {ran.device}: they say nothing about the speed of "
            f"{plan.study.backend}'s kernels{where}."
        )
    timed, decoded = longest_timed(found.trials, BASELINE), traffic(plan.study).longest
    if 0 < _DRAWN_OUT * timed < decoded:
        yield f"Times over the traffic are drawn out from {timed:,} tokens, the longest timed, to {decoded:,.0f}."
    longest = max(plan.study.buckets)
    if longest < plan.max_model_len:
        yield f"Contexts reach {longest:,} of the model's {plan.max_model_len:,} tokens; drift may grow beyond them."
    if plan.model.parameters < _SMALL_MODEL:
        millions = f"{plan.model.parameters / 1e6:,.0f} million"
        yield f"The model has {millions} parameters: what holds for it need not hold for a larger one."
