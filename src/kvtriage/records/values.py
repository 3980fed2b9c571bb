"""From records back to the values that they were made from."""

from __future__ import annotations

from kvtriage.fp8.scales import LayerScales, ScaleSet, SubOctaves
from kvtriage.kvcache.allocator import Backend
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec
from kvtriage.records.plan import Plan
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.study import Study

__all__ = ["cache_spec", "scale_set", "serving_backend", "sub_octaves"]


def cache_spec(plan: Plan) -> CacheSpec:
    """The geometry that the plan recorded."""
    return CacheSpec(
        model_type=plan.model_type,
        layers=tuple(
            LayerSpec(
                layer_idx=layer.layer_idx,
                kind=LayerKind(layer.kind),
                num_attention_heads=layer.num_attention_heads,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                head_dim_v=layer.head_dim_v,
                window_tokens=layer.window_tokens,
            )
            for layer in plan.layers
        ),
        max_model_len=plan.max_model_len,
        assumed=plan.assumed,
    )


def serving_backend(study: Study) -> Backend:
    """The allocator's backend for the study's; FLASH_ATTN for one whose pages are no others."""
    known = {backend.value.lower(): backend for backend in Backend}
    return known.get(study.backend, Backend.FLASH_ATTN)


def scale_set(record: ScaleRecord, scaling: Scaling) -> ScaleSet:
    """One of the record's two scale sets, `scaling` PER_TENSOR or PER_HEAD. Raises EngineError for a bad scale."""
    rows = record.per_head if scaling is Scaling.PER_HEAD else record.per_tensor
    return ScaleSet(scaling, tuple(LayerScales(row.layer_idx, row.q, row.k, row.v) for row in rows))


def sub_octaves(record: ScaleRecord) -> SubOctaves:
    """Where the scale-free bound rounds each KV head."""
    return SubOctaves(k=record.sub_octave_k, v=record.sub_octave_v)
