"""What `kvtriage plan` has to say, worked out once and told as text, JSON or Markdown."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvtriage.cli.plan.engine_flags import AUTO_LENGTH, EngineFlags
from kvtriage.errors import UnsupportedModel
from kvtriage.kvcache.allocator import Capacity, Refusal
from kvtriage.kvcache.allocator.ranks import TensorParallelFacts, tensor_parallel_facts
from kvtriage.kvcache.allocator.refusal import EngineRefused
from kvtriage.kvcache.declared import DeclaredCache
from kvtriage.kvcache.engine_args import EngineArgs, reserve
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.price import Worksheet, price_policy
from kvtriage.kvcache.prices.advice import Trade, advise
from kvtriage.kvcache.prices.explain import Explanation, explain, price_request
from kvtriage.kvcache.prices.gain import GainPoint, gain_curve
from kvtriage.kvcache.server_args import vllm_args
from kvtriage.kvcache.skip_words import find_starting_flags
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.kvcache.support.cautions import Severity
from kvtriage.kvcache.support.findings import Finding
from kvtriage.kvcache.support.gpus import Gpu
from kvtriage.kvcache.support.memory_band import MemoryBand

__all__ = ["EngineAnswer", "Memory", "PlanAnswer", "Question", "SkipCost", "answer", "serve_words"]

ROOMY_BYTES = 2**60
"""So much memory that a refusal has nothing to do with it."""
CURVE = (512, 4096, 32768, 131072, 1048576)
SMALL_BATCH = 2048


@dataclass(frozen=True)
class Memory:
    """Bytes of cache on each GPU: given, or the likely size in a `band` for a GPU and weights.

    `utilization` is the share of the GPU that was typed for the band, if any.
    """

    available_bytes: int
    band: MemoryBand | None = None
    utilization: float | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """The flag of `vllm serve` that says so; none for a band at the engine's own utilization."""
        if self.band is None:
            return ("--kv-cache-memory-bytes", str(self.available_bytes))
        return () if self.utilization is None else ("--gpu-memory-utilization", f"{self.utilization:g}")


@dataclass(frozen=True)
class Question:
    """`args` hold no open value any more. What was filled in stands there with its reason: `chosen` how FP8 is scaled,
    `said` the engine's defaults.

    `notes` are what else there is to know of the release and of the skipped layers. `native_dtype` is what the model
    and an unquantised cache are served in.
    """

    spec: CacheSpec
    policy: CachePolicy
    contexts: tuple[int, ...]
    args: EngineArgs
    chosen: tuple[str, ...]
    said: tuple[str, ...]
    notes: tuple[str, ...]
    memory: Memory | None
    gpu: Gpu | None
    declared: DeclaredCache
    native_dtype: str
    findings: tuple[Finding, ...]
    typed: EngineFlags

    @property
    def assumed(self) -> tuple[str, ...]:
        """All that no flag says."""
        return (*self.chosen, *self.said)

    @property
    def context_len(self) -> int:
        """The longest context asked about: the request whose prices stand side by side."""
        return max(self.contexts)


@dataclass(frozen=True)
class SkipCost:
    """What keeping the skipped layers in BF16 costs under other settings: tokens of the line, and bytes that a request
    holds in decode."""

    args: EngineArgs
    fp8_tokens: int
    policy_tokens: int
    fp8_held_bytes: int
    policy_held_bytes: int

    @property
    def tokens_share(self) -> float:
        """Of all FP8's tokens, how much is given up."""
        return 1 - self.policy_tokens / self.fp8_tokens

    @property
    def held_share(self) -> float:
        """How much more a request holds than with all in FP8; 0 where it holds nothing."""
        return self.policy_held_bytes / self.fp8_held_bytes - 1 if self.fp8_held_bytes else 0.0


@dataclass(frozen=True)
class EngineAnswer:
    """The engine's side: three policies in the same memory, and what other settings would do.

    Where the number of blocks is given, the memory is not the same: nothing is compared then.
    """

    memory: Memory
    bf16: Explanation | Refusal
    fp8: Explanation | Refusal
    policy: Explanation | Refusal
    skip_costs: tuple[SkipCost, ...]
    trades: tuple[Trade, ...]
    gains: tuple[GainPoint, ...]

    @property
    def is_rough(self) -> bool:
        """Whether the memory was estimated, so that tokens are good to two digits at most."""
        return self.memory.band is not None


@dataclass(frozen=True)
class PlanAnswer:
    """`engine` is None without memory, or where `unmodelled` says why the engine's figures cannot be told.

    `refusal` says that vLLM would not start, with this memory or with any; `way_out` are flags that make it start.
    `ranks` is None where one GPU serves.
    """

    question: Question
    worksheet: Worksheet
    engine: EngineAnswer | None
    unmodelled: str | None
    refusal: Refusal | None
    way_out: tuple[str, ...]
    ranks: TensorParallelFacts | None

    @property
    def refused_by(self) -> tuple[Finding, ...]:
        """What the GPU or its attention backends cannot do."""
        return tuple(each for each in self.question.findings if each.severity is Severity.REFUSED)

    @property
    def starts(self) -> bool:
        """Whether vLLM would serve this policy, as far as is known here."""
        return self.refusal is None and self.question.declared.refused is None and not self.refused_by


