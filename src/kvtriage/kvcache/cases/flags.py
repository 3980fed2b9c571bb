"""The flags of a case: EngineArgs from JSON, and the two that a policy says elsewhere, dtype and skip list."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from kvtriage.errors import BadInput, DataError
from kvtriage.kvcache.allocator.refusal import EngineRefused, Reason
from kvtriage.kvcache.allocator.settings import (
    CACHE_DTYPES,
    LAYOUT_ALIASES,
    Backend,
    CacheDtype,
    HybridManager,
    Layout,
    MambaDtype,
    SpeculativeMethod,
)
from kvtriage.kvcache.cases.values import HINT, MOST_BYTES, MOST_TOKENS, WIDEST, choice, flag, optional, whole
from kvtriage.kvcache.engine_args import EngineArgs
from kvtriage.kvcache.versions import MODELLED, EngineVersion

__all__ = ["FLAGS", "read_args", "read_cache_dtype", "refuse_misspelt", "refuse_unmodelled"]

OTHER_CACHE_DTYPES = frozenset(
    (
        *("fp8_ds_mla", "nvfp4_ds_mla", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc"),
        *("turboquant_3bit_nc", "ultraquant_4bit", "int4_per_token_head", "int8_per_token_head"),
        *("fp8_per_token_head", "nvfp4", "nvfp4_4over6"),
    )
)
"""Words that vLLM 0.32 knows (config/cache.py:39) and whose pages are not modelled here."""
UNMODELLED = ("speculative_config", "kv_connector")
"""Flags that move the figures in ways not modelled here, unless they are null."""
FLAGS = frozenset(
    (
        *("id", "layers", "layer_runs", "available_memory_bytes", "max_model_len", "max_num_batched_tokens"),
        *("async_scheduling", "prefix_caching", "block_size", "backend", "layout", "hybrid_manager"),
        *("allow_chunked_hybrid", "num_gpu_blocks_override", "max_num_encoder_input_tokens", "version"),
        *("tp", "pp", "dcp", "pcp", "num_speculative_tokens", "speculative_method", "kv_cache_dtype", "skip_layers"),
        *("mamba_cache_mode", "mamba_block_size", "mamba_cache_dtype", "mamba_ssm_cache_dtype"),
        *UNMODELLED,
    )
)
"""All that an `input` may say. Other keys are ignored, unless they are nearly one of these."""
NEAR = 0.8
LONGEST_KEY = 64
MOST_KEYS = 1000
MOST_RANKS = 4096
MOST_DRAFTED = 1024


def refuse_unmodelled(flags: Mapping[str, object]) -> None:
    """Raises DataError naming the flag."""
    for key in UNMODELLED:
        if flags.get(key) is not None:
            raise DataError(f"{key} moves the figures in a way that is not modelled", hint=HINT)


def refuse_misspelt(flags: Mapping[str, object]) -> None:
    """Raises DataError for a key that is ignored and nearly one that is read, naming both; and for a flood of keys."""
    if len(flags) > MOST_KEYS:
        raise DataError(f"input has more than {MOST_KEYS:,} keys", hint=HINT)
    known = sorted(FLAGS)
    for key in flags:
        if key in FLAGS or len(key) > LONGEST_KEY:
            continue
        if near := get_close_matches(key, known, n=1, cutoff=NEAR):
            raise DataError(f"input has no key {key!a}: it may be {near[0]}", hint=HINT)


def read_args(flags: Mapping[str, object]) -> EngineArgs:
    """Raises DataError, and EngineRefused for a mamba_cache_mode that the engine does not know."""
    length = whole(flags, "max_model_len", None, -1, MOST_TOKENS)
    if length == 0:
        raise DataError("max_model_len is 0", hint=HINT)
    return EngineArgs(
        max_model_len=length,
        max_num_batched_tokens=whole(flags, "max_num_batched_tokens", 8192, 1, MOST_TOKENS),
        async_scheduling=flag(flags, "async_scheduling", True),
        enable_prefix_caching=None if flags.get("prefix_caching") is None else flag(flags, "prefix_caching", True),
        tensor_parallel_size=whole(flags, "tp", 1, 1, WIDEST),
        block_size=optional(flags, "block_size", 1, WIDEST),
        attention_backend=choice(flags, "backend", Backend, Backend.FLASH_ATTN),
        layout=_layout(flags),
        hybrid_manager=choice(flags, "hybrid_manager", HybridManager, HybridManager.AUTO),
        allow_chunked_hybrid=flag(flags, "allow_chunked_hybrid", True),
        num_gpu_blocks_override=optional(flags, "num_gpu_blocks_override", 1, MOST_BYTES),
        version=_version(flags),
        pipeline_parallel_size=whole(flags, "pp", 1, 1, MOST_RANKS),
        decode_context_parallel_size=whole(flags, "dcp", 1, 1, MOST_RANKS),
        prefill_context_parallel_size=whole(flags, "pcp", 1, 1, MOST_RANKS),
        num_speculative_tokens=whole(flags, "num_speculative_tokens", 0, 0, MOST_DRAFTED),
        speculative_method=choice(flags, "speculative_method", SpeculativeMethod, SpeculativeMethod.MTP),
        mamba_cache_mode=_mamba_cache_mode(flags),
        mamba_block_size=optional(flags, "mamba_block_size", 1, MOST_TOKENS),
        mamba_cache_dtype=choice(flags, "mamba_cache_dtype", MambaDtype, MambaDtype.AUTO),
        mamba_ssm_cache_dtype=choice(flags, "mamba_ssm_cache_dtype", MambaDtype, MambaDtype.AUTO),
        max_num_encoder_input_tokens=optional(flags, "max_num_encoder_input_tokens", 0, MOST_TOKENS),
    )


def read_cache_dtype(flags: Mapping[str, object], auto: str) -> CacheDtype:
    """`auto` is the word that the model's own scheme makes of `auto`.

    Raises DataError, and EngineRefused for a word that the engine does not know either.
    """
    word = flags.get("kv_cache_dtype")
    word = auto if word in (None, "auto") else word
    if not isinstance(word, str) or word in OTHER_CACHE_DTYPES:
        raise DataError(f"kv_cache_dtype is {str(word)[:40]!a}, which is not modelled", hint=HINT)
    if word not in CACHE_DTYPES:
        raise EngineRefused(
            "ValidationError", Reason.CACHE_DTYPE, f"cache_dtype {word[:40]!a} is not one of the engine's"
        )
    return CACHE_DTYPES[word]


def _layout(flags: Mapping[str, object]) -> Layout:
    word = flags.get("layout")
    if isinstance(word, str) and word in LAYOUT_ALIASES:
        return LAYOUT_ALIASES[word]
    return choice(flags, "layout", Layout, Layout.LBNHC)


def _version(flags: Mapping[str, object]) -> EngineVersion:
    word = flags.get("version")
    if word is None:
        return MODELLED
    if not isinstance(word, str):
        raise DataError("version is not a text", hint=HINT)
    try:
        return EngineVersion.parse(word)
    except BadInput as error:
        raise DataError(f"version: {error.message}", hint=error.hint) from error


def _mamba_cache_mode(flags: Mapping[str, object]) -> str:
    word = flags.get("mamba_cache_mode")
    if word is None:
        return "none"
    if not isinstance(word, str):
        raise DataError("mamba_cache_mode is not a text", hint=HINT)
    return word
