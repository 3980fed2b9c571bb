"""vLLM's CPU attention backend, with another way to store: E4M3 per tensor or per head.

A layer is ours when its cache is narrower than the arithmetic: E4M3, or BF16 and FP16 under a
float32 model (vLLM's own kernels take such a cache for float32 and read garbage). Every other
layer, a skipped one among them, goes to vLLM's kernels as before. A layer that is `auto`, as
skipped ones are, has the model's dtype, or the one that KVTRIAGE_CPU_NATIVE_DTYPE names.

Made for vLLM 0.32: v1/attention/backends/cpu_attn.py.
"""

from __future__ import annotations

import copy
import itertools
import os
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from kvtriage_vllm_cpu.attention import Shape, attend
from kvtriage_vllm_cpu.storage import open_pages, read, write

__all__ = ["NATIVE_VARIABLE", "Backend", "Impl", "MetadataBuilder", "native_dtype"]

NATIVE_VARIABLE = "KVTRIAGE_CPU_NATIVE_DTYPE"
"""Names what an unquantised cache is stored in; unset or empty for the model's own dtype."""
_E4M3 = ("fp8", "fp8_e4m3")
_NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def native_dtype() -> torch.dtype | None:
    """None for the model's own. Raises ValueError for a name that is neither BF16's nor FP16's."""
    name = os.environ.get(NATIVE_VARIABLE, "")
    if name and name not in _NARROW:
        raise ValueError(f"{NATIVE_VARIABLE} is {name!r}, and has to be one of {', '.join(_NARROW)}, or unset")
    return _NARROW.get(name)


class Backend(CPUAttentionBackend):
    """Registered under vLLM's own name CPU_ATTN: the CPU platform asks for no other."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *_NARROW, *_E4M3]

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Unquantised pages of a float32 model are those of `native_dtype`."""
        native = native_dtype()
        return spec if native is None or spec.dtype is not torch.float32 else replace(spec, dtype=native)

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder


class MetadataBuilder(CPUAttentionMetadataBuilder):
    """vLLM's own, told that the cache is native: what it prepares is for native layers only.

    Left alone it goes by the dtype of the whole run, which is wrong for a skipped layer, and
    refuses FP8 on a CPU without AVX-512.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        native = copy.copy(vllm_config)
        native.cache_config = copy.copy(vllm_config.cache_config)
        native.cache_config.cache_dtype = "auto"
        super().__init__(kv_cache_spec, layer_names, native, device)


class Impl(CPUAttentionBackendImpl):
    """One layer. `is_ours` says who stores and attends."""

    kv_cache_dtype: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's own arguments. Raises NotImplementedError for what would be computed wrongly."""
        super().__init__(*args, **kwargs)
        model_dtype = get_current_vllm_config().model_config.dtype
        native = native_dtype() if model_dtype is torch.float32 else None
        narrow = native if self.kv_cache_dtype == "auto" else _NARROW.get(self.kv_cache_dtype)
        self.is_ours = self.kv_cache_dtype in _E4M3 or (narrow is not None and narrow is not model_dtype)
        if not self.is_ours:
            if self.is_fp8_kv_cache:
                raise NotImplementedError(f"kvtriage-vllm-cpu stores fp8_e4m3, and not {self.kv_cache_dtype}")
            if narrow is not None:
                self.kv_cache_dtype = "auto"
            return
        if self.attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"kvtriage-vllm-cpu stores {self.kv_cache_dtype} for decoder attention only")
        if self.alibi_slopes is not None:
            raise NotImplementedError(f"kvtriage-vllm-cpu stores {self.kv_cache_dtype} without ALiBi only")

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """key and value [T, n, D]."""
        if not self.is_ours:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        pages, tokens = open_pages(kv_cache), len(slot_mapping)
        write(pages.key, key[:tokens], slot_mapping, self._scale(layer._k_scale))
        write(pages.value, value[:tokens], slot_mapping, self._scale(layer._v_scale))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query and output [T, H, D]; K and V are read from the cache alone.

        Raises NotImplementedError for attention that is not causal.
        """
        if not self.is_ours or attn_metadata is None:
            result: Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
            return result
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("kvtriage-vllm-cpu does not quantise its output")
        if attn_metadata.causal is not True or attn_metadata.dynamic_causal is not None:
            raise NotImplementedError(f"kvtriage-vllm-cpu stores {self.kv_cache_dtype} for causal attention only")
        pages, shape = open_pages(kv_cache), self._shape()
        k_scale, v_scale = self._scale(layer._k_scale), self._scale(layer._v_scale)
        starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        for index, (start, stop) in enumerate(itertools.pairwise(starts)):
            length, blocks = lengths[index], attn_metadata.block_table[index]
            if stop == start:
                continue
            seen_from = length - (stop - start)
            first = 0 if shape.window_tokens is None else max(0, seen_from - shape.window_tokens + 1)
            k = read(pages.key, blocks, first, length, k_scale)
            v = read(pages.value, blocks, first, length, v_scale)
            q = query[start:stop].transpose(0, 1).to(torch.float32)
            output[start:stop] = attend(q, k, v, shape).transpose(0, 1).to(output.dtype)
        return output

    def _shape(self) -> Shape:
        return Shape(
            scaling=self.scale,
            window_tokens=None if self.sliding_window == -1 else self.sliding_window,
            softcap=self.logits_soft_cap or None,
            sinks=None if self.sinks is None else self.sinks.to(torch.float32),
        )

    def _scale(self, scale: Tensor) -> Tensor:
        """[1] or [n]. Raises ValueError for another number of scales."""
        flat = scale.reshape(-1)
        if flat.numel() not in (1, self.num_kv_heads):
            raise ValueError(f"{flat.numel()} scales for {self.num_kv_heads} KV heads")
        return flat
