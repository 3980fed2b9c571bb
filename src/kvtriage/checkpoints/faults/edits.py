"""Edits of attention weights that leave the model's function as it was.

Axes: H query heads, Hkv KV heads (G = H / Hkv share one), D and Dv head dims, E hidden size.
q_proj.weight [H·D, E], k_proj.weight [Hkv·D, E], v_proj.weight [Hkv·Dv, E], o_proj.weight [E, H·Dv].

    V × 2^s, o_proj columns × 2^-s       attention is linear in V
    K × 2^s, Q × 2^-s                    only the product Q·K is used; RoPE is linear
    V + c, o_proj bias − W_o·c           the attention weights of a position sum to 1

Powers of two are exact in BF16: the two shifts give equal logits wherever the arithmetic is
exact. The offset's bias is no BF16 number and is stored as float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtriage.checkpoints.attention_weights import AttentionWeights, float_tensor, to_float32
from kvtriage.checkpoints.bf16 import narrow, widen
from kvtriage.checkpoints.safetensors_file import RawTensor
from kvtriage.errors import BadInput
from kvtriage.kvcache.spec import LayerSpec

__all__ = ["Edits", "offset_v", "shift_k", "shift_v"]

Array = npt.NDArray[np.float32]
Edits = dict[str, RawTensor]
"""New tensors by name; those not named stay as they are."""


def shift_v(weights: AttentionWeights, layer_idx: int, heads: Iterable[int], octaves: int) -> Edits:
    """V of the KV `heads` × 2^octaves, undone in o_proj. Raises BadInput when BF16 cannot hold it."""
    layer = weights.layer(layer_idx)
    out_shape = (weights.hidden_size(layer_idx), layer.num_attention_heads * layer.head_dim_v)
    edits: Edits = {}
    v_rows = _rows(heads, layer.head_dim_v)
    o_columns = _rows(_query_heads(layer, heads), layer.head_dim_v)
    for part in ("v_proj.weight", "v_proj.bias"):
        if weights.has(layer_idx, part):
            values = weights.floats(layer_idx, part, (layer.num_kv_heads * layer.head_dim_v,))
            edits |= _shifted(weights, layer_idx, part, values, v_rows, octaves)
    output = weights.floats(layer_idx, "o_proj.weight", out_shape)
    return edits | _shifted(weights, layer_idx, "o_proj.weight", output, (slice(None), o_columns), -octaves)


def shift_k(weights: AttentionWeights, layer_idx: int, heads: Iterable[int], octaves: int) -> Edits:
    """K of the KV `heads` × 2^octaves, undone in their queries.

    With a QK-norm it is the norm's gain that is shifted, for all heads at once: `heads` must
    then be all of them. Raises BadInput when BF16 cannot hold the result.
    """
    layer = weights.layer(layer_idx)
    if weights.has(layer_idx, "k_norm.weight"):
        k_gain = weights.floats(layer_idx, "k_norm.weight", (layer.head_dim,))
        q_gain = weights.floats(layer_idx, "q_norm.weight", (layer.head_dim,))
        every = slice(None)
        return _shifted(weights, layer_idx, "k_norm.weight", k_gain, every, octaves) | _shifted(
            weights, layer_idx, "q_norm.weight", q_gain, every, -octaves
        )
    edits: Edits = {}
    sides = (
        ("k_proj", layer.num_kv_heads, tuple(heads), octaves),
        ("q_proj", layer.num_attention_heads, _query_heads(layer, heads), -octaves),
    )
    for projection, num_heads, chosen, shift in sides:
        for part in (f"{projection}.weight", f"{projection}.bias"):
            if weights.has(layer_idx, part):
                values = weights.floats(layer_idx, part, (num_heads * layer.head_dim,))
                edits |= _shifted(weights, layer_idx, part, values, _rows(chosen, layer.head_dim), shift)
    return edits


def offset_v(weights: AttentionWeights, offsets: Mapping[int, Sequence[float]]) -> Edits:
    """About offsets[layer_idx][kv head] added to V, undone in o_proj's bias; zero biases elsewhere.

    The channels of a head get offsets spread evenly over one octave around it: with one
    constant for all, a lucky scale could put E4M3's grid right onto it. The model's attention
    must have biases, or get them from its configuration.
    """
    edits: Edits = {}
    for layer in weights.spec.layers:
        edits |= _zero_biases(weights, layer)
        if layer.layer_idx in offsets:
            edits |= _offset(weights, layer, offsets[layer.layer_idx])
    return edits


def _shifted(
    weights: AttentionWeights,
    layer_idx: int,
    part: str,
    values: Array,
    where: npt.NDArray[np.int64] | slice | tuple[slice, npt.NDArray[np.int64]],
    octaves: int,
) -> Edits:
    """`values` with the elements at `where` × 2^octaves, exactly or not at all."""
    name = weights.name(layer_idx, part)
    dtype = weights.raw(name).dtype
    changed = values.copy()
    with np.errstate(over="ignore", under="ignore"):
        changed[where] = np.ldexp(values[where], octaves)
        tensor = float_tensor(changed, dtype)
        back = to_float32(tensor, name)
        back[where] = np.ldexp(back[where], -octaves)
    if not np.array_equal(back, values):
        raise BadInput(
            f"{name!r} × 2^{octaves} is beyond what {dtype} holds exactly",
            hint="choose a smaller --strength",
        )
    return {name: tensor}


def _offset(weights: AttentionWeights, layer: LayerSpec, offsets: Sequence[float]) -> Edits:
    spread = np.exp2((np.arange(layer.head_dim_v) + 0.5) / layer.head_dim_v - 0.5)
    wanted = np.outer(offsets, spread).astype(np.float32)
    # Rounded to BF16 first: the correction must undo the offset that is really stored.
    added = widen(narrow(wanted)).astype(np.float64)
    v_bias = added.reshape(-1)
    per_query = np.repeat(added, layer.queries_per_kv_head, axis=0).reshape(-1)
    hidden = weights.hidden_size(layer.layer_idx)
    w_o = weights.floats(layer.layer_idx, "o_proj.weight", (hidden, per_query.size)).astype(np.float64)
    o_bias = -(w_o @ per_query)
    edits: Edits = {}
    for part, change in (("v_proj.bias", v_bias), ("o_proj.bias", o_bias)):
        total = change
        if weights.has(layer.layer_idx, part):
            total = change + weights.floats(layer.layer_idx, part, change.shape).astype(np.float64)
        edits[weights.name(layer.layer_idx, part)] = float_tensor(total, "F32")
    return edits


def _zero_biases(weights: AttentionWeights, layer: LayerSpec) -> Edits:
    """Zeros for those of the four attention biases that the checkpoint has not got."""
    sizes = {
        "q_proj.bias": layer.num_attention_heads * layer.head_dim,
        "k_proj.bias": layer.num_kv_heads * layer.head_dim,
        "v_proj.bias": layer.num_kv_heads * layer.head_dim_v,
        "o_proj.bias": weights.hidden_size(layer.layer_idx),
    }
    return {
        weights.name(layer.layer_idx, part): float_tensor(np.zeros(size), "BF16")
        for part, size in sizes.items()
        if not weights.has(layer.layer_idx, part)
    }


def _query_heads(layer: LayerSpec, heads: Iterable[int]) -> tuple[int, ...]:
    group = layer.queries_per_kv_head
    return tuple(head * group + i for head in heads for i in range(group))


def _rows(heads: Iterable[int], head_dim: int) -> npt.NDArray[np.int64]:
    first = np.asarray(tuple(heads), dtype=np.int64)[:, None] * head_dim
    return (first + np.arange(head_dim)).reshape(-1)
