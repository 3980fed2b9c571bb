"""plan: from a model's geometry, a study and a data set to the first record of a case."""

from __future__ import annotations

from collections.abc import Iterator

from kvtriage.errors import UnsupportedModel
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec
from kvtriage.records.plan import DataRef, LayerGeometry, ModelRef, Plan
from kvtriage.records.study import Study, check_context
from kvtriage.records.study_limits import validate_study

__all__ = ["check_studied", "make_plan"]


def check_studied(spec: CacheSpec) -> None:
    """A study measures full and sliding attention with K and V of its own. Raises UnsupportedModel for the rest."""
    for layer in spec.layers:
        if layer.kind not in (LayerKind.FULL, LayerKind.SLIDING) or not layer.holds_kv or layer.beside:
            what = f"reads the cache of layer {layer.shares_with}" if layer.shares_with is not None else _other(layer)
            raise UnsupportedModel(
                f"layer {layer.layer_idx} of {spec.model_type} {what}, which a study does not measure yet",
                hint="kvtriage plan prices it",
            )


def _other(layer: LayerSpec) -> str:
    return f"is of the kind {layer.kind}" + (" with more than K and V to remember" if layer.beside else "")


def make_plan(source: str, model: ModelRef, spec: CacheSpec, study: Study, data: DataRef, version: str) -> Plan:
    """The plan record. `source` is the model as the user named it. Raises StudyError, UnsupportedModel."""
    check_studied(spec)
    validate_study(study)
    check_context(study, spec.max_model_len)
    return Plan(
        kvtriage_version=version,
        model=ModelRef(
            source=source,
            path=model.path,
            architecture=model.architecture,
            fingerprint=model.fingerprint,
            parameters=model.parameters,
        ),
        data=data,
        study=study,
        model_type=spec.model_type,
        max_model_len=spec.max_model_len,
        layers=tuple(
            LayerGeometry(
                layer_idx=layer.layer_idx,
                kind=str(layer.kind),
                num_attention_heads=layer.num_attention_heads,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                head_dim_v=layer.head_dim_v,
                window_tokens=layer.window_tokens,
            )
            for layer in spec.layers
        ),
        assumed=spec.assumed,
        warnings=tuple(_warnings(study, spec)),
    )


def _warnings(study: Study, spec: CacheSpec) -> Iterator[str]:
    longest = max(study.buckets)
    if study.calibration_tokens < longest:
        yield (
            f"calibration reads {study.calibration_tokens} tokens of a text while contexts reach {longest}: "
            "ranges that grow with position would be missed"
        )
    windows = [layer.window_tokens for layer in spec.layers if layer.window_tokens is not None]
    if spec.is_hybrid and min(windows) >= longest:
        yield (
            f"no bucket is longer than the sliding window of {min(windows)} tokens: "
            "sliding and full layers retain the same here, and skipping looks dearer than at long context"
        )
    if len(spec.layers_of(LayerKind.SLIDING)) == spec.num_layers:
        yield "every layer has a sliding window: capacity stops falling beyond it"
