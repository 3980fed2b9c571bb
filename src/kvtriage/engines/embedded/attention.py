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
from kvtriage.engines.embedded.linear import ONEDNN, onednn_linear, product_library
from kvtriage.errors import EngineError, UnsupportedModel
from kvtriage.kvcache.spec import LayerSpec

__all__ = [
    "ATTENTION",
    "P_OFFSET",
    "Attention",
    "AttentionCall",
    "RoundProbabilities",
    "SeenEnough",
    "attend",
    "attention_function",
    "check_geometry",
    "register",
    "round_probabilities",
]

ATTENTION = "kvtriage"
RoundProbabilities = Callable[[Tensor], Tensor]
P_OFFSET = 256.0
_QUERY_BLOCK = 128


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
    """What is done with the Q, K and V of a layer; gives the output, [B, H, n, Dv].

    May raise `SeenEnough` in a pass of which nothing is predicted.
    """

    def attend(self, call: AttentionCall) -> Tensor: ...


class SeenEnough(Exception):
    """Raised within a pass that nothing more is wanted of; it ends quietly."""


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kvtriage: Attention | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **_ignored: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. The mask is not used: positions say it all. Raises UnsupportedModel."""
    if kvtriage is None:
        raise UnsupportedModel(
            f"transformers' {type(module).__name__} hands no attention of another's what it was called with",
            hint="this architecture cannot be measured by the embedded engine; --engine vllm can serve it",
        )
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
    round_p: RoundProbabilities | None = None,
) -> Tensor:
    """Causal attention of n queries over S ≥ n keys, the last n of which are the queries' own.

    The call's k [B, Hkv, S, D] and v [B, Hkv, S, Dv] are all that may be seen. A query sees itself
    and the window_tokens − 1 positions before it; all before it without a window. fp8_heads: KV
    heads whose probabilities go through E4M3, boolean [Hkv]; None for none of them. round_p does it in place of
    `round_probabilities`, on [B, Hkv, H / Hkv, queries, keys] before they are divided by their sum.

    Where products go to oneDNN, a block of queries is worked on step by step, one KV head after the other: torch's
    fused kernel takes its products from MKL and needs twice the time. The way does not depend on how many threads
    there are, and neither does any bit of the output. Elsewhere the fused kernel serves what it can.
    """
    query, key, value = call.query, call.key, call.value
    new, span, window_tokens = query.shape[2], key.shape[2], call.window_tokens
    explicit = call.softcap is not None or call.sinks is not None or fp8_heads is not None
    if new == 1 and not explicit:
        return scaled_dot_product_attention(query, key, value, scale=call.scaling, enable_gqa=True)
    onednn = _by_onednn(query.device)
    if onednn:
        # As the model lays them out, a head's rows have the other heads' between them.
        key, value = key.contiguous(), value.contiguous()
    block = _QUERY_BLOCK if onednn or explicit or window_tokens is not None else new
    # As a model goes on with it: the heads of a token side by side.
    output = query.new_empty((query.shape[0], new, query.shape[1], value.shape[3])).transpose(1, 2)
    triangle = _triangle(min(_QUERY_BLOCK, new), query.device)
    for start in range(0, new, block):
        stop = min(start + block, new)
        last = span - new + stop
        first = 0 if window_tokens is None else max(0, span - new + start - window_tokens + 1)
        rows = (slice(None), slice(None), slice(start, stop))
        part = replace(call, query=query[rows], key=key[:, :, first:last], value=value[:, :, first:last])
        if explicit and (round_p is not None or not onednn):
            output[rows] = _explicit(_scaled(part), triangle, fp8_heads, round_p)
        elif onednn:
            _write_by_head(output[rows], _scaled(part), triangle, fp8_heads)
        else:
            output[rows] = _fused(part)
    return output


def _fused(call: AttentionCall) -> Tensor:
    new, span, window_tokens = call.query.shape[2], call.key.shape[2], call.window_tokens
    causal = new == span and (window_tokens is None or span <= window_tokens)
    return scaled_dot_product_attention(
        call.query,
        call.key,
        call.value,
        attn_mask=None if causal else _mask(new, span, window_tokens, call.query.device),
        is_causal=causal,
        scale=call.scaling,
        enable_gqa=True,
    )


def _mask(new: int, span: int, window_tokens: int | None, device: torch.device) -> Tensor:
    """[new, span], to be added: 0 where key j is seen by query i, whose position is span − new + i; else −∞."""
    hidden = torch.full((new, span), float("-inf"), device=device)
    later = hidden.triu(span - new + 1)
    return later if window_tokens is None else later + hidden.tril(span - new - window_tokens)


def _triangle(size: int, device: torch.device) -> Tensor:
    """[size, size], to be added to the scores of a query and as many keys, the last of which is its own."""
    return torch.full((size, size), float("-inf"), device=device).triu(1)


def _scaled(call: AttentionCall) -> AttentionCall:
    """Its queries times its scaling, dense."""
    dense = call.query.new_empty(call.query.shape)
    return replace(call, query=torch.mul(call.query, call.scaling, out=dense), scaling=1.0)


def _write_by_head(output: Tensor, call: AttentionCall, triangle: Tensor, fp8_heads: Tensor | None) -> None:
    """Into output [B, H, n, Dv], of queries that are scaled already: one KV head of one sequence after the other, by
    oneDNN, which takes a single pair of matrices."""
    new, kv_heads = call.query.shape[2], call.key.shape[1]
    sinks = None if call.sinks is None else call.sinks.view(kv_heads, -1)
    for sequence in range(call.query.shape[0]):
        queries = call.query[sequence].view(kv_heads, -1, call.query.shape[3]).unbind()
        values = call.value[sequence].transpose(1, 2).unbind()
        outputs = output[sequence].view(kv_heads, -1, new, output.shape[3]).unbind()
        for head, key in enumerate(call.key[sequence].unbind()):
            scores = onednn_linear(queries[head], key)
            probabilities, total = _probabilities(
                scores.view(1, 1, -1, new, scores.shape[1]),
                call,
                None if sinks is None else sinks[head],
                triangle,
                None if fp8_heads is None else fp8_heads[head : head + 1],
            )
            attended = onednn_linear(probabilities.view(scores.shape), values[head]).view(outputs[head].shape)
            outputs[head].copy_(attended if total is None else attended / total[0, 0])


def _explicit(
    call: AttentionCall, triangle: Tensor, fp8_heads: Tensor | None, round_p: RoundProbabilities | None
) -> Tensor:
    """The definition, step by step, of queries that are scaled already."""
    query, key, value = call.query, call.key, call.value
    batch, heads, new, dim = query.shape
    kv_heads, span = key.shape[1], key.shape[2]
    group = heads // kv_heads
    scores = _products(query.reshape(batch, kv_heads, group * new, dim), key.transpose(2, 3))
    scores = scores.view(batch, kv_heads, group, new, span)
    probabilities, total = _probabilities(scores, call, call.sinks, triangle, fp8_heads, round_p)
    output = _products(probabilities.view(batch, kv_heads, group * new, span), value)
    output = output.view(batch, kv_heads, group, new, -1)
    return (output if total is None else output / total).view(batch, heads, new, -1)


def _probabilities(
    scores: Tensor,
    call: AttentionCall,
    sinks: Tensor | None,
    triangle: Tensor,
    fp8_heads: Tensor | None,
    round_p: RoundProbabilities | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Of scores [B, Hkv, G, n, S], which are written over: probabilities and None, or weights that are not normalised
    yet and their sums [B, Hkv, G, n, 1]. Scores, sinks [Hkv G] and fp8_heads [Hkv] are of the same heads, of all that
    the call has or of some."""
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    _hide(scores, call.window_tokens, triangle)
    if sinks is None and fp8_heads is None:
        return torch.softmax(scores, dim=-1), None
    return _weights(scores, sinks, fp8_heads, round_p)


