"""A program, run by vLLM's own Python: the backend against vLLM's native kernels.

What E4M3 keeps of K and V is given to vLLM's float32 kernels as it is; storing K and V in E4M3
must come to the same. Prints, as JSON, which backend vLLM takes for CPU_ATTN and the largest
relative difference of the outputs for each kind of attention.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import kvtriage_vllm_cpu
import torch
from torch import Tensor

H, HKV, D, BLOCK = 6, 2, 64, 128
SEQUENCES = ((5, 5), (1, 150), (40, 300))
"""A ragged batch: (new tokens, context length) of each sequence."""
BLOCKS = ((3,), (5, 1), (2, 6, 4))
SCALES = {"tensor": torch.tensor([0.02]), "head": torch.tensor([0.004, 0.3])}


@dataclass(frozen=True)
class Kind:
    """One kind of attention."""

    window_tokens: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


KINDS = {
    "plain": Kind(),
    "window": Kind(window_tokens=64),
    "softcap": Kind(softcap=3.0),
    "sinks": Kind(has_sinks=True),
    "window and sinks": Kind(window_tokens=64, has_sinks=True),
}


def kept(values: Tensor, scale: Tensor) -> Tensor:
    """What E4M3 keeps of [T, n, D]."""
    return (values / scale.view(1, -1, 1)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale.view(1, -1, 1)


def make(dtype: str, kind: Kind) -> Any:
    """An impl of the registered backend for a layer whose cache is of `dtype`."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    impl_class = AttentionBackendEnum.CPU_ATTN.get_class().get_impl_cls()
    sinks = torch.randn(H, generator=torch.Generator().manual_seed(5)) if kind.has_sinks else None
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    with (
        patch("vllm.v1.attention.backends.cpu_attn.get_current_vllm_config", lambda: config),
        patch("kvtriage_vllm_cpu.backend.get_current_vllm_config", lambda: config),
    ):
        return impl_class(H, D, D**-0.5, HKV, None, kind.window_tokens, dtype, kind.softcap, sinks=sinks)


def attend(impl: Any, cache: Tensor, scale: Tensor, query: Tensor, key: list[Tensor], value: list[Tensor]) -> Tensor:
    """Store every sequence, then attend with the queries of all of them: [T, H, D]."""
    from vllm import _custom_ops as ops

    layer = SimpleNamespace(isa="vec", _k_scale=scale, _v_scale=scale, _k_scale_float=1.0, _v_scale_float=1.0)
    for blocks, k, v in zip(BLOCKS, key, value, strict=True):
        at = torch.arange(len(k))
        slots = torch.tensor(blocks)[at // BLOCK] * BLOCK + at % BLOCK
        impl.do_kv_cache_update(layer, k, v, cache, slots)
    starts = torch.tensor([0, *itertools.accumulate(new for new, _ in SEQUENCES)], dtype=torch.int32)
    lengths = torch.tensor([length for _, length in SEQUENCES], dtype=torch.int32)
    table = torch.zeros(len(BLOCKS), 3, dtype=torch.int32)
    for row, blocks in zip(table, BLOCKS, strict=True):
        row[: len(blocks)] = torch.tensor(blocks)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(SEQUENCES),
        num_heads=H,
        num_kv_heads=HKV,
        head_dim=D,
        seq_lens=lengths,
        dtype=torch.float32,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=impl.sliding_window,
        isa="vec",
        enable_kv_split=True,
    )
    metadata = SimpleNamespace(
        num_actual_tokens=len(query),
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=table,
        scheduler_metadata=schedule,
        causal=True,
        dynamic_causal=None,
    )
    output: Tensor = impl.forward(layer, query, query, query, cache, metadata, output=torch.empty_like(query))
    return output


def difference(kind: Kind, scale: Tensor) -> float:
    """Largest difference of the outputs, relative to the largest output."""
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(sum(new for new, _ in SEQUENCES), H, D, generator=generator)
    key, value = ([torch.randn(length, HKV, D, generator=generator) * 2 for _, length in SEQUENCES] for _ in range(2))
    ours = attend(make("fp8", kind), torch.zeros(8, HKV, BLOCK, 2 * D, dtype=torch.uint8), scale, query, key, value)
    native = attend(
        make("auto", kind),
        torch.zeros(8, HKV, BLOCK, 2 * D),
        scale,
        query,
        [kept(k, scale) for k in key],
        [kept(v, scale) for v in value],
    )
    return float((ours - native).abs().max() / native.abs().max())


