"""What a policy is likely to do to the answers, from probes that stored one layer in FP8 at a time.

The damages of single layers are added up, text by text. That is a guess: damage does not add. What several layers do
together was seen to be less than their sum, and more; so wherever a probe or an arm has measured this very policy, that
stands beside it, and so does what all layers do together against their own sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtriage.explore.subject import Measured, Subject
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.records.pairing import KL, Trials
from kvtriage.records.sensitivities import ProbeRow, Sensitivities
from kvtriage.stages.wording import format_interval, format_nats
from kvtriage.stats import paired_interval

__all__ = ["Damage", "estimated_layers", "expect_damage", "layer_damage", "probed_format"]


@dataclass(frozen=True)
class Damage:
    """Mean KL from BF16, nats per token. The interval is over the texts of the probes; None where there was one text.

    `notes` say what else is known: what was measured, and how far the sum can be trusted.
    """

    kl: float | None
    low: float | None
    high: float | None
    text: str
    notes: tuple[str, ...]
    margin: float


def probed_format(sensitivities: Sensitivities, subject: Subject, scaling: Scaling) -> str | None:
    """The format of the layer probes that stands for `scaling`; None where none was probed.

    With one KV head in every layer a scale per tensor is a scale per head.
    """
    probed = {row.format for row in sensitivities.layer_probes}
    same = [f"fp8:{scaling}"]
    if scaling is not Scaling.UNIT and subject.spec.has_one_kv_head:
        same = [f"fp8:{Scaling.PER_HEAD}", f"fp8:{Scaling.PER_TENSOR}"]
    return next((fmt for fmt in same if fmt in probed), None)


def layer_damage(sensitivities: Sensitivities, fmt: str) -> dict[int, tuple[float, ...]]:
    """Layer → KL on each probe text with this layer alone in `fmt`, nats per token."""
    return {row.layers[0]: row.kl for row in sensitivities.layer_probes if row.format == fmt and len(row.layers) == 1}


def estimated_layers(sensitivities: Sensitivities, fmt: str) -> frozenset[int]:
    """The layers of `layer_damage` that the screen estimated and no probe measured."""
    return frozenset(
        row.layers[0]
        for row in sensitivities.layer_probes
        if row.format == fmt and len(row.layers) == 1 and not row.exact
    )


def expect_damage(subject: Subject, policy: CachePolicy, scaling: Scaling) -> Damage | None:
    """None where nothing was measured at all."""
    measured = subject.measured
    if measured is None or measured.sensitivities is None:
        return None
    stored = tuple(idx for idx in subject.holders if idx not in set(policy.skip_layers))
    notes = [note for note in (_measured_note(measured, policy),) if note is not None]
    if not stored:
        return Damage(0.0, 0.0, 0.0, "none: this is BF16", tuple(notes), measured.kl_margin)
    fmt = probed_format(measured.sensitivities, subject, scaling)
    if fmt is None:
        missing = f"not known: no layer was probed with {_SCALES[scaling]}"
        return Damage(None, None, None, missing, tuple(notes), measured.kl_margin)
    alone = layer_damage(measured.sensitivities, fmt)
    if missed := sum(idx not in alone for idx in stored):
        missing = f"not known: {missed} of {len(stored)} layers {'was' if missed == 1 else 'were'} not probed"
        return Damage(None, None, None, missing, tuple(notes), measured.kl_margin)
    value, low, high = _sum(alone, stored, measured.confidence)
    notes.extend(_probe_notes(measured.sensitivities, fmt, stored, alone))
    notes.append(f"the rule allows {format_nats(measured.kl_margin)}")
    text = f"{format_interval(value, low, high, format_nats)} nats per token"
    return Damage(value, low, high, text, tuple(notes), measured.kl_margin)


_SCALES = {Scaling.UNIT: "scale 1", Scaling.PER_TENSOR: "per-tensor scales", Scaling.PER_HEAD: "per-head scales"}


def _sum(
    alone: dict[int, tuple[float, ...]], stored: Iterable[int], confidence: float
) -> tuple[float, float | None, float | None]:
    """Sum over layers of each text, then the mean over texts and its interval."""
    texts = [math.fsum(found) for found in zip(*(alone[idx] for idx in stored), strict=True)]
    interval = paired_interval(texts, confidence)
    if not interval.bounded:
        return interval.mean, None, None
    return interval.mean, max(0.0, interval.low), interval.high


def _measured_note(measured: Measured, policy: CachePolicy) -> str | None:
    """What the ablation measured of this very policy."""
    if measured.trials is None:
        return None
    words = policy.encode()
    for arm in measured.trials.arms.values():
        if arm.policy == words and arm.role == "candidate" and (told := _drift(measured.trials, arm.name, measured)):
            return f"measured in the study: {told}"
    return None


def _drift(trials: Trials, arm: str, measured: Measured) -> str | None:
    values = trials.drift(KL, arm).values
    if not values:
        return None
    found = paired_interval(values, trials.look.confidence(measured.confidence))
    low, high = (found.low, found.high) if found.bounded else (None, None)
    return f"{format_interval(found.mean, low, high, format_nats)} over {found.n} texts"


def _probe_notes(
    sensitivities: Sensitivities, fmt: str, stored: Sequence[int], alone: dict[int, tuple[float, ...]]
) -> Iterable[str]:
    texts = len(next(iter(alone.values()), ()))
    if texts == 1:
        yield "probed on one text: there is no interval"
    if estimated := len(estimated_layers(sensitivities, fmt).intersection(stored)):
        yield f"estimated by the screen, measured by no probe: {estimated} of these {len(stored)} layers"
    together = next(
        (row for row in sensitivities.type_probes if row.format == fmt and row.layers == tuple(stored)), None
    )
    if together is not None:
        yield f"probed together, these layers came to {format_nats(_mean(together))}"
        return
    widest = max(
        (row for row in sensitivities.type_probes if row.format == fmt), key=lambda row: len(row.layers), default=None
    )
    if widest is not None and widest.layers:
        summed = math.fsum(math.fsum(alone[idx]) / len(alone[idx]) for idx in widest.layers if idx in alone)
        yield (
            f"damage does not add: {len(widest.layers)} layers that sum to {format_nats(summed)} came to "
            f"{format_nats(_mean(widest))} together"
        )


def _mean(row: ProbeRow) -> float:
    return math.fsum(row.kl) / len(row.kl)
