"""Three prices of one request on one GPU, and why they differ.

held      once the prompt is read and text is written: the worksheet, rounded to the engine's blocks and pages
peak      the worst step of the prefill: windows hold the chunk that is computed, too
reserved  what a request of max_model_len must be able to get: what the engine's line counts

All three are blocks of one size, the engine's. docs/concepts/three-prices.md walks through an example.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvtriage.kvcache.allocator import Capacity, Pool, Refusal, ServingLimits, build_pool, report_capacity
from kvtriage.kvcache.allocator.pages import make_pages
from kvtriage.kvcache.allocator.refusal import EngineRefused
from kvtriage.kvcache.allocator.report import blocks_per_request
from kvtriage.kvcache.engine_args import EngineArgs, check_args, layer_stack, pool_settings, reserve, serving_limits
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.prices.causes import Cause, CauseKind, Contents, contents_of, reserve_causes
from kvtriage.kvcache.prices.held import blocks_in_steady_decode
from kvtriage.kvcache.prices.peak import peak_blocks
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["Explanation", "Price", "RequestPrice", "explain", "price_request"]


@dataclass(frozen=True)
class Price:
    """Blocks of the pool that one request takes, and their bytes on one GPU."""

    blocks: int
    reserved_bytes: int


@dataclass(frozen=True)
class RequestPrice:
    """One request of the longest length its server takes: in steady decode, and as the line counts it."""

    held: Price
    reserved: Price


@dataclass(frozen=True)
class Explanation:
    """One request of `context_len` tokens, the first `prompt_len` of which are its prompt; bytes are those of one GPU.

    `peak` is with one batch at a time. `peak_overlapped` is what the engine may reach when it schedules a chunk while
    the one before still runs; None where it does not. `reserved` is for a request of `max_model_len`.

    The causes add up: `contents.kv_bytes` and `beside` are the worksheet, `worksheet_bytes`; that and `causes` are
    `reserved`. In tokens `kv_tokens`, `beside`, `causes` and `pool_causes` together are the `reported_tokens`, where
    the engine prints any. `pool_causes` come once a server: they are no part of what a request is reserved.

    Releases before 0.21 print a line that does not follow from what a request is reserved: there `kv_tokens` and the
    tokens of every cause are None, and the `reported_tokens` stand.

    `all_fp8_tokens` is what the line says with no layer skipped; None where the engine refuses that, or has no
    room for a request.
    """

    context_len: int
    prompt_len: int
    max_model_len: int
    contents: Contents
    held: Price
    peak: Price
    peak_overlapped: Price | None
    reserved: Price
    kv_tokens: int | None
    beside: tuple[Cause, ...]
    causes: tuple[Cause, ...]
    pool_causes: tuple[Cause, ...]
    outcome: Capacity | Refusal
    reported_tokens: int | None
    all_fp8_tokens: int | None

    @property
    def worksheet_bytes(self) -> int:
        return self.contents.total_bytes

    @property
    def gains_by_skipping(self) -> bool:
        """True where the engine reports more tokens than with every layer in FP8, though some are kept in BF16."""
        reported, all_fp8 = self.reported_tokens, self.all_fp8_tokens
        return reported is not None and all_fp8 is not None and reported > all_fp8


def price_request(spec: CacheSpec, policy: CachePolicy, args: EngineArgs, context_len: int) -> RequestPrice | Refusal:
    """A request of `context_len` on a server of that max_model_len, however much memory it has.

    Raises ValueError for a policy that no server can apply, and UnsupportedModel for a cache that is not modelled.
    """
    served = replace(args, max_model_len=context_len)
    try:
        check_args(spec, served)
        limits = serving_limits(spec, served, 0)
        pool = build_pool(layer_stack(spec, served), pool_settings(spec, policy, served))
        reserved = blocks_per_request(pool, limits, context_len)
    except EngineRefused as refused:
        return refused.refusal
    return RequestPrice(_price(pool, blocks_in_steady_decode(pool, limits, context_len)), _price(pool, reserved))


def explain(
    spec: CacheSpec,
    policy: CachePolicy,
    args: EngineArgs,
    available_bytes: int,
    context_len: int,
    *,
    prompt_len: int | None = None,
) -> Explanation | Refusal:
    """The three prices, and the causes between them. The prompt is the whole context unless `prompt_len` says less.

    A Refusal where the engine does not start with any memory. Where it merely has too little, the prices are there,
    and the `outcome` says so. Raises ValueError for a policy that no server can apply and for lengths below 1, and
    UnsupportedModel for a cache that is not modelled.
    """
    prompt = context_len if prompt_len is None else prompt_len
    if not 1 <= prompt <= context_len:
        raise ValueError("a request has at least one token, and a prompt no longer than itself")
    try:
        check_args(spec, args)
        stack = layer_stack(spec, args)
        settings = pool_settings(spec, policy, args)
        limits = serving_limits(spec, args, available_bytes)
        pool = build_pool(stack, settings)
    except EngineRefused as refused:
        return refused.refusal
    outcome = _ask(pool, limits)
    length = outcome.max_model_len if isinstance(outcome, Capacity) else limits.max_model_len or spec.max_model_len
    pages = make_pages(stack, settings, pool.rules)
    contents, longest = contents_of(pages, limits, context_len), contents_of(pages, limits, length)
    added = reserve_causes(pool, limits, length, longest)
    reported = _tokens(outcome, args)
    steps = _Steps(
        pool, limits, context_len, length, reported if args.version.derives_tokens_from_concurrency else None
    )
    beside = steps.beside(contents)
    return Explanation(
        context_len=context_len,
        prompt_len=prompt,
        max_model_len=length,
        contents=contents,
        held=_price(pool, blocks_in_steady_decode(pool, limits, context_len)),
        peak=_price(pool, peak_blocks(pool, limits, prompt, batches_in_flight=1)),
        peak_overlapped=_overlapped(pool, limits, prompt),
        reserved=_price(pool, blocks_per_request(pool, limits, length)),
        kv_tokens=steps.tokens(contents.kv_bytes, context_len),
        beside=beside,
        causes=steps.causes(contents, longest, added),
        pool_causes=steps.pool_causes(longest.total_bytes + sum(added.values())),
        outcome=outcome,
        reported_tokens=reported,
        all_fp8_tokens=_all_fp8_tokens(spec, policy, args, available_bytes),
    )


def _ask(pool: Pool, limits: ServingLimits) -> Capacity | Refusal:
    try:
        return report_capacity(pool, limits)
    except EngineRefused as refused:
        return refused.refusal


def _price(pool: Pool, blocks: int) -> Price:
    return Price(blocks, blocks * pool.bytes_per_block)


def _overlapped(pool: Pool, limits: ServingLimits, prompt: int) -> Price | None:
    batches = limits.tokens_in_flight // limits.max_num_batched_tokens
    return None if batches == 1 else _price(pool, peak_blocks(pool, limits, prompt, batches_in_flight=batches))


def _all_fp8_tokens(spec: CacheSpec, policy: CachePolicy, args: EngineArgs, available_bytes: int) -> int | None:
    plain = CachePolicy.fp8(spec.num_layers, policy.scaling or Scaling.UNIT)
    return _tokens(reserve(spec, plain, args, available_bytes), args)


def _tokens(outcome: Capacity | Refusal, args: EngineArgs) -> int | None:
    return outcome.reported(args.version).tokens if isinstance(outcome, Capacity) else None


@dataclass(frozen=True)
class _Steps:
    """A stair from bytes to tokens: the memory would report `tokens(x)`, were x what a request is reserved.

    `reported_tokens` None is no stair: no line, or one that counts something else.
    """

    pool: Pool
    limits: ServingLimits
    context_len: int
    max_model_len: int
    reported_tokens: int | None

    @property
    def memory_bytes(self) -> int:
        """What the line shares out: the blocks there are, or the memory they are cut from."""
        if self.limits.num_gpu_blocks_override is not None:
            return self.limits.num_gpu_blocks_override * self.pool.bytes_per_block
        return self.limits.available_bytes

    def tokens(self, request_bytes: int, length: int) -> int | None:
        if self.reported_tokens is None or request_bytes == 0:
            return None if self.reported_tokens is None else 0
        return self.memory_bytes * length // request_bytes

    def beside(self, contents: Contents) -> tuple[Cause, ...]:
        sizes = {CauseKind.STATES: contents.state_bytes, CauseKind.INDEX_KEYS: contents.index_bytes}
        return self._stair(contents.kv_bytes, self.context_len, sizes)

    def causes(self, contents: Contents, longest: Contents, added: Mapping[CauseKind, int]) -> tuple[Cause, ...]:
        start, end = contents.total_bytes, longest.total_bytes
        length = Cause(
            CauseKind.LENGTH,
            end - start,
            _difference(self.tokens(end, self.max_model_len), self.tokens(start, self.context_len)),
        )
        first = () if self.context_len == self.max_model_len else (length,)
        return first + self._stair(end, self.max_model_len, added)

    def pool_causes(self, request_bytes: int) -> tuple[Cause, ...]:
        last = _difference(self.reported_tokens, self.tokens(request_bytes, self.max_model_len))
        rest = self.memory_bytes % self.pool.bytes_per_block if self.pool.bytes_per_block else 0
        return (
            Cause(CauseKind.NULL_BLOCK, self.pool.bytes_per_block, None if self.reported_tokens is None else 0),
            Cause(CauseKind.REMAINDER, rest, last),
        )

    def _stair(self, start: int, length: int, sizes: Mapping[CauseKind, int]) -> tuple[Cause, ...]:
        """Causes of 0 bytes are left out."""
        causes = []
        for kind, size in sizes.items():
            if size:
                difference = _difference(self.tokens(start + size, length), self.tokens(start, length))
                causes.append(Cause(kind, size, difference))
                start += size
        return tuple(causes)


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before