def under_bf16() -> dict[str, object]:
    """What an unquantised layer of a float32 model becomes where BF16 is named for it."""
    from kvtriage_vllm_cpu.backend import NATIVE_VARIABLE, Backend
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    generator = torch.Generator().manual_seed(8)
    query = torch.randn(sum(new for new, _ in SEQUENCES), H, D, generator=generator)
    values = [torch.randn(length, HKV, D, generator=generator) for _, length in SEQUENCES]
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HKV, head_size=D, dtype=torch.float32)
    rounded = [value.to(torch.bfloat16).float() for value in values]
    native = attend(make("auto", Kind()), torch.zeros(8, HKV, BLOCK, 2 * D), SCALES["tensor"], query, rounded, rounded)
    with patch.dict(os.environ, {NATIVE_VARIABLE: "bfloat16"}):
        impl, stored = make("auto", Kind()), Backend.customize_spec(spec)
        ours = attend(impl, torch.zeros(8, HKV, BLOCK, 2 * D).to(stored.dtype), SCALES["tensor"], query, values, values)
        e4m3 = Backend.customize_spec(replace(spec, dtype=torch.uint8)).dtype
    return {
        "is_ours": impl.is_ours,
        "dtypes": [str(found) for found in (stored.dtype, e4m3, Backend.customize_spec(spec).dtype)],
        "difference": float((ours - native).abs().max() / native.abs().max()),
    }


def refused() -> list[str]:
    """What is said of a cache that would be read wrongly."""
    try:
        make("fp8_e5m2", Kind())
    except NotImplementedError as error:
        return [str(error)]
    return []


def without_avx512() -> dict[str, str]:
    """What vLLM's own builder and ours make of a run in FP8 on a CPU without AVX-512 and AMX."""
    from kvtriage_vllm_cpu.backend import MetadataBuilder
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    config = SimpleNamespace(
        parallel_config=None,
        model_config=SimpleNamespace(dtype=torch.float32, get_num_attention_heads=lambda parallel: H),
        cache_config=SimpleNamespace(cache_dtype="fp8"),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    layout = SimpleNamespace(num_kv_heads=HKV, head_size=D, block_size=BLOCK)
    said = {}
    with (
        patch("torch.cpu._is_avx512_supported", lambda: False),
        patch("torch.cpu._is_amx_tile_supported", lambda: False),
    ):
        for name, builder in (("vllm", CPUAttentionMetadataBuilder), ("ours", MetadataBuilder)):
            try:
                said[name] = builder(layout, [], config, torch.device("cpu")).isa
            except NotImplementedError as error:
                said[name] = str(error)
    said["cache_dtype afterwards"] = config.cache_config.cache_dtype
    return said


def on_another_release() -> str:
    """How the loading of plug-ins ends, as every process of a server does it, in a vLLM that was not tested."""
    import vllm
    from vllm import plugins

    found = importlib.metadata.EntryPoint("kvtriage_cpu", "kvtriage_vllm_cpu:register", plugins.DEFAULT_PLUGINS_GROUP)
    with (
        patch.object(vllm, "__version__", "0.33.0"),
        patch.object(plugins, "plugins_loaded", False),
        patch("importlib.metadata.entry_points", lambda group: [found]),
    ):
        try:
            plugins.load_general_plugins()
        except kvtriage_vllm_cpu.UnsupportedVersion as error:
            return str(error)
    return "it went on"


def main() -> None:
    kvtriage_vllm_cpu.register()
    kvtriage_vllm_cpu.register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    differences = {
        f"{name}, per {granularity}": difference(kind, scale)
        for name, kind in KINDS.items()
        for granularity, scale in SCALES.items()
    }
    backend = AttentionBackendEnum.CPU_ATTN.get_class()
    found = {
        "backend": f"{backend.__module__}.{backend.__qualname__}",
        "ours": {dtype: make(dtype, Kind()).is_ours for dtype in ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")},
        "under_bf16": under_bf16(),
        "refused": refused(),
        "without_avx512": without_avx512(),
        "on_another_release": on_another_release(),
        "differences": differences,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