def answer(question: Question) -> PlanAnswer:
    """Everything about one policy. Never raises for what the engine refuses: that is part of the answer."""
    engine, refusal, unmodelled = None, None, None
    try:
        refusal = _refusal(question)
        engine = None if question.memory is None else _answer_engine(question, question.memory)
    except UnsupportedModel as error:
        unmodelled = error.message
    return PlanAnswer(
        question=question,
        worksheet=price_policy(question.spec, question.policy, question.contexts),
        engine=engine,
        unmodelled=unmodelled,
        refusal=refusal,
        way_out=_way_out(question) if refusal is not None else (),
        ranks=_ranks(question),
    )


def serve_words(question: Question) -> tuple[str, ...]:
    """What follows `vllm serve MODEL`: the cache flags of the policy, and the flags that were typed or filled in."""
    words = list(vllm_args(question.policy, question.spec, None, question.native_dtype))
    if question.memory is not None or question.typed.max_model_len is not None:
        length = question.args.max_model_len
        words += ["--max-model-len", "auto" if length == AUTO_LENGTH else str(length)]
    words += question.typed.words(named=frozenset(words))
    return (*words, *(() if question.memory is None else question.memory.words))


def _refusal(question: Question) -> Refusal | None:
    """Why vLLM would not start with the policy; None where it would."""
    available = ROOMY_BYTES if question.memory is None else question.memory.available_bytes
    outcome = reserve(question.spec, question.policy, question.args, available)
    return outcome if isinstance(outcome, Refusal) else outcome.breaks


def _way_out(question: Question) -> tuple[str, ...]:
    if question.policy.is_native or not question.policy.skip_layers:
        return ()
    return find_starting_flags(question.spec, question.policy.skip_layers, question.args)


def _ranks(question: Question) -> TensorParallelFacts | None:
    """None also where heads cannot be shared out: then the engine refuses."""
    if question.args.tensor_parallel_size == 1:
        return None
    try:
        return tensor_parallel_facts(question.spec, question.args.tensor_parallel_size)
    except EngineRefused:
        return None


def _answer_engine(question: Question, memory: Memory) -> EngineAnswer:
    spec, args = question.spec, question.args
    native = CachePolicy.native(spec.num_layers)
    plain = CachePolicy.fp8(spec.num_layers, question.policy.scaling or Scaling.UNIT)
    priced = {policy: _explain(question, policy, memory) for policy in (native, plain, question.policy)}
    mine = priced[question.policy]
    works = isinstance(mine, Explanation) and isinstance(mine.outcome, Capacity)
    compares = works and args.num_gpu_blocks_override is None
    lengths = tuple(length for length in CURVE if length < spec.max_model_len)
    return EngineAnswer(
        memory=memory,
        bf16=priced[native],
        fp8=priced[plain],
        policy=mine,
        skip_costs=_skip_costs(question, plain, memory.available_bytes) if compares else (),
        trades=advise(spec, question.policy, args, memory.available_bytes) if compares else (),
        gains=gain_curve(spec, question.policy, args, (*lengths, spec.max_model_len)),
    )


def _explain(question: Question, policy: CachePolicy, memory: Memory) -> Explanation | Refusal:
    try:
        return explain(question.spec, policy, question.args, memory.available_bytes, question.context_len)
    except EngineRefused as refused:
        return refused.refusal


def _skip_costs(question: Question, plain: CachePolicy, available_bytes: int) -> tuple[SkipCost, ...]:
    """As asked; with small batches and one of them in flight; and that with the longest requests the model reads.

    Before 0.21 the line does not depend on them: then as asked alone.
    """
    policy = question.policy
    if policy in (plain, CachePolicy.native(policy.num_layers)):
        return ()
    args = question.args
    lean = replace(args, async_scheduling=False, max_num_batched_tokens=min(SMALL_BATCH, args.max_num_batched_tokens))
    settings = [args]
    if args.version.derives_tokens_from_concurrency:
        settings += [lean, replace(lean, max_model_len=question.spec.max_model_len)]
    found = (_skip_cost(question, plain, each, available_bytes) for each in dict.fromkeys(settings))
    return tuple(cost for cost in found if cost is not None)


def _skip_cost(question: Question, plain: CachePolicy, args: EngineArgs, available_bytes: int) -> SkipCost | None:
    """None where the engine refuses one of the two.

    What is held is that of the request asked about, and of the longest one where the length is another.
    """
    spec, policies = question.spec, (question.policy, plain)
    mine, fp8 = (reserve(spec, each, args, available_bytes) for each in policies)
    if isinstance(mine, Refusal) or isinstance(fp8, Refusal):
        return None
    as_asked = args.max_model_len == question.args.max_model_len
    length = question.context_len if as_asked else mine.max_model_len
    held, fp8_held = (price_request(spec, each, args, length) for each in policies)
    if isinstance(held, Refusal) or isinstance(fp8_held, Refusal):
        return None
    return SkipCost(
        args,
        fp8.reported(args.version).tokens,
        mine.reported(args.version).tokens,
        fp8_held.held.reserved_bytes,
        held.held.reserved_bytes,
    )
