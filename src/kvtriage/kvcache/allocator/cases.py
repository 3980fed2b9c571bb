"""One case as JSON: a model, the engine's flags, and what comes of them. The form is stable.

A case has an `id`, an `input` (the flags) and a model: `layer_runs`, runs of equal layers of one
rank as [count, layer], or `config`, a config.json. The layers may also stand inside `input`, as
`layer_runs` or one by one as `layers`. Where both are given, the layers count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from kvtriage.errors import DataError, KvtriageError
from kvtriage.kvcache.allocator.case_values import HINT, choice, flag, mapping, sequence, whole, words
from kvtriage.kvcache.allocator.from_spec import stack_of_spec
from kvtriage.kvcache.allocator.layers import (
    MAX_LAYERS,
    CachelessLayer,
    ChunkedLayer,
    CrossLayer,
    EngineLayer,
    FullLayer,
    LayerStack,
    MlaLayer,
    SlidingLayer,
    StateLayer,
)
from kvtriage.kvcache.allocator.refusal import EngineRefused, Reason, Refusal
from kvtriage.kvcache.allocator.report import Capacity, allocate
from kvtriage.kvcache.allocator.settings import (
    Backend,
    CacheDtype,
    HybridManager,
    Layout,
    PoolSettings,
    ServingLimits,
)
from kvtriage.kvcache.readers import read_cache_spec

__all__ = ["Answer", "answer_case", "answer_error", "read_limits", "read_settings", "read_stack"]

Answer = dict[str, object]

FIGURES = ("num_blocks", "bytes_per_block", "blocks_per_request", "reported_tokens", "max_concurrency")
CACHE_DTYPES: Mapping[str, CacheDtype] = {
    "auto": CacheDtype.AUTO,
    "float16": CacheDtype.FLOAT16,
    "bfloat16": CacheDtype.BFLOAT16,
    "fp8": CacheDtype.FP8,
    "fp8_e4m3": CacheDtype.FP8,
    "fp8_e5m2": CacheDtype.FP8,
    "fp8_inc": CacheDtype.FP8,
}
OTHER_CACHE_DTYPES = frozenset(
    (
        *("fp8_ds_mla", "nvfp4_ds_mla", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc"),
        *("turboquant_3bit_nc", "ultraquant_4bit", "int4_per_token_head", "int8_per_token_head"),
        *("fp8_per_token_head", "nvfp4", "nvfp4_4over6"),
    )
)
"""Words that vLLM 0.32 knows (config/cache.py:39) and whose pages are not modelled here."""
LAYOUT_ALIASES = {"NHD": Layout.LBNHC, "HND": Layout.LBHNC}
STATE_BYTES = {"bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "fp32": 4, "float32": 4, "fp8": 1}
UNMODELLED: Mapping[str, object] = {
    "pp": 1,
    "dcp": 1,
    "pcp": 1,
    "num_speculative_tokens": 0,
    "speculative_config": None,
    "mamba_block_size": None,
    "mamba_cache_mode": None,
    "kv_connector": None,
}
"""Flags that move the figures in ways not modelled here, and the value that leaves them alone."""
MOST_TOKENS = 2**40
MOST_BYTES = 2**60
WIDEST = 2**20


def answer_case(case: Mapping[str, object]) -> Answer:
    """id, ok, five figures and error, whatever the case. A malformed one is an answer with an error too."""
    case_id = _case_id(case)
    try:
        flags = mapping(case.get("input"), "input")
        _refuse_unmodelled(flags)
        stack, limits = read_stack(case, flags), read_limits(case, flags)
        if limits.max_num_encoder_input_tokens == 0 and any(isinstance(kind, CrossLayer) for kind in stack.kinds):
            raise DataError("cross layers need max_num_encoder_input_tokens", hint=HINT)
        outcome = allocate(stack, read_settings(case, flags), limits)
    except EngineRefused as refused:
        outcome = refused.refusal
    except KvtriageError as error:
        return answer_error(case_id, type(error).__name__, error.message)
    if isinstance(outcome, Refusal):
        return answer_error(case_id, outcome.error_type, outcome.text)
    return _answer_capacity(case_id, outcome)


def answer_error(case_id: str | None, error_type: str, reason: str) -> Answer:
    """An answer without figures."""
    error = {"error_type": error_type, "reason": reason}
    return {"id": case_id, "ok": False, **dict.fromkeys(FIGURES), "error": error}


def _answer_capacity(case_id: str | None, capacity: Capacity) -> Answer:
    """Where the engine prints its line and breaks afterwards, both the figures and the error."""
    breaks = capacity.breaks
    has_cache = bool(capacity.pool.groups)
    return {
        "id": case_id,
        "ok": breaks is None,
        "num_blocks": capacity.num_blocks,
        "bytes_per_block": capacity.pool.bytes_per_block if has_cache else None,
        "blocks_per_request": capacity.blocks_per_request if has_cache else None,
        "reported_tokens": capacity.reported_tokens if has_cache else None,
        "max_concurrency": capacity.max_concurrency if has_cache else None,
        "error": None if breaks is None else {"error_type": breaks.error_type, "reason": breaks.text},
    }


def _case_id(case: Mapping[str, object]) -> str | None:
    flags = case.get("input")
    found = case.get("id", flags.get("id") if isinstance(flags, Mapping) else None)
    return found if isinstance(found, str) else None


# --- the flags --------------------------------------------------------------------------


def _refuse_unmodelled(flags: Mapping[str, object]) -> None:
    for key, neutral in UNMODELLED.items():
        if flags.get(key) not in (None, neutral):
            raise DataError(f"{key} moves the figures in a way that is not modelled", hint=HINT)


def read_settings(case: Mapping[str, object], flags: Mapping[str, object]) -> PoolSettings:
    """Raises DataError, and EngineRefused for a cache dtype that the engine does not know either."""
    layout = flags.get("layout")
    return PoolSettings(
        cache_dtype=_cache_dtype(case, flags),
        skip_layers=words(flags, "skip_layers"),
        block_size=None if flags.get("block_size") is None else whole(flags, "block_size", None, 1, WIDEST),
        backend=choice(flags, "backend", Backend, Backend.FLASH_ATTN),
        layout=LAYOUT_ALIASES[layout]
        if isinstance(layout, str) and layout in LAYOUT_ALIASES
        else choice(flags, "layout", Layout, Layout.LBNHC),
        hybrid_manager=choice(flags, "hybrid_manager", HybridManager, HybridManager.AUTO),
        allow_chunked_hybrid=flag(flags, "allow_chunked_hybrid", True),
        prefix_caching=flag(flags, "prefix_caching", True),
    )


def _cache_dtype(case: Mapping[str, object], flags: Mapping[str, object]) -> CacheDtype:
    word = flags.get("kv_cache_dtype")
    word = "auto" if word is None else word
    if not isinstance(word, str) or word in OTHER_CACHE_DTYPES:
        raise DataError(f"kv_cache_dtype is {str(word)[:40]!a}, which is not modelled", hint=HINT)
    if word not in CACHE_DTYPES:
        raise EngineRefused(
            "ValidationError", Reason.CACHE_DTYPE, f"cache_dtype {word[:40]!a} is not one of the engine's"
        )
    dtype = CACHE_DTYPES[word]
    if dtype is CacheDtype.AUTO and any(layer.get("dtype") == "fp8" for _, layer in _layers(case, flags)):
        return CacheDtype.FP8
    return dtype


def read_limits(case: Mapping[str, object], flags: Mapping[str, object]) -> ServingLimits:
    """Raises DataError; UnsupportedModel or ModelError when the longest context must come from a config."""
    length = whole(flags, "max_model_len", None, -1, MOST_TOKENS)
    if length == 0:
        raise DataError("max_model_len is 0", hint=HINT)
    override = flags.get("num_gpu_blocks_override")
    return ServingLimits(
        available_bytes=whole(flags, "available_memory_bytes", None, -MOST_BYTES, MOST_BYTES),
        max_model_len=None if length == -1 else length,
        max_num_batched_tokens=whole(flags, "max_num_batched_tokens", 8192, 1, MOST_TOKENS),
        async_scheduling=flag(flags, "async_scheduling", True),
        max_num_encoder_input_tokens=whole(flags, "max_num_encoder_input_tokens", 0, 0, MOST_TOKENS),
        num_gpu_blocks_override=None
        if override is None
        else whole(flags, "num_gpu_blocks_override", None, 1, MOST_BYTES),
        longest_model_len=_longest_model_len(case) if length == -1 else None,
    )


def _longest_model_len(case: Mapping[str, object]) -> int:
    if case.get("config") is None:
        raise DataError("max_model_len -1 asks for the model's own length, and there is no config", hint=HINT)
    return read_cache_spec(mapping(case["config"], "config")).max_model_len


# --- the model --------------------------------------------------------------------------


def read_stack(case: Mapping[str, object], flags: Mapping[str, object]) -> LayerStack:
    """Layers where they are given, else from the config. Raises as `read_limits` and `stack_of_spec`."""
    runs = [(count, _layer(values)) for count, values in _layers(case, flags)]
    if runs or case.get("config") is None:
        return LayerStack.of_runs(runs)
    return stack_of_spec(read_cache_spec(mapping(case["config"], "config")), whole(flags, "tp", 1, 1, WIDEST))


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
        return StateLayer(_state_bytes(values))
    head_size = whole(values, "head_size", None, 1, WIDEST)
    if kind == "mla":
        return MlaLayer(head_size)
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
        total += STATE_BYTES[dtype] * math.prod(whole({"size": size}, "size", None, 1, WIDEST) for size in sizes)
    if total > MOST_BYTES:
        raise DataError("a state is larger than any memory", hint=HINT)
    return total
