"""What FP8 really gains over BF16, as a curve over the length of the context.

Twice would be the gain, were there nothing but K and V, and no engine. A recurrent state, or the keys of a sparse
layer's index, are as large in FP8 as in BF16; a state weighs the more the shorter the text. Rounding to blocks,
tokens in flight and pages made equal do the rest, and not the same in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.kvcache.engine_args import EngineArgs
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.prices.explain import Price, RequestPrice, price_request
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["Gain", "GainPoint", "gain_curve"]


@dataclass(frozen=True)
class Gain:
    """BF16 over a policy, for one request; 2 is the most there is.

    `worksheet_ratio` is of what is retained, `held_ratio` of blocks in steady decode, `reserved_ratio` of what the
    engine counts: with much memory it is the ratio of its tokens. The last two are None where the engine
    refuses the policy or BF16.
    """

    worksheet_ratio: float
    held_ratio: float | None
    reserved_ratio: float | None


@dataclass(frozen=True)
class GainPoint:
    """A request of `context_len` tokens on a server of that max_model_len, under the policy and with all layers in FP8.

    `untouched_share` is the part of the BF16 worksheet that no policy reaches, from 0 to 1: states, index keys.
    """

    context_len: int
    untouched_share: float
    policy: Gain
    all_fp8: Gain


def gain_curve(
    spec: CacheSpec, policy: CachePolicy, args: EngineArgs, contexts: Sequence[int]
) -> tuple[GainPoint, ...]:
    """A point for each context, in their order. Raises ValueError as `price_policy` does, and UnsupportedModel."""
    return tuple(_point(spec, policy, args, context_len) for context_len in contexts)


def _point(spec: CacheSpec, policy: CachePolicy, args: EngineArgs, context_len: int) -> GainPoint:
    native = CachePolicy.native(spec.num_layers)
    bf16 = price_request(spec, native, args, context_len)
    worksheet = price_policy(spec, native, (context_len,))

    def gain(other: CachePolicy) -> Gain:
        ratio = price_policy(spec, other, (context_len,)).ratio_vs_bf16
        price = price_request(spec, other, args, context_len)
        if not isinstance(bf16, RequestPrice) or not isinstance(price, RequestPrice):
            return Gain(ratio, None, None)
        return Gain(ratio, _ratio(bf16.held, price.held), _ratio(bf16.reserved, price.reserved))

    return GainPoint(
        context_len=context_len,
        untouched_share=worksheet.side_bytes / worksheet.bf16_bytes if worksheet.bf16_bytes else 0.0,
        policy=gain(policy),
        all_fp8=gain(CachePolicy.fp8(spec.num_layers, policy.scaling or Scaling.UNIT)),
    )


def _ratio(bf16: Price, policy: Price) -> float:
    """1 where there is no cache."""
    return bf16.reserved_bytes / policy.reserved_bytes if policy.reserved_bytes else 1.0
