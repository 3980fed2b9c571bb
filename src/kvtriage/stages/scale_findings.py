"""What scales can and cannot repair, said before anything but one look at the text was spent on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvtriage.fp8.anatomy import Anatomy
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.rule import Rule
from kvtriage.records.sensitivities import RepairRow
from kvtriage.records.study import Study, supports_per_head
from kvtriage.stages.probes import MANTISSA
from kvtriage.stages.wording import format_nats, join_words

__all__ = ["DrownedHead", "drowned_heads", "scale_findings"]

_DROWNED_DB = 6.0
"""A head loses more than this under its layer's shared scale, against a scale of its own: twice the error."""
_NAMED = 3
_CLIPS = {"per_head_percentile": "the 99.99th percentile", "per_head_least_error": "the clip of least squared error"}


@dataclass(frozen=True)
class DrownedHead:
    """A head that the scale of its layer's largest head does not reach."""

    layer_idx: int
    tensor: str
    head: int
    spoiler: int
    """The head whose range sets the layer's scale."""
    shared_db: float
    """Signal over noise under the layer's scale, and under one of its own."""
    own_db: float


def drowned_heads(anatomy: Anatomy, spec: CacheSpec) -> tuple[DrownedHead, ...]:
    """Heads that one scale for the layer spoils, worst first."""
    found = []
    for layer in spec.layers:
        own_layer = anatomy.layers[layer.layer_idx]
        for tensor in ("k", "v"):
            shared = own_layer.operands[tensor, Scaling.PER_TENSOR].sqnr_db
            alone = own_layer.operands[tensor, Scaling.PER_HEAD].sqnr_db
            spoiler = int(np.argmax(own_layer.magnitudes[tensor].percentile_scale(1.0)))
            for head in range(layer.num_kv_heads):
                if head != spoiler and np.isfinite(alone[head]) and alone[head] - shared[head] > _DROWNED_DB:
                    found.append(
                        DrownedHead(
                            layer.layer_idx, tensor.upper(), head, spoiler, float(shared[head]), float(alone[head])
                        )
                    )
    return tuple(sorted(found, key=lambda head: head.shared_db - head.own_db))


def scale_findings(anatomy: Anatomy, repairs: Sequence[RepairRow], spec: CacheSpec, study: Study) -> Iterator[str]:
    """What calibration, scales per head and clipping are predicted to win back of the whole model's damage."""
    whole = {row.repair: row.predicted_kl for row in repairs if row.layer_idx is None}
    yield _calibration(whole, study.rule)
    if any(layer.num_kv_heads > 1 for layer in spec.layers):
        yield _per_head(whole, study)
    else:
        yield "With one KV head in every layer, per-head scales are per-tensor scales."
    yield _clip(whole, study.rule)
    drowned = drowned_heads(anatomy, spec)
    if drowned:
        named = [
            f"{head.tensor} head {head.head} of layer {head.layer_idx}, whose scale head {head.spoiler} sets "
            f"({round(head.shared_db)} dB of signal over noise, {round(head.own_db)} dB under its own)"
            for head in drowned[:_NAMED]
        ]
        others = f", and {len(drowned) - _NAMED} more" if len(drowned) > _NAMED else ""
        yield f"One scale for a layer does not reach {join_words(named)}{others}."


def _wins(before: float, after: float, rule: Rule) -> bool:
    """By the rule's own measure of when range is what is wrong."""
    return before - after > rule.range_margin and before > (1 + rule.range_ratio) * after


def _calibration(whole: Mapping[str, float], rule: Rule) -> str:
    unit, bound = whole[Scaling.UNIT], whole[MANTISSA]
    best = min(whole[Scaling.PER_TENSOR], whole[Scaling.PER_HEAD])
    if _wins(unit, best, rule):
        return (
            f"Calibration is predicted to help: of {format_nats(unit)} nats per token at scale 1, "
            f"{format_nats(best)} are left; the rest is range."
        )
    what = "range that no scale reaches" if _wins(best, bound, rule) else "mantissa"
    if unit <= rule.kl_margin:
        lost = "and that is within the KL margin"
    else:
        lost = (
            "which calibration brings just within the KL margin"
            if best <= rule.kl_margin
            else "and only BF16 wins that back"
        )
    return (
        f"Calibration is not predicted to help: {format_nats(unit)} nats per token at scale 1 become "
        f"{format_nats(best)}, and {format_nats(bound)} with an unlimited range. What is lost is {what}, {lost}."
    )


def _per_head(whole: Mapping[str, float], study: Study) -> str:
    shared, own = whole[Scaling.PER_TENSOR], whole[Scaling.PER_HEAD]
    if not _wins(shared, own, study.rule):
        return (
            "Per-head scales cannot help beyond per-tensor ones: "
            f"{format_nats(own)} against {format_nats(shared)} nats per token are predicted."
        )
    served = "" if supports_per_head(study.backend) else f", which {study.backend} does not take"
    return (
        f"Per-head scales are needed{served}: {format_nats(own)} nats per token are predicted, and "
        f"{format_nats(shared)} per tensor."
    )


def _clip(whole: Mapping[str, float], rule: Rule) -> str:
    """Whether clipping a head's largest numbers beats its amax."""
    amax = whole[Scaling.PER_HEAD]
    best = min(_CLIPS, key=lambda repair: whole[repair])
    verdict = "beats" if _wins(amax, whole[best], rule) else "is not predicted to beat"
    name = f"{_CLIPS[best][:1].upper()}{_CLIPS[best][1:]}"
    return f"{name} {verdict} amax: {format_nats(whole[best])} against {format_nats(amax)}."
