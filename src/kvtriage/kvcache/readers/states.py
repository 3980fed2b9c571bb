"""Recurrent states as vLLM 0.32 lays them out: the shapes and bytes of one layer, for one sequence.

Each family keeps the tail of inputs of a short convolution (`conv`, in the model's dtype) and most keep a
matrix for each head beside it (`recurrent`, in the model's dtype or in float32). Shapes are those of
vllm/model_executor/layers/mamba/mamba_utils.py:177-326, for the whole model.

A Mamba-2 convolution runs over the inputs of all heads and over B and C of all groups. They are two tensors
here, `conv` and `conv_groups`, because a single group goes to every rank: the engine then copies it
(`extra_groups_for_head_shards`, mamba_utils.py:288), while the heads are shared out.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtriage.kvcache.spec import StateTensor

__all__ = [
    "FLOAT32_BYTES",
    "MODEL_BYTES",
    "Mamba2",
    "gated_delta_net_state",
    "kimi_delta_state",
    "linear_attention_state",
    "mamba1_state",
    "mamba2_state",
    "short_conv_state",
]

MODEL_BYTES = 2
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Mamba2:
    """Sizes of a Mamba-2 mixer: `num_heads` of `head_dim`, `num_groups` of B and C, `state_size` columns."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_kernel: int


def mamba2_state(mixer: Mamba2, recurrent_bytes: int) -> tuple[StateTensor, ...]:
    """heads × head_dim × state_size, and the tail of heads × head_dim + 2 × groups × state_size channels."""
    channels = mixer.num_heads * mixer.head_dim
    groups = (mixer.conv_kernel - 1, mixer.num_groups, 2 * mixer.state_size)
    matrices = (mixer.num_heads, mixer.head_dim, mixer.state_size)
    return (
        _conv_tail("conv", (mixer.conv_kernel - 1, channels)),
        _conv_tail("conv_groups", groups),
        StateTensor("recurrent", matrices, recurrent_bytes, sharded_axis=0),
    )


def mamba1_state(channels: int, state_size: int, conv_kernel: int) -> tuple[StateTensor, ...]:
    """channels × state_size, and the tail of the same channels. The engine does not speculate with it."""
    return (
        StateTensor("conv", (conv_kernel - 1, channels), MODEL_BYTES, sharded_axis=1),
        StateTensor("recurrent", (channels, state_size), MODEL_BYTES, sharded_axis=0),
    )


def gated_delta_net_state(
    num_k_heads: int, k_head_dim: int, num_v_heads: int, v_head_dim: int, conv_kernel: int, recurrent_bytes: int
) -> tuple[StateTensor, ...]:
    """v_heads × Dv × Dk, and the tail of the channels of Q, K and V."""
    channels = 2 * num_k_heads * k_head_dim + num_v_heads * v_head_dim
    return (
        _conv_tail("conv", (conv_kernel - 1, channels)),
        StateTensor("recurrent", (num_v_heads, v_head_dim, k_head_dim), recurrent_bytes, sharded_axis=0),
    )


def kimi_delta_state(num_heads: int, head_dim: int, conv_kernel: int) -> tuple[StateTensor, ...]:
    """heads × D × D in float32, which is KDA's default (mamba_utils.py:128), and the tail of Q, K and V."""
    return (
        _conv_tail("conv", (conv_kernel - 1, 3 * num_heads * head_dim)),
        StateTensor("recurrent", (num_heads, head_dim, head_dim), FLOAT32_BYTES, sharded_axis=0),
    )


def linear_attention_state(num_heads: int, head_dim: int) -> tuple[StateTensor, ...]:
    """heads × D × D and no convolution (lightning attention)."""
    return (StateTensor("recurrent", (num_heads, head_dim, head_dim), MODEL_BYTES, sharded_axis=0),)


def short_conv_state(channels: int, conv_kernel: int) -> tuple[StateTensor, ...]:
    """The tail of the channels and nothing else (LFM2)."""
    return (_conv_tail("conv", (conv_kernel - 1, channels)),)


def _conv_tail(name: str, shape: tuple[int, ...]) -> StateTensor:
    """The last inputs, channels last: channels are shared out, speculative tokens lengthen the tail."""
    return StateTensor(name, shape, MODEL_BYTES, sharded_axis=1, grown_axis=0)
