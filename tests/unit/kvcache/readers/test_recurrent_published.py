"""Recurrent hybrids as their authors publish them, and as the engine takes them, where both lie beside the checkout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import LayerKind, StateTensor

SHARED = Path(__file__).resolve().parents[5] / "shared"
CONFIGS = SHARED / "configs"
GOLDEN = SHARED / "capacity" / "golden.jsonl"

needs_configs = pytest.mark.skipif(not CONFIGS.is_dir(), reason=f"no published configs at {CONFIGS}")

DELTA_122B = (36, 12, 24_576, 36 * (3 * 12_288 * 2 + 64 * 128 * 128 * 4))
DELTA_397B = (45, 15, 30_720, 45 * (3 * 12_288 * 2 + 64 * 128 * 128 * 4))
DELTA_35B = (30, 10, 20_480, 30 * (3 * 8192 * 2 + 32 * 128 * 128 * 4))
DELTA_27B = (48, 16, 65_536, 48 * (3 * 10_240 * 2 + 48 * 128 * 128 * 4))
NANO = (23, 6, 6144, 23 * (3 * 6144 * 2 + 64 * 64 * 128 * 4))
SUPER = (40, 8, 8192, 40 * (3 * (128 * 64 + 2 * 8 * 128) * 2 + 128 * 64 * 128 * 4))

PUBLISHED = {
    "LFM2.5-VL-1.6B.json": (10, 6, 12_288, 10 * 2 * 2048 * 2),
    "Qwen--Qwen3.5-122B-A10B.json": DELTA_122B,
    "Qwen--Qwen3.5-27B.json": DELTA_27B,
    "Qwen--Qwen3.5-35B-A3B.json": DELTA_35B,
    "Qwen--Qwen3.5-397B-A17B.json": DELTA_397B,
    "Qwen3.5-9B.json": (24, 8, 32_768, 24 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)),
    "ibm--granite-4-8b-dense-hybrid.json": (0, 40, 163_840, 0),
    "moonshotai--Kimi-K3.json": (69, 24, 27_648, 69 * (3 * 36_864 * 2 + 96 * 128 * 128 * 4)),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json": NANO,
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4.json": NANO,
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8.json": SUPER,
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4.json": SUPER,
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16.json": (
        48,
        12,
        12_288,
        48 * (3 * (256 * 64 + 2 * 8 * 128) * 2 + 256 * 64 * 128 * 4),
    ),
    "nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4.json": NANO,
    "nvidia--Nemotron-H-56B-Base-8K.json": (
        54,
        10,
        40_960,
        54 * (3 * (256 * 64 + 2 * 8 * 256) * 2 + 256 * 64 * 256 * 4),
    ),
    "nvidia--Qwen3.5-122B-A10B-NVFP4.json": DELTA_122B,
    "nvidia--Qwen3.5-397B-A17B-NVFP4.json": DELTA_397B,
    "nvidia--Qwen3.6-27B-NVFP4.json": DELTA_27B,
    "nvidia--Qwen3.6-35B-A3B-NVFP4.json": DELTA_35B,
    "sophgo--MiniCPM-V-4_6.json": (18, 6, 12_288, 18 * (3 * 6144 * 2 + 16 * 128 * 128 * 2)),
    "sophgo--Qwen3.5-0.8B-class.json": (18, 6, 12_288, 18 * (3 * 6144 * 2 + 16 * 128 * 128 * 4)),
}
"""file → recurrent layers, layers with K and V or a latent, BF16 bytes of one token, bytes of the states."""


@needs_configs
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published(name: str) -> None:
    spec = read_cache_spec(json.loads((CONFIGS / name).read_bytes()))
    attention = [layer for layer in spec.layers if layer.holds_kv]
    assert (
        len(spec.layers_of(LayerKind.STATE)),
        len(attention),
        2 * sum(layer.elements_per_position for layer in attention),
        sum(layer.side_bytes(spec.max_model_len) for layer in spec.layers),
    ) == PUBLISHED[name]


def engine_layers(case: dict[str, Any]) -> list[object]:
    """Each layer as the engine took it: the shapes of its state, or KV heads and their width."""
    return [
        layer.get("state_shapes", (layer.get("num_kv_heads"), layer.get("head_size")))
        for count, layer in case["layer_runs"]
        for _ in range(count)
    ]


def shapes_of_a_rank(state: tuple[StateTensor, ...], ranks: int) -> list[list[int]]:
    return [
        [size // ranks if axis == tensor.sharded_axis else size for axis, size in enumerate(tensor.shape)]
        for tensor in state
    ]


@pytest.mark.skipif(not GOLDEN.is_file(), reason=f"no answers of the engine at {GOLDEN}")
def test_layers_are_the_engines() -> None:
    cases = [json.loads(line) for line in GOLDEN.read_text().splitlines() if "Qwen3NextForCausalLM" in line]
    assert cases
    for case in cases:
        ranks = case["input"].get("tp") or 1
        found: list[object] = []
        for layer in read_cache_spec(case["config"]).layers:
            state = tuple(tensor for tensor in layer.beside if isinstance(tensor, StateTensor))
            kv = (max(1, layer.num_kv_heads // ranks), layer.head_dim)
            found.append(shapes_of_a_rank(state, ranks) if state else kv)
            assert all(tensor.element_bytes == 2 for tensor in state)
        assert found == engine_layers(case), case["id"]
