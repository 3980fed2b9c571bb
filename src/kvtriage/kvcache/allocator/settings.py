"""What the engine was told: the flags that move its capacity, with vLLM 0.32's defaults."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "CACHE_DTYPES",
    "LAYOUT_ALIASES",
    "Backend",
    "CacheDtype",
    "HybridManager",
    "Layout",
    "MambaDtype",
    "PoolSettings",
    "ServingLimits",
    "SpeculativeMethod",
]


class CacheDtype(enum.StrEnum):
    """--kv-cache-dtype. The FP8 spellings of vLLM that store one byte an element are all FP8."""

    AUTO = "auto"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"

    @property
    def element_bytes(self) -> int:
        return 1 if self is CacheDtype.FP8 else 2


CACHE_DTYPES: Mapping[str, CacheDtype] = {
    **{dtype.value: dtype for dtype in CacheDtype},
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "fp8_inc"), CacheDtype.FP8),
}
"""The engine's words whose pages are modelled."""


class MambaDtype(enum.StrEnum):
    """--mamba-cache-dtype and --mamba-ssm-cache-dtype. AUTO is what the model says (config/cache.py:62)."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def element_bytes(self) -> int:
        """Raises ValueError for AUTO, which only the model knows."""
        if self is MambaDtype.AUTO:
            raise ValueError("auto has the bytes that the model says")
        return 4 if self is MambaDtype.FLOAT32 else 2


class SpeculativeMethod(enum.StrEnum):
    """How tokens are guessed ahead, as far as it matters to the cache. Drafters of other methods are not modelled.

    MTP     by the checkpoint's own drafter: its layers hold a cache
    EAGLE   by a drafter from another checkpoint, EAGLE 1 or 3, which goes on where the model's layers end
    NGRAM   by looking back in the text: no layer, and no asynchronous scheduling (config/vllm.py:1585-1600)
    """

    MTP = "mtp"
    EAGLE = "eagle"
    NGRAM = "ngram"


class Backend(enum.StrEnum):
    """The attention backend, as far as its block sizes matter. MLA layers have backends of their own.

    CPU_ATTN stands for the platform too: on CPUs pages are not aligned beforehand, and no step is scheduled ahead.
    """

    FLASH_ATTN = "FLASH_ATTN"
    FLASHINFER = "FLASHINFER"
    TRITON_ATTN = "TRITON_ATTN"
    CPU_ATTN = "CPU_ATTN"


class Layout(enum.StrEnum):
    """VLLM_KV_CACHE_LAYOUT: the order of layers, blocks, heads, tokens (N) and elements (C) in memory."""

    LBNHC = "LBNHC"
    LBHNC = "LBHNC"
    LHBNC = "LHBNC"
    BLNHC = "BLNHC"
    BLHNC = "BLHNC"
    BHLNC = "BHLNC"

    @property
    def has_blocks_outermost(self) -> bool:
        return self.value[0] == "B"

    @property
    def keeps_blocks_compact(self) -> bool:
        """All heads of one layer's block lie together."""
        return "H" not in self.value[:2]


LAYOUT_ALIASES: Mapping[str, Layout] = {"NHD": Layout.LBNHC, "HND": Layout.LBHNC}
"""The names that the variable took before it had six values."""


class HybridManager(enum.StrEnum):
    """AUTO, --no-disable-hybrid-kv-cache-manager, --disable-hybrid-kv-cache-manager."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What decides pages, groups and the bytes of a block.

    `skip_layers` is --kv-cache-dtype-skip-layers word for word: 'sliding_window' and layer indices
    mean something, every other word is ignored, as the engine ignores it. `allow_chunked_hybrid` is
    VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE. Each speculative token takes a state of its own
    (model_executor/layers/mamba/abstract.py:79).
    """

    cache_dtype: CacheDtype = CacheDtype.AUTO
    model_dtype: CacheDtype = CacheDtype.BFLOAT16
    skip_layers: tuple[str, ...] = ()
    block_size: int | None = None
    backend: Backend = Backend.FLASH_ATTN
    layout: Layout = Layout.LBNHC
    hybrid_manager: HybridManager = HybridManager.AUTO
    allow_chunked_hybrid: bool = True
    prefix_caching: bool = True
    num_speculative_tokens: int = 0
    pipeline_parallel_size: int = 1

    @property
    def primary_dtype(self) -> CacheDtype:
        """The dtype of a layer that is not skipped."""
        return self.model_dtype if self.cache_dtype is CacheDtype.AUTO else self.cache_dtype


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What decides how many blocks there are and how many one request may hold.

    `max_model_len` None is -1: the longest that fits, at most `longest_model_len`. A sliding layer must have
    room for all `batches_in_flight`: None is two with asynchronous scheduling, else one. For a drafter of several
    modules it keeps `retained_tokens` more than its window (v1/core/kv_cache_utils.py:2585). Ranks of decode context
    parallelism share out the tokens of full and latent layers.
    """

    available_bytes: int
    max_model_len: int | None
    max_num_batched_tokens: int = 8192
    async_scheduling: bool = True
    max_num_encoder_input_tokens: int = 0
    num_gpu_blocks_override: int | None = None
    longest_model_len: int | None = None
    batches_in_flight: int | None = None
    retained_tokens: int = 0
    decode_context_parallel_size: int = 1

    @property
    def tokens_in_flight(self) -> int:
        batches = self.batches_in_flight
        if batches is None:
            batches = 2 if self.async_scheduling else 1
        return self.max_num_batched_tokens * batches
