"""The bytes of a recurrent state: one sequence, one layer, whole or shared out among ranks."""

from __future__ import annotations

import pytest

from kvtriage.kvcache.readers.states import (
    FLOAT32_BYTES,
    MODEL_BYTES,
    Mamba2,
    gated_delta_net_state,
    kimi_delta_state,
    linear_attention_state,
    mamba1_state,
    mamba2_state,
    short_conv_state,
)
from kvtriage.kvcache.spec import StateTensor

State = tuple[StateTensor, ...]


def whole(state: State) -> int:
    return sum(tensor.sequence_bytes for tensor in state)


def of_a_rank(state: State, tensor_parallel: int, speculative_tokens: int = 0) -> int:
    return sum(tensor.rank_bytes(tensor_parallel, speculative_tokens) for tensor in state)


NANO = Mamba2(num_heads=64, head_dim=64, num_groups=8, state_size=128, conv_kernel=4)
ONE_GROUP = Mamba2(num_heads=128, head_dim=64, num_groups=1, state_size=128, conv_kernel=4)


@pytest.mark.parametrize(
    ("state", "conv_bytes", "recurrent_bytes"),
    [
        # Qwen3-Next-80B-A3B: 3 inputs of 2·16·128 + 32·128 = 8,192 channels; 32 matrices of 128 × 128
        (gated_delta_net_state(16, 128, 32, 128, 4, MODEL_BYTES), 49_152, 1_048_576),
        # Qwen3.5-27B: 3 of 2·16·128 + 48·128 = 10,240; 48 matrices in float32
        (gated_delta_net_state(16, 128, 48, 128, 4, FLOAT32_BYTES), 61_440, 3_145_728),
        # Nemotron 3 Nano: 3 of 64·64 + 2·8·128 = 6,144; 64 matrices of 64 × 128 in float32
        (mamba2_state(NANO, FLOAT32_BYTES), 36_864, 2_097_152),
        # Granite 4.0 H Small: 3 of 128·64 + 2·128 = 8,448; 128 matrices of 64 × 128
        (mamba2_state(ONE_GROUP, MODEL_BYTES), 50_688, 2_097_152),
        # Jamba: 3 of 8,192; 8,192 × 16
        (mamba1_state(8192, 16, 4), 49_152, 262_144),
        # Kimi-K3: 3 of 3·96·128 = 36,864; 96 matrices of 128 × 128 in float32
        (kimi_delta_state(96, 128, 4), 221_184, 6_291_456),
        # 64 matrices of 128 × 128
        (linear_attention_state(64, 128), 0, 2_097_152),
        # LFM2-1.2B: 2 of 2,048
        (short_conv_state(2048, 3), 8192, 0),
    ],
)
def test_bytes_of_one_sequence(state: State, conv_bytes: int, recurrent_bytes: int) -> None:
    by_name = {"conv": 0, "recurrent": 0}
    for tensor in state:
        by_name[tensor.name.removesuffix("_groups")] += tensor.sequence_bytes
    assert by_name == {"conv": conv_bytes, "recurrent": recurrent_bytes}
    assert of_a_rank(state, 1) == whole(state) == conv_bytes + recurrent_bytes


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_share_a_state_out(ranks: int) -> None:
    for state in (
        gated_delta_net_state(16, 128, 48, 128, 4, FLOAT32_BYTES),
        mamba2_state(NANO, FLOAT32_BYTES),
        mamba1_state(8192, 16, 4),
        kimi_delta_state(96, 128, 4),
        linear_attention_state(64, 128),
        short_conv_state(2048, 3),
    ):
        assert of_a_rank(state, ranks) * ranks == whole(state)


@pytest.mark.parametrize(("ranks", "channels_of_a_rank"), [(1, 8448), (2, 4352), (4, 2304), (8, 1280)])
def test_a_single_group_goes_to_every_rank(ranks: int, channels_of_a_rank: int) -> None:
    """The engine adds ranks − 1 groups before it divides: (8,192 + 2·ranks·128) / ranks channels."""
    conv_bytes = 3 * channels_of_a_rank * 2
    assert of_a_rank(mamba2_state(ONE_GROUP, MODEL_BYTES), ranks) == conv_bytes + 2_097_152 // ranks


@pytest.mark.parametrize("ranks", [3, 16, 128])
def test_what_ranks_cannot_share_is_said(ranks: int) -> None:
    with pytest.raises(ValueError, match=rf"{ranks} ranks cannot share conv"):
        of_a_rank(mamba2_state(NANO, FLOAT32_BYTES), ranks)


def test_speculative_tokens_lengthen_the_tail_alone() -> None:
    delta = gated_delta_net_state(16, 128, 32, 128, 4, MODEL_BYTES)
    assert of_a_rank(delta, 1, 2) == (3 + 2) * 8192 * 2 + 1_048_576
    assert of_a_rank(delta, 8, 2) == (3 + 2) * 1024 * 2 + 131_072
    assert of_a_rank(mamba2_state(ONE_GROUP, MODEL_BYTES), 2, 1) == (3 + 1) * 4352 * 2 + 1_048_576
    assert of_a_rank(short_conv_state(2048, 3), 1, 3) == (2 + 3) * 2048 * 2


def test_states_that_do_not_grow() -> None:
    for state in (mamba1_state(8192, 16, 4), linear_attention_state(64, 128)):
        assert of_a_rank(state, 1, 4) == whole(state)
