"""The layers of a case: one rank's, as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from kvtriage.errors import DataError
from kvtriage.kvcache.allocator.layers import (
    MAX_LAYERS,
    CachelessLayer,
    ChunkedLayer,
    CrossLayer,
    EngineLayer,
    FullLayer,
    IndexLayer,
    LayerStack,
    MlaLayer,
    SlidingLayer,
    StateLayer,
)
from kvtriage.kvcache.cases.values import (
    HINT,
    MOST_BYTES,
    MOST_TOKENS,
    WIDEST,
    flag,
    mapping,
    sequence,
    whole,
    words,
)

__all__ = ["has_layers", "layers_are_fp8", "read_layers"]

STATE_BYTES = {"bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "fp32": 4, "float32": 4, "fp8": 1}
MOST_CHECKPOINTS = 16
MOST_AXES = 8


def has_layers(case: Mapping[str, object], flags: Mapping[str, object]) -> bool:
    """Whether the case lists layers, in any of the places where they may stand."""
    return any(True for _ in _layers(case, flags))


def layers_are_fp8(case: Mapping[str, object], flags: Mapping[str, object]) -> bool:
    """Whether some layer comes with the dtype that `auto` was."""
    return any(layer.get("dtype") == "fp8" for _, layer in _layers(case, flags))


def read_layers(case: Mapping[str, object], flags: Mapping[str, object]) -> LayerStack:
    """Raises DataError for a layer that makes no sense."""
    return LayerStack.of_runs((count, _layer(values)) for count, values in _layers(case, flags))


def _layers(case: Mapping[str, object], flags: Mapping[str, object]) -> Iterator[tuple[int, Mapping[str, object]]]:
    """(count, layer as JSON), from the first place that has any."""
    runs = sequence(case, "layer_runs") or sequence(flags, "layer_runs")
    num_layers = 0
    for run in runs or [[1, layer] for layer in sequence(flags, "layers")]:
        if not isinstance(run, list) or len(run) != 2:
            raise DataError("a run of layers is not a list of a count and a layer", hint=HINT)
        count = whole({"count": run[0]}, "count", None, 1, MAX_LAYERS)
        num_layers += count
        if num_layers > MAX_LAYERS:
            raise DataError(f"there are more than {MAX_LAYERS:,} layers", hint=HINT)
        yield count, mapping(run[1], "a layer")


def _layer(values: Mapping[str, object]) -> EngineLayer:
    kind = values.get("kind")
    if kind in ("shared", "encoder_only"):
        return CachelessLayer()
    if kind == "mamba":
        return StateLayer(_state_bytes(values), whole(values, "checkpoint_blocks", 0, 0, MOST_CHECKPOINTS))
    if kind == "index":
        return IndexLayer(whole(values, "token_bytes", None, 1, WIDEST))
    head_size = whole(values, "head_size", None, 1, WIDEST)
    if kind == "mla":
        return MlaLayer(head_size, sparse=flag(values, "sparse", False))
    heads = (
        whole(values, "num_kv_heads", None, 1, WIDEST),
        head_size,
        whole(values, "head_size_v", head_size, 0, WIDEST),
    )
    match kind:
        case "full":
            return FullLayer(*heads)
        case "cross":
            return CrossLayer(*heads)
        case "sliding":
            return SlidingLayer(*heads, whole(values, "window", None, 1, MOST_TOKENS))
        case "chunked":
            return ChunkedLayer(*heads, whole(values, "chunk", None, 1, MOST_TOKENS))
    raise DataError(f"a layer's kind is {str(kind)[:40]!a}, which is not modelled", hint=HINT)


def _state_bytes(values: Mapping[str, object]) -> int:
    shapes, dtypes = sequence(values, "state_shapes"), words(values, "state_dtypes")
    if not shapes or len(shapes) != len(dtypes) or not set(dtypes) <= set(STATE_BYTES):
        raise DataError("state_shapes and state_dtypes do not describe a state", hint=HINT)
    total = 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        sizes = sequence({"state_shapes": shape}, "state_shapes")
        if len(sizes) > MOST_AXES:
            raise DataError(f"a state has more than {MOST_AXES} axes", hint=HINT)
        total += STATE_BYTES[dtype] * math.prod(whole({"size": size}, "size", None, 1, WIDEST) for size in sizes)
    if total > MOST_BYTES:
        raise DataError("a state is larger than any memory", hint=HINT)
    return total
