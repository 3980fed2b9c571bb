"""The arms of the ablation: which policies are compared, in which role, and with which numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kvtriage.engines.base import Arm
from kvtriage.engines.info import Applied, EngineInfo, Readback
from kvtriage.errors import PolicyNotApplied
from kvtriage.fp8.scales import LayerScales
from kvtriage.kvcache.policy import CachePolicy, Fp8, Mantissa, Native, Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerSpec
from kvtriage.records.evidence import ArmRecord
from kvtriage.records.pairing import BASELINE
from kvtriage.records.plan import Plan
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.study import supports_per_head
from kvtriage.records.values import cache_spec, scale_set, sub_octaves

__all__ = ["REPEAT_CHUNK", "build_arm", "check_applied", "design_arms"]

REPEAT_CHUNK = 192
"""Tokens of each piece of the noise arm's prefill: the same BF16 policy, other rounding."""


@dataclass(frozen=True)
class _Design:
    name: str
    label: str
    role: str
    policy: CachePolicy
    scaling: str


def design_arms(
    plan: Plan, scales: ScaleRecord, sensitivities: Sensitivities, info: EngineInfo
) -> tuple[ArmRecord, ...]:
    """The four ways, the calibrated per-tensor arm that separates calibration from granularity, BF16
    repeated, the scale-free bound, and FP8 in one attention type alone.

    An arm that stores exactly what an earlier one stores is not run again: `same_as` names it. An
    engine that answers for some arms only leaves out the others.
    """
    spec = cache_spec(plan)
    found: dict[tuple[object, ...], str] = {}
    records = []
    for design in _designs(plan, spec, sensitivities, info):
        if info.arms is not None and design.name not in info.arms:
            continue
        key = (design.role == "noise", *_effect(design.policy, spec, scales))
        records.append(
            ArmRecord(
                name=design.name,
                label=design.label,
                policy=design.policy.encode(),
                scaling=design.scaling,
                skip_layers=() if design.policy.is_native else design.policy.skip_layers,
                role=design.role,
                same_as=found.get(key),
            )
        )
        found.setdefault(key, design.name)
    return tuple(records)


def _designs(plan: Plan, spec: CacheSpec, sensitivities: Sensitivities, info: EngineInfo) -> Iterator[_Design]:
    count, skip = spec.num_layers, sensitivities.suspects
    yield _Design(BASELINE, "BF16", "baseline", CachePolicy.native(count), "native")
    again = {"chunks": "BF16, prefill in chunks", "batches": "BF16, in other batches"}[info.repeat]
    yield _Design("bf16_repeat", again, "noise", CachePolicy.native(count), "native")
    scalings = [Scaling.UNIT, Scaling.PER_TENSOR] + [Scaling.PER_HEAD] * info.per_head_scales
    for scaling in scalings:
        yield _Design(
            f"fp8_{scaling}", f"FP8, {_WORDS[scaling]}", "candidate", CachePolicy.fp8(count, scaling), scaling
        )
    served = [s for s in scalings if s is not Scaling.PER_HEAD or supports_per_head(plan.study.backend)]
    for scaling in served[::-1] if sensitivities.suspects_stand_out else served[-1:]:
        yield _Design(
            f"fp8_{scaling}_skip",
            f"FP8, {_WORDS[scaling]}, {_skipped(skip, spec)} in BF16",
            "candidate",
            CachePolicy.fp8(count, scaling, skip),
            scaling,
        )
    yield _Design("bound", "Scale-free bound", "bound", CachePolicy.uniform(count, Mantissa()), "mantissa")
    if spec.is_hybrid:
        for kind in spec.kinds:
            yield _Design(
                f"fp8_{kind}_only",
                f"FP8 in the {kind} layers only",
                "contrast",
                CachePolicy.only(count, spec.layers_of(kind), Fp8(Scaling.UNIT)),
                Scaling.UNIT,
            )


_WORDS = {
    Scaling.UNIT: "scale 1",
    Scaling.PER_TENSOR: "calibrated per tensor",
    Scaling.PER_HEAD: "calibrated per head",
}


def _skipped(skip: tuple[int, ...], spec: CacheSpec) -> str:
    for kind in spec.kinds:
        if spec.is_hybrid and skip == spec.layers_of(kind):
            return f"{kind} layers"
    return f"{len(skip)} layers" if len(skip) > 1 else f"layer {skip[0]}"