def _hide(scores: Tensor, window_tokens: int | None, triangle: Tensor) -> None:
    """−∞ for keys that a query does not see, in scores [B, Hkv, G, n, S]: of the last n keys those behind it, and of
    the first those that its window has passed. S is at most window_tokens − 1 + n."""
    new, span = scores.shape[3:]
    if new == 1:
        return
    scores[..., span - new :].add_(triangle[:new, :new])
    passed = 0 if window_tokens is None else span - window_tokens
    if passed > 0:
        scores[..., new - passed :, :passed].add_(triangle[:passed, 1 : passed + 1].T)


def _weights(
    scores: Tensor, sinks: Tensor | None, fp8_heads: Tensor | None, round_p: RoundProbabilities | None
) -> tuple[Tensor, Tensor]:
    """Of scores [B, Hkv, G, n, S]: weights that are not normalised yet, and their sums [B, Hkv, G, n, 1]."""
    top = scores.amax(dim=-1, keepdim=True)
    sink = None if sinks is None else sinks.to(scores.dtype).view(1, *scores.shape[1:3], 1, 1)
    if sink is not None:
        top = torch.maximum(top, sink)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    if fp8_heads is not None:
        rounded = (round_probabilities if round_p is None else round_p)(weights)
        weights = torch.where(fp8_heads.view(1, -1, 1, 1, 1), rounded, weights)
    return weights, total


def _products(left: Tensor, right: Tensor) -> Tensor:
    """left [B, Hkv, m, x] times right [B, Hkv, x, n]: [B, Hkv, m, n]. oneDNN takes a single pair."""
    if left.shape[:2] == (1, 1) and _by_onednn(left.device):
        return onednn_linear(left[0, 0], right[0, 0].T)[None, None]
    return left @ right


def _by_onednn(device: torch.device) -> bool:
    return product_library(device) == ONEDNN
