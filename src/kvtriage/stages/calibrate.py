"""calibrate: ranges of Q, K and V on the user's text, scales, and how they hold on other text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from kvtriage import __version__
from kvtriage.engines.base import Engine
from kvtriage.errors import DataError
from kvtriage.fp8.e4m3 import MAX
from kvtriage.fp8.scales import LayerScales, ScaleSet, fit_scales, fit_sub_octaves
from kvtriage.fp8.stats import HeldOut, KVStats
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.plan import Plan
from kvtriage.records.scales import HeldOutRow, LayerScalesRecord, ScaleRecord, SweepRow
from kvtriage.stages import Reporter
from kvtriage.tasks.split import Split

__all__ = ["calibrate", "position_edges"]

_GROWTH = 1.25
"""A range that is this much larger in the last position bucket is still growing."""
_SATURATED = 1e-3
"""Share of held-out elements above the largest stored value that deserves a warning."""


def calibrate(plan: Plan, split: Split, engine: Engine, report: Reporter, inputs: Mapping[str, str]) -> ScaleRecord:
    """Observe, fit, and check on held-out text.

    Raises NonFinite and EngineError, naming the layer, where no honest scale exists, and
    DataError when a calibration item is also evaluated on.
    """
    _check_disjoint(split)
    spec = engine.spec
    edges = position_edges(plan.study.calibration_tokens)
    steps = f"{engine.info().observes_by} read"
    stats = engine.observe(
        [item.token_ids for item in split.calibration], edges, partial(report, f"observing Q, K and V, {steps}")
    )
    sets = {scaling: fit_scales(stats, spec, scaling) for scaling in (Scaling.PER_TENSOR, Scaling.PER_HEAD)}
    bound = fit_sub_octaves(stats, spec)
    checked = {**sets, Scaling.UNIT: _unit(spec)}
    shares = engine.check_scales(
        [item.token_ids for item in split.holdout],
        list(checked.values()),
        partial(report, f"checking the scales on held-out text, {steps}"),
    )
    held_out = dict(zip(checked, shares, strict=True))
    return ScaleRecord(
        kvtriage_version=__version__,
        inputs=dict(inputs),
        per_tensor=_scale_rows(sets[Scaling.PER_TENSOR]),
        per_head=_scale_rows(sets[Scaling.PER_HEAD]),
        sub_octave_k=bound.k,
        sub_octave_v=bound.v,
        calibration_items=tuple(item.item_id for item in split.calibration),
        calibration_tokens=stats.tokens,
        compute_dtype=engine.info().compute_dtype,
        held_out=tuple(row for scaling, found in held_out.items() for row in _held_out_rows(scaling, found)),
        position_edges=edges,
        sweep=tuple(_sweep(stats)),
        peak_bytes=0,
        warnings=tuple(_warnings(plan, stats, held_out[Scaling.PER_HEAD])),
    )


def position_edges(tokens: int) -> tuple[int, ...]:
    """Lower edges of the position buckets: 0, then doubling from a sixteenth of the text."""
    edges, edge = [0], max(16, tokens // 16)
    while edge < tokens:
        edges.append(edge)
        edge *= 2
    return tuple(edges)


def _check_disjoint(split: Split) -> None:
    fitted = {item.item_id for role in (split.calibration, split.holdout, split.probe) for item in role}
    shared = fitted & {item.item_id for item in split.evaluation}
    if shared:
        raise DataError(
            f"{len(shared)} evaluation items are also used to calibrate",
            hint="scales would be judged on the text they were made from: give more, and more varied, text",
        )


def _unit(spec: CacheSpec) -> ScaleSet:
    return ScaleSet(Scaling.UNIT, tuple(LayerScales(layer.layer_idx, (1.0,), (1.0,), (1.0,)) for layer in spec.layers))


def _scale_rows(scales: ScaleSet) -> tuple[LayerScalesRecord, ...]:
    return tuple(
        LayerScalesRecord(layer_idx=layer.layer_idx, q=layer.q, k=layer.k, v=layer.v) for layer in scales.layers
    )


def _held_out_rows(scaling: Scaling, found: HeldOut) -> Iterator[HeldOutRow]:
    for share in found.shares:
        yield HeldOutRow(
            scaling=str(scaling),
            layer_idx=share.layer_idx,
            tensor=share.tensor,
            head=share.head,
            saturated=share.saturated,
            below_normal=share.below_normal,
            amax=share.amax,
        )


def _sweep(stats: KVStats) -> Iterator[SweepRow]:
    for (layer_idx, tensor), seen in sorted(stats.tensors.items()):
        if tensor != "q":
            amax = tuple(float(value) for value in seen.amax_by_position.max(axis=0))
            yield SweepRow(layer_idx=layer_idx, tensor=tensor, amax=amax)


def _warnings(plan: Plan, stats: KVStats, held_out: HeldOut) -> Iterator[str]:
    longest = max(*plan.study.buckets, *plan.study.latency_contexts)
    if plan.study.calibration_tokens < longest:
        growing = [
            f"{tensor.upper()} of layer {layer_idx}"
            for (layer_idx, tensor), seen in sorted(stats.tensors.items())
            if tensor != "q" and _grows(seen.amax_by_position)
        ]
        yield (
            f"calibrated on texts of {plan.study.calibration_tokens} tokens while the study reaches {longest}: "
            + (
                f"the range still grows with position in {', '.join(growing)}"
                if growing
                else "no range was seen to grow"
            )
        )
    saturated = [share for share in held_out.shares if share.saturated > _SATURATED]
    if saturated:
        worst = max(saturated, key=lambda share: share.saturated)
        yield (
            f"{len(saturated)} heads saturate on text not calibrated on; worst is {worst.tensor.upper()} of layer "
            f"{worst.layer_idx}, head {worst.head}, with {100 * worst.saturated:.2f} %: calibrate on more text"
        )
    dead = [
        f"{tensor.upper()} head {head} of layer {layer_idx}"
        for (layer_idx, tensor), seen in sorted(stats.tensors.items())
        for head in np.flatnonzero(seen.amax == 0)
    ]
    if dead:
        yield f"0 on all of the calibration text, and given the scale of its tensor: {', '.join(dead)}"
    beyond = [
        f"{tensor.upper()} of layer {layer_idx} ({seen.amax.max():.0f})"
        for (layer_idx, tensor), seen in sorted(stats.tensors.items())
        if tensor != "q" and seen.amax.max() > MAX
    ]
    if beyond:
        yield f"beyond E4M3's {MAX:.0f} at scale 1: {', '.join(beyond)}"


def _grows(amax_by_position: np.ndarray) -> bool:
    """Whether any head's largest value lies in the last position bucket, and well above the rest."""
    if amax_by_position.shape[1] < 2:
        return False
    earlier = amax_by_position[:, :-1].max(axis=1)
    return bool((amax_by_position[:, -1] > _GROWTH * earlier).any())