def _effect(policy: CachePolicy, spec: CacheSpec, scales: ScaleRecord) -> tuple[object, ...]:
    """What reaches the cache: format and effective scale of every head, so that equals compare equal."""
    effect: list[object] = []
    for layer, fmt in zip(spec.layers, policy.formats, strict=True):
        match fmt:
            case Native():
                effect.append("native")
            case Mantissa():
                effect.append("mantissa")
            case Fp8(Scaling.UNIT, _):
                effect.append((1.0,))
            case Fp8(scaling, _):
                own = scale_set(scales, scaling).layers[layer.layer_idx]
                heads = layer.num_kv_heads
                effect.append((_per_head(own.k, heads), _per_head(own.v, heads), _served_q(own.q, layer)))
    return tuple(effect)


def _per_head(values: tuple[float, ...], heads: int) -> tuple[float, ...]:
    return values * heads if len(values) == 1 else values


def _served_q(q: tuple[float, ...], layer: LayerSpec) -> tuple[float, ...]:
    """[H]: engines reduce q scales to the largest of each KV head's group of queries."""
    every, group = _per_head(q, layer.num_attention_heads), layer.queries_per_kv_head
    return tuple(max(every[head - head % group : head - head % group + group]) for head in range(len(every)))


def build_arm(record: ArmRecord, scales: ScaleRecord) -> Arm:
    """The arm as an engine takes it."""
    calibrated = Scaling(record.scaling) if record.scaling in (Scaling.PER_TENSOR, Scaling.PER_HEAD) else None
    return Arm(
        name=record.name,
        policy=CachePolicy.decode(record.policy),
        scales=None if calibrated is None else scale_set(scales, calibrated),
        bound=sub_octaves(scales) if record.role == "bound" else None,
        prefill_chunk=REPEAT_CHUNK if record.role == "noise" else None,
    )


def check_applied(arm: Arm, applied: Applied, info: EngineInfo, spec: CacheSpec) -> None:
    """Compare what the engine did with what the arm asked for, layer by layer and scale by scale,
    as far as it can show it.

    Raises PolicyNotApplied, naming the layer.
    """
    compared = info.readback is Readback.LIVE and not info.mixed_backends
    if compared and applied.backend not in (None, info.backend):
        raise PolicyNotApplied(
            f"arm {arm.name!r} runs on the attention backend {applied.backend}, and BF16 on {info.backend}",
            hint="give all servers one (--engine-arg --attention-backend=NAME), or compare them all the same with "
            "--mixed-backends",
        )
    if info.readback is Readback.NONE:
        return
    numerics = applied.numerics if info.mixed_backends and applied.numerics is not None else info.numerics
    seen_scales = info.readback is Readback.LIVE
    for layer, fmt in zip(spec.layers, arm.policy.formats, strict=True):
        index = layer.layer_idx
        dtype, q = applied.dtypes[index], applied.q_scales[index]
        k, v = applied.k_scales[index], applied.v_scales[index]
        match fmt:
            case Native():
                right = dtype == info.native_dtype and not (q or k or v)
            case Fp8(scaling, None):
                want = LayerScales(index, (1.0,), (1.0,), (1.0,))
                if scaling is not Scaling.UNIT and arm.scales is not None:
                    want = arm.scales.layers[index]
                want_q = _served_q(want.q, layer) if numerics == "attention" else ()
                scaled = _equal(k, want.k) and _equal(v, want.v)
                if scaled and seen_scales and not _equal(q, want_q):
                    raise PolicyNotApplied(
                        f"arm {arm.name!r}: layer {index} has Q scales {q or 'none'}, and {want_q or 'none'} are those "
                        f"of FP8 in {numerics}",
                        hint="the backend under FP8 is another than under BF16: choose one with --attention-backend",
                    )
                right = dtype == "float8_e4m3fn" and (scaled or not seen_scales)
            case _:
                right = dtype == "probe"
        if not right:
            raise PolicyNotApplied(
                f"arm {arm.name!r}: layer {index} is stored as {dtype} with K scales {k or 'none'}, not as asked",
                hint="the engine would have measured something else; nothing of this arm was recorded",
            )


def _equal(has: Iterable[float], want: Iterable[float]) -> bool:
    """Equal as float32, which is how scales are stored and applied."""
    return np.array_equal(np.array(list(has), np.float32), np.array(list(want), np.float32))
