from __future__ import annotations

from dataclasses import replace

import pytest

from kvtriage.kvcache.allocator import Reason, tensor_parallel_facts
from kvtriage.kvcache.allocator.ranks import rank_kv_heads, rank_state_bytes
from kvtriage.kvcache.allocator.refusal import EngineRefused
from kvtriage.kvcache.spec import IndexKeys, LayerKind, LayerSpec, StateTensor
from tests.unit.kvcache.models import GPT_OSS_20B, layer, spec_of

LATENT = LayerSpec(0, LayerKind.LATENT, 128, 1, 576, 0, beside=(IndexKeys(132),))
STATE = LayerSpec(
    1,
    LayerKind.STATE,
    0,
    0,
    0,
    0,
    beside=(
        StateTensor("conv", (3, 8192), 2, sharded_axis=1, grown_axis=0),
        StateTensor("recurrent", (32, 128, 128), 4, sharded_axis=0),
    ),
)


def test_heads_are_shared_out_while_there_are_enough() -> None:
    facts = tensor_parallel_facts(GPT_OSS_20B, 4)
    sliding, full = facts.layers
    assert (sliding.kind, sliding.layer_idx, sliding.num_layers) == (LayerKind.SLIDING, 0, 12)
    assert (full.kind, full.layer_idx, full.num_layers) == (LayerKind.FULL, 1, 12)
    assert (sliding.rank_kv_heads, sliding.copies) == (2, 1)
    assert sliding.fp8_position_bytes == 2 * (64 + 64)


def test_beyond_their_number_heads_are_copied() -> None:
    facts = tensor_parallel_facts(GPT_OSS_20B, 32)
    assert [(alike.rank_kv_heads, alike.copies) for alike in facts.layers] == [(1, 4), (1, 4)]


def test_scales_of_a_rank_are_those_of_its_heads() -> None:
    """64 query and 8 KV heads: 320 bytes a layer on one rank, 80 on each of four; three scalars are three scalars."""
    assert tensor_parallel_facts(GPT_OSS_20B, 1).per_head_scale_bytes == 24 * 320
    assert tensor_parallel_facts(GPT_OSS_20B, 4).per_head_scale_bytes == 24 * 80
    assert tensor_parallel_facts(GPT_OSS_20B, 16).per_head_scale_bytes == 24 * 4 * (4 + 2)
    assert {tensor_parallel_facts(GPT_OSS_20B, ranks).per_tensor_scale_bytes for ranks in (1, 4, 16)} == {24 * 12}


def test_a_latent_and_its_index_are_on_every_rank() -> None:
    (latent,) = tensor_parallel_facts(spec_of(LATENT), 8).layers
    assert (latent.rank_kv_heads, latent.copies, latent.fp8_position_bytes) == (1, 8, 576)
    assert latent.index_position_bytes == 132


def test_a_state_is_shared_out_and_grows_with_speculation() -> None:
    (state,) = tensor_parallel_facts(spec_of(STATE), 4).layers
    assert state.state_bytes == (3 * 8192 * 2 + 32 * 128 * 128 * 4) // 4
    assert (state.copies, state.per_head_scale_bytes, state.fp8_position_bytes) == (1, 0, 0)
    assert rank_state_bytes(STATE, 4, 2) - rank_state_bytes(STATE, 4) == 2 * 8192 * 2 // 4


def test_layers_that_hold_nothing_are_left_out() -> None:
    nothing = LayerSpec(1, LayerKind.NONE, 0, 0, 0, 0)
    sharing = replace(layer(2), shares_with=0)
    assert [alike.num_layers for alike in tensor_parallel_facts(spec_of(layer(0), nothing, sharing), 2).layers] == [1]


@pytest.mark.parametrize(
    ("odd", "ranks", "error_type"),
    [
        (layer(heads=9, kv_heads=3), 2, "ValidationError"),
        (layer(heads=12, kv_heads=4), 6, "AssertionError"),
        (LATENT, 3, "ValidationError"),
    ],
)
def test_heads_that_cannot_be_shared_out_are_refused(odd: LayerSpec, ranks: int, error_type: str) -> None:
    with pytest.raises(EngineRefused) as caught:
        rank_kv_heads(odd, ranks)
    assert (caught.value.refusal.error_type, caught.value.refusal.reason) == (error_type, Reason.HEADS)


def test_states_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(EngineRefused, match="cannot share") as caught:
        rank_state_bytes(STATE, 3)
    assert caught.value.refusal.error_type == "AssertionError"
