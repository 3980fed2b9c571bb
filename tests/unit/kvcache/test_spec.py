from __future__ import annotations

from dataclasses import replace

import pytest

from kvtriage.kvcache.spec import Compressor, IndexKeys, LayerKind
from tests.unit.kvcache.models import GPT_OSS_20B, layer, spec_of


@pytest.mark.parametrize(("context_len", "retained"), [(1, 1), (127, 127), (128, 128), (129, 128), (32768, 128)])
def test_a_sliding_layer_retains_its_window(context_len: int, retained: int) -> None:
    assert layer(window_tokens=128).retained_positions(context_len) == retained


def test_a_full_layer_retains_everything() -> None:
    assert layer().retained_positions(32768) == 32768


@pytest.mark.parametrize(
    ("context_len", "retained"), [(1, 1), (3, 3), (4, 4 + 1), (7, 7 + 1), (8, 8 + 2), (9, 8 + 2), (4096, 8 + 1024)]
)
def test_compressed_positions_come_beside_the_window(context_len: int, retained: int) -> None:
    assert replace(layer(window_tokens=8), compress_ratio=4).retained_positions(context_len) == retained


@pytest.mark.parametrize(("context_len", "keys", "waiting"), [(1, 0, 1), (4, 1, 4), (9, 2, 8), (4096, 1024, 8)])
def test_what_stands_beside_a_compressed_memory(context_len: int, keys: int, waiting: int) -> None:
    compressed = replace(layer(), beside=(IndexKeys(132, ratio=4), Compressor(window_tokens=8, position_bytes=4096)))
    assert compressed.side_bytes(context_len) == 132 * keys + 4096 * waiting


def test_elements_count_k_and_v_of_different_width() -> None:
    assert layer(kv_heads=3, head_dim=192, head_dim_v=128).elements_per_position == 3 * (192 + 128)


def test_layers_of_each_kind() -> None:
    assert GPT_OSS_20B.layers_of(LayerKind.SLIDING) == tuple(range(0, 24, 2))
    assert GPT_OSS_20B.layers_of(LayerKind.FULL) == tuple(range(1, 24, 2))
    assert GPT_OSS_20B.layers[0].queries_per_kv_head == 8


def test_windows_are_those_of_sliding_layers_each_once() -> None:
    assert GPT_OSS_20B.windows == (128,)
    assert spec_of(layer(0)).windows == ()


def test_hybrid_means_more_than_one_kind() -> None:
    assert GPT_OSS_20B.is_hybrid
    assert not spec_of(layer(0), layer(1)).is_hybrid
