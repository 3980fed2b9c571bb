"""What a set of layers in BF16 costs: by the allocator, over the workload's lengths, in accepted sets only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvtriage.kvcache.allocator import (
    HybridManager,
    LayerStack,
    Layout,
    ServingLimits,
    build_pool,
    report_capacity,
)
from kvtriage.kvcache.allocator.refusal import EngineRefused
from kvtriage.kvcache.engine_args import EngineArgs, layer_stack, pool_settings, serving_limits
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.prices.held import blocks_in_steady_decode
from kvtriage.kvcache.skip_words import BLOCKS_OUTERMOST, WITHOUT_HYBRID_MANAGER
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.kvcache.support.cautions import Severity
from kvtriage.kvcache.support.findings import check_support
from kvtriage.records.latency import traffic
from kvtriage.records.plan import Plan
from kvtriage.records.values import cache_spec, serving_backend

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
class _Way:
    """One way to start the server: its flags, and what they make of the model's layers."""

    flags: tuple[str, ...]
    args: EngineArgs
    stack: LayerStack
    limits: ServingLimits
    requests: tuple[tuple[ServingLimits, int, float], ...]
    """Of each length of the workload: its limits, the length in tokens, its share of the traffic."""


@dataclass(frozen=True)
class Pricing:
    """One server, one workload; any set. `of` reads both from the plan."""

    spec: CacheSpec
    scaling: Scaling
    max_model_len: int
    """Tokens that the server is started for."""
    ways: tuple[_Way, ...]
    """The plain one first, then those with one flag."""
    takes_fp8: bool
    """Whether the engine serves this model with an FP8 cache at all."""

    @classmethod
    def of(cls, plan: Plan, scaling: Scaling) -> Pricing:
        """A server for the model's whole context, or for the longest bucket where the memory has no room for that."""
        spec = cache_spec(plan)
        findings = check_support(spec, CachePolicy.fp8(spec.num_layers, scaling), None)
        takes_fp8 = all(finding.severity is not Severity.REFUSED for finding in findings)
        for length in (spec.max_model_len, max(plan.study.buckets)):
            ways = tuple(_way(plan, spec, flags, args) for flags, args in _starts(plan, length))
            pricing = cls(spec, scaling, length, ways, takes_fp8)
            if pricing.price(frozenset(range(spec.num_layers))) is not None:
                break
        return pricing

    def policy(self, skip: Iterable[int]) -> CachePolicy:
        return CachePolicy.fp8(self.spec.num_layers, self.scaling, skip)

    def price(self, skip: Layers) -> SetPrice | None:
        """None when the engine refuses the set whatever the flags. A set that it takes as it is needs none."""
        policy = self.policy(skip)
        if not (policy.is_native or self.takes_fp8):
            return None
        plain, *flagged = self.ways
        price = self._price(policy, plain)
        if price is not None:
            return price
        return min((price for way in flagged if (price := self._price(policy, way)) is not None), default=None)

    def _price(self, policy: CachePolicy, way: _Way) -> SetPrice | None:
        try:
            pool = build_pool(way.stack, pool_settings(self.spec, policy, way.args))
            capacity = report_capacity(pool, way.limits)
        except EngineRefused:
            return None
        if capacity.breaks is not None:
            return None
        held = sum(
            share * blocks_in_steady_decode(pool, limits, length) * pool.bytes_per_block
            for limits, length, share in way.requests
        )
        return SetPrice(held, -capacity.reported_tokens, way.flags)


def _starts(plan: Plan, max_model_len: int) -> Iterator[tuple[tuple[str, ...], EngineArgs]]:
    args = EngineArgs(attention_backend=serving_backend(plan.study), max_model_len=max_model_len)
    yield (), args
    yield (WITHOUT_HYBRID_MANAGER,), replace(args, hybrid_manager=HybridManager.OFF)
    yield (BLOCKS_OUTERMOST,), replace(args, layout=Layout.BLHNC)


def _way(plan: Plan, spec: CacheSpec, flags: tuple[str, ...], args: EngineArgs) -> _Way:
    study = plan.study
    requests = tuple(
        (serving_limits(spec, replace(args, max_model_len=length), study.memory_bytes), length, share)
        for length, share in zip(study.buckets, traffic(study).shares, strict=True)
    )
    return _Way(flags, args, layer_stack(spec, args), serving_limits(spec, args, study.memory_bytes), requests)
