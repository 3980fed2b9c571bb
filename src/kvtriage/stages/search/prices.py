"""What a set of layers in BF16 costs: by the allocator, over the workload's lengths, in accepted sets only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvtriage.kvcache.allocator import Backend, Capacity, HybridManager, Layout
from kvtriage.kvcache.engine_args import EngineArgs, reserve, serving_limits
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.prices.held import blocks_in_steady_decode
from kvtriage.kvcache.skip_words import BLOCKS_OUTERMOST, WITHOUT_HYBRID_MANAGER
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.kvcache.support.findings import Severity, check_support
from kvtriage.records.case import Plan
from kvtriage.records.values import cache_spec

__all__ = ["Layers", "Pricing", "SetPrice"]

Layers = frozenset[int]
"""Those that stay in BF16."""


@dataclass(frozen=True, order=True)
class SetPrice:
    """Orders by bytes, then by tokens lost, then by flags."""

    held_bytes: float
    """Of one sequence in steady decode, the mean over the workload's lengths."""
    tokens_lost: int
    """`reported_tokens`, negative, so that the cheaper set sorts first."""
    flags: tuple[str, ...] = ()

    @property
    def reported_tokens(self) -> int:
        return -self.tokens_lost


@dataclass(frozen=True)
class Pricing:
    """One server, one workload; any set. `of` reads both from the plan."""

    spec: CacheSpec
    scaling: Scaling
    args: EngineArgs
    workload: tuple[tuple[int, float], ...]
    """(context length in tokens, its share of the traffic)."""
    memory_bytes: int

    @classmethod
    def of(cls, plan: Plan, scaling: Scaling) -> Pricing:
        """A server for the model's whole context, or for the longest bucket where the memory has no room for that."""
        study, spec = plan.study, cache_spec(plan)
        weights = study.rule.context_weights or (1.0,) * len(study.buckets)
        shares = tuple(weight / sum(weights) for weight in weights)
        known = {backend.value.lower(): backend for backend in Backend}
        args = EngineArgs(attention_backend=known.get(study.backend, Backend.FLASH_ATTN))
        pricing = cls(spec, scaling, args, tuple(zip(study.buckets, shares, strict=True)), study.memory_bytes)
        if pricing.price(frozenset(range(spec.num_layers))) is None:
            return replace(pricing, args=replace(args, max_model_len=max(study.buckets)))
        return pricing

    @property
    def max_model_len(self) -> int:
        """Tokens that the server is started for."""
        return self.args.max_model_len or self.spec.max_model_len

    def policy(self, skip: Iterable[int]) -> CachePolicy:
        return CachePolicy.fp8(self.spec.num_layers, self.scaling, skip)

    def price(self, skip: Layers) -> SetPrice | None:
        """None when the engine refuses the set whatever the flags. A set that it takes as it is needs none."""
        policy = self.policy(skip)
        if any(finding.severity is Severity.REFUSED for finding in check_support(self.spec, policy, None)):
            return None
        plain = self._price_with(policy, self.args, ())
        if plain is not None:
            return plain
        flagged = (
            self._price_with(policy, replace(self.args, hybrid_manager=HybridManager.OFF), (WITHOUT_HYBRID_MANAGER,)),
            self._price_with(policy, replace(self.args, layout=Layout.BLHNC), (BLOCKS_OUTERMOST,)),
        )
        return min((price for price in flagged if price is not None), default=None)

    def _price_with(self, policy: CachePolicy, args: EngineArgs, flags: tuple[str, ...]) -> SetPrice | None:
        capacity = reserve(self.spec, policy, args, self.memory_bytes)
        if not isinstance(capacity, Capacity) or capacity.breaks is not None:
            return None
        held = 0.0
        for context_len, share in self.workload:
            limits = serving_limits(self.spec, replace(args, max_model_len=context_len), self.memory_bytes)
            blocks = blocks_in_steady_decode(capacity.pool, limits, context_len)
            held += share * blocks * capacity.pool.bytes_per_block
        return SetPrice(held, -capacity.reported_tokens, flags)
