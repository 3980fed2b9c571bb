"""How large V is, estimated from the weights alone: enough to size an offset, no more.

V = W·(g ⊙ x) + b, where x leaves an RMS norm, so that the mean of x_j² over the channels j is 1.
With channels taken as uncorrelated,

    RMS(V_i)² = Σ_j (W_ij g_j)² m_j + b_i²        m_j the mean square of x_j

For most models m_j = 1 serves. Where sublayer outputs are normed before they are added (Gemma
2 and 3), a few channels dominate the residual stream and m_j is far from even; but then its
profile is in the weights too: the embeddings' mean square, plus the square of every gain that
wrote into the stream below this layer.

Against 128 tokens of English the estimate is too high by 0.8 to 2.3 times on SmolLM2-135M and
by 0.7 to 4.8 times on Gemma-3-270M (with m_j = 1: by up to 49).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtriage.checkpoints.attention_weights import AttentionWeights, to_float32

__all__ = ["v_rms"]

Float64Array = npt.NDArray[np.float64]

_EMBEDDING_ROWS = 4096


def v_rms(weights: AttentionWeights, layer_idx: int, *, gain_plus_one: bool) -> Float64Array:
    """RMS of V per KV head: [Hkv]. `gain_plus_one` for norms that multiply by 1 + w."""
    layer = weights.layer(layer_idx)
    rows = layer.num_kv_heads * layer.head_dim_v
    w_v = weights.floats(layer_idx, "v_proj.weight", (rows, weights.hidden_size(layer_idx))).astype(np.float64)
    gain = _gain(weights, layer_idx, "input_layernorm", gain_plus_one)
    variance = np.square(w_v) @ (np.square(gain) * _channel_profile(weights, layer_idx, gain_plus_one))
    if weights.has(layer_idx, "v_proj.bias"):
        variance += np.square(weights.floats(layer_idx, "v_proj.bias", (rows,)).astype(np.float64))
    return np.asarray(np.sqrt(variance.reshape(layer.num_kv_heads, layer.head_dim_v).mean(axis=1)), dtype=np.float64)


def _channel_profile(weights: AttentionWeights, layer_idx: int, gain_plus_one: bool) -> Float64Array:
    """m_j of the input to one layer: [E], mean 1."""
    hidden = weights.hidden_size(layer_idx)
    if _norm_name(weights, 0, "post_feedforward_layernorm") not in weights.model.weight_map:
        return np.ones(hidden)
    # Gemma multiplies its embeddings by the square root of the hidden size.
    squares = _embedding_mean_square(weights) * hidden
    for below in range(layer_idx):
        for norm in ("post_attention_layernorm", "post_feedforward_layernorm"):
            squares += np.square(_gain(weights, below, norm, gain_plus_one))
    return np.asarray(squares / squares.mean(), dtype=np.float64)


def _embedding_mean_square(weights: AttentionWeights) -> Float64Array:
    """Per channel, over at most `_EMBEDDING_ROWS` rows spread over the vocabulary: [E]."""
    name = weights.prefixes[0].removesuffix("layers.0.self_attn") + "embed_tokens.weight"
    vocabulary = weights.raw(name).shape[0]
    step = -(-vocabulary // _EMBEDDING_ROWS)
    rows = to_float32(weights.raw(name), name, step=step).astype(np.float64)
    return np.asarray(np.square(rows).mean(axis=0), dtype=np.float64)


def _gain(weights: AttentionWeights, layer_idx: int, norm: str, gain_plus_one: bool) -> Float64Array:
    name = _norm_name(weights, layer_idx, norm)
    return to_float32(weights.raw(name), name).astype(np.float64) + (1.0 if gain_plus_one else 0.0)


def _norm_name(weights: AttentionWeights, layer_idx: int, norm: str) -> str:
    return weights.prefixes[layer_idx].removesuffix("self_attn") + f"{norm}.weight"
