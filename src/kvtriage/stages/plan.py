"""plan: from a model's geometry, a study and a data set to the first record of a case."""

from __future__ import annotations

from collections.abc import Iterator

from kvtriage.errors import StudyError
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from kvtriage.records.case import DataRef, LayerGeometry, ModelRef, Plan
from kvtriage.records.study import Study

__all__ = ["BACKENDS", "NUMERICS", "check_study", "make_plan"]

NUMERICS = ("storage", "attention")
"""Where FP8 ends: at the cache, or at the attention products too (FlashAttention 3)."""

BACKENDS = ("flash_attn", "flashinfer", "triton_attn", "flex_attention", "rocm_attn", "cpu_attn")
"""Attention backends that may serve, by vLLM's names in lower case."""


def make_plan(source: str, model: ModelRef, spec: CacheSpec, study: Study, data: DataRef, version: str) -> Plan:
    """The plan record. `source` is the model as the user named it. Raises StudyError."""
    check_study(study, spec)
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


def check_study(study: Study, spec: CacheSpec) -> None:
    """Refuse, by name, a setting that no measurement could follow. Raises StudyError."""
    _check_counts(study)
    _check_choices(study)
    _check_rule(study)
    _check_lengths(study, spec.max_model_len)


def _check_counts(study: Study) -> None:
    counts = {
        "items_per_bucket": study.items_per_bucket,
        "score_tokens": study.score_tokens,
        "needles_per_depth": study.needles_per_depth,
        "calibration_items": study.calibration_items,
        "calibration_tokens": study.calibration_tokens,
        "holdout_items": study.holdout_items,
        "probe_items": study.probe_items,
        "probe_tokens": study.probe_tokens,
        "probe_score_tokens": study.probe_score_tokens,
        "latency_repeats": study.latency_repeats,
        "batch": study.batch,
        "memory_bytes": study.memory_bytes,
    }
    for name, count in counts.items():
        if count < 1:
            raise StudyError(f"{name} is {count}", hint=f"set {name} to 1 or more")
    if study.decode_tokens < 2:
        raise StudyError(
            f"decode_tokens is {study.decode_tokens}",
            hint="inter-token latency needs two tokens at least: set decode_tokens to 2 or more",
        )
    if study.seed < 0:
        raise StudyError(f"seed is {study.seed}", hint="set seed to 0 or more")
    if not study.buckets or not study.latency_contexts:
        empty = "latency_contexts" if study.buckets else "buckets"
        raise StudyError(f"{empty} is empty", hint=f"name one context length at least, such as {empty} = [256, 1024]")
    for name, lengths in (("buckets", study.buckets), ("latency_contexts", study.latency_contexts)):
        if min(lengths) < 1 or list(lengths) != sorted(set(lengths)):
            raise StudyError(
                f"{name} is {list(lengths)}", hint=f"give {name} as ascending context lengths, each named once"
            )
    for depth in study.needle_depths:
        if not 0.0 <= depth <= 1.0:
            raise StudyError(
                f"the needle depth {depth} lies outside the text", hint="a depth is a share between 0 and 1"
            )


def _check_choices(study: Study) -> None:
    for name, value, allowed in (("numerics", study.numerics, NUMERICS), ("backend", study.backend, BACKENDS)):
        if value not in allowed:
            raise StudyError(f"{name} is {value!r}", hint=f"choose one of {', '.join(allowed)}")


def _check_rule(study: Study) -> None:
    rule = study.rule
    margins = {
        "kl_margin": rule.kl_margin,
        "nll_margin": rule.nll_margin,
        "top1_margin": rule.top1_margin,
        "needle_margin": rule.needle_margin,
        "range_ratio": rule.range_ratio,
        "range_margin": rule.range_margin,
        "capacity_floor_ratio": rule.capacity_floor_ratio,
    }
    for name, value in margins.items():
        if not 0.0 < value < float("inf"):
            raise StudyError(f"rule.{name} is {value}", hint=f"set {name} to a positive number")
    if not 0.0 < rule.confidence < 1.0:
        raise StudyError(f"rule.confidence is {rule.confidence}", hint="set confidence between 0 and 1, such as 0.95")
    if not 0.0 <= rule.latency_weight < float("inf"):
        raise StudyError(f"rule.latency_weight is {rule.latency_weight}", hint="set latency_weight to 0 or more")


def _check_lengths(study: Study, max_model_len: int) -> None:
    asked = {
        f"the bucket of {max(study.buckets)} tokens": max(study.buckets),
        f"calibration_tokens = {study.calibration_tokens}": study.calibration_tokens,
        f"probe_tokens = {study.probe_tokens}": study.probe_tokens,
        f"latency_contexts up to {max(study.latency_contexts)} and {study.decode_tokens} decoded tokens": (
            max(study.latency_contexts) + study.decode_tokens
        ),
    }
    for what, length in asked.items():
        if length > max_model_len:
            raise StudyError(
                f"{what} goes beyond the model's limit of {max_model_len} tokens",
                hint="name shorter contexts in study.toml (--buckets does it for the buckets)",
            )
    if study.score_tokens >= min(study.buckets):
        raise StudyError(
            f"score_tokens = {study.score_tokens} leaves no context in the bucket of {min(study.buckets)} tokens",
            hint="lower score_tokens, or drop the short bucket",
        )
    if study.probe_score_tokens >= study.probe_tokens:
        raise StudyError(
            f"probe_score_tokens = {study.probe_score_tokens} leaves no context in probe_tokens = {study.probe_tokens}",
            hint="lower probe_score_tokens",
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
