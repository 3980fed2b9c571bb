"""Attention over a stored cache, registered with transformers under the name 'kvtriage'.

The model calls the registered function with Q, K and V after rotary embedding. It carries no
state: what to do with them travels as the keyword argument `kvtriage` of the model's own
forward call, which transformers passes through to every attention layer. K and V are thus met
where attention happens, whether or not a model uses transformers' cache classes.

Two numerics:

    storage     K and V stored in FP8, arithmetic in the compute dtype (Triton, CPU backends)
    attention   also Q and the probabilities in FP8, as FlashAttention 3 does: Q with the
                largest scale of its KV head's group; P scaled by 2^8 before conversion, with
                the row sum taken before it. FlashAttention takes the running maximum of a
                block of keys, here it is the maximum of the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from kvtriage.engines.embedded.codec import to_e4m3
from kvtriage.errors import EngineError
from kvtriage.kvcache.spec import LayerSpec

__all__ = [
    "ATTENTION",
    "P_OFFSET",
    "Attention",
    "AttentionCall",
    "attend",
    "attention_function",
    "check_geometry",
    "register",
    "round_probabilities",
]

ATTENTION = "kvtriage"
P_OFFSET = 256.0
_QUERY_BLOCK = 256


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of one layer: q [B, H, n, D], k [B, Hkv, n, D], v [B, Hkv, n, Dv], and its constants."""

    layer_idx: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    softcap: float | None
    sinks: Tensor | None
    """One extra logit per query head: [H]."""
    window_tokens: int | None
    """The sliding window that the model itself asks for."""


class Attention(Protocol):
    """What is done with the Q, K and V of a layer; gives the output, [B, H, n, Dv]."""

    def attend(self, call: AttentionCall) -> Tensor: ...


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kvtriage: Attention,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **_ignored: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. The mask is not used: positions say it all."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    output = kvtriage.attend(AttentionCall(layer_idx, query, key, value, scale, softcap, s_aux, sliding_window))
    return output.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make 'kvtriage' known to transformers; doing so twice changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention_function)


def check_geometry(call: AttentionCall, layer: LayerSpec) -> None:
    """Raises EngineError when the model that runs is not the one that config.json was read as."""
    runs = (call.query.shape[1], call.key.shape[1], call.key.shape[3], call.value.shape[3], call.window_tokens)
    read = (layer.num_attention_heads, layer.num_kv_heads, layer.head_dim, layer.head_dim_v, layer.window_tokens)
    if runs != read:
        raise EngineError(
            f"layer {call.layer_idx} runs with (query heads, KV heads, head_dim, head_dim_v, window) {runs}, "
            f"config.json was read as {read}",
            hint="kvtriage reads this architecture differently from transformers; please report the config.json",
        )


def round_probabilities(probabilities: Tensor) -> Tensor:
    """Through E4M3, scaled by 2^8 before it: what is in [0, 1] lies in [0, 256]."""
    return to_e4m3(probabilities * P_OFFSET).to(torch.float32) / P_OFFSET


def attend(
    call: AttentionCall,
    fp8_heads: Tensor | None = None,
    round_p: Callable[[Tensor], Tensor] = round_probabilities,
) -> Tensor:
    """Causal attention of n queries over S ≥ n keys, the last n of which are the queries' own.

    The call's k [B, Hkv, S, D] and v [B, Hkv, S, Dv] are all that may be seen. A query sees itself
    and the window_tokens − 1 positions before it; all before it without a window. fp8_heads: KV
    heads whose probabilities go through E4M3, boolean [Hkv]; None for none of them. round_p is how they do:
    [B, Hkv, H / Hkv, queries, keys], before they are divided by their sum.
    """
    query, key, value, scaling = call.query, call.key, call.value, call.scaling
    window_tokens = call.window_tokens
    new, span = query.shape[2], key.shape[2]
    explicit = call.softcap is not None or call.sinks is not None or fp8_heads is not None
    if new == 1 and not explicit:
        return scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
    if not explicit and new == span and (window_tokens is None or span <= window_tokens):
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    block = new if not explicit and window_tokens is None else _QUERY_BLOCK
    outputs = []
    for start in range(0, new, block):
        stop = min(start + block, new)
        last = span - new + stop
        first = 0 if window_tokens is None else max(0, span - new + start - window_tokens + 1)
        q, k, v = query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last]
        mask = None if new == 1 else _visible(stop - start, last - first, window_tokens, query.device)
        if explicit:
            outputs.append(_explicit(replace(call, query=q, key=k, value=v), mask, fp8_heads, round_p))
        else:
            outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _visible(new: int, span: int, window_tokens: int | None, device: torch.device) -> Tensor:
    """Boolean [new, span]: key j is seen by query i at position span − new + i."""
    position = torch.arange(span - new, span, device=device)[:, None]
    key = torch.arange(span, device=device)[None, :]
    seen = key <= position
    return seen if window_tokens is None else seen & (key > position - window_tokens)


def _explicit(
    call: AttentionCall, mask: Tensor | None, fp8_heads: Tensor | None, round_p: Callable[[Tensor], Tensor]
) -> Tensor:
    """The definition, step by step, for what torch's fused kernels do not do."""
    query, key = call.query, call.key
    batch, heads, new, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    scores = query.reshape(batch, kv_heads, group * new, dim) @ key.transpose(2, 3) * call.scaling
    scores = scores.view(batch, kv_heads, group, new, key.shape[2])
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    top = scores.amax(dim=-1, keepdim=True)
    if call.sinks is not None:
        sink = call.sinks.to(scores.dtype).view(1, kv_heads, group, 1, 1)
        top = torch.maximum(top, sink)
    probabilities = torch.exp(scores - top)
    total = probabilities.sum(dim=-1, keepdim=True)
    if call.sinks is not None:
        total = total + torch.exp(sink - top)
    if fp8_heads is not None:
        probabilities = torch.where(fp8_heads.view(1, -1, 1, 1, 1), round_p(probabilities), probabilities)
    output = probabilities.reshape(batch, kv_heads, group * new, -1) @ call.value
    output = output.view(batch, kv_heads, group, new, -1) / total
    return output.reshape(batch, heads, new, -1)
