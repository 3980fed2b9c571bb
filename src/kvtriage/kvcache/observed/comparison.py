"""Predicted against reported: does the engine's own line follow from what it was told?

The memory in a log has two decimals, so the prediction is a band: what 8.985 GiB and 8.995 GiB would report, when
8.99 is printed. A page of metrics states blocks and no memory: what follows from the blocks is predicted then.

Where they differ, other settings are tried in turn, one and two at a time, those first that nobody stated, and what
makes the figures agree is named. The difference is put into bytes, too: the memory that the reported tokens would take.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from kvtriage.errors import UnsupportedModel
from kvtriage.kvcache.allocator import Capacity, HybridManager, Refusal
from kvtriage.kvcache.engine_args import EngineArgs, reserve
from kvtriage.kvcache.observed.account import Observed, Reported
from kvtriage.kvcache.observed.identity import AskedModel, Weight, doubts_of
from kvtriage.kvcache.observed.settings import Setting, Told, what_it_was_told
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from kvtriage.kvcache.versions import EngineVersion
from kvtriage.units import GIB, format_change

__all__ = ["Change", "Comparison", "Figure", "Outcome", "compare"]

HALF_A_STEP_BYTES = GIB // 200
PLENTY_BYTES = 2**60


class Outcome(enum.StrEnum):
    """AGREES: every figure that can be predicted is as predicted. DIFFERS: one is not, and nothing was left open.
    UNKNOWN: one is not, or none can be predicted, and what would settle it is not known."""

    AGREES = "agrees"
    DIFFERS = "differs"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Figure:
    """One figure: predicted between `low` and `high`, both included, and what the file has."""

    name: str
    low: float
    high: float
    reported: float

    @property
    def agrees(self) -> bool:
        return self.low <= self.reported <= self.high


@dataclass(frozen=True)
class Change:
    """Settings that would make every figure agree: first such as nobody stated, then any."""

    settings: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Comparison:
    """`because` are sentences: what was left open, and where a difference comes from."""

    outcome: Outcome
    settings: tuple[Setting, ...]
    figures: tuple[Figure, ...]
    because: tuple[str, ...]
    changes: tuple[Change, ...] = ()


def compare(
    spec: CacheSpec,
    observed: Observed,
    *,
    flags: Mapping[str, object],
    policy: CachePolicy | None = None,
    available_bytes: int | None = None,
    auto: str = "auto",
    model: AskedModel | None = None,
) -> Comparison:
    """`flags`, `policy` and `available_bytes` are the user's, and stand in for what the file does not state.

    With the `model` the file is asked whether it is about that one at all.
    """
    told = what_it_was_told(spec, observed, flags, policy, auto=auto)
    doubts = () if model is None else doubts_of(model, spec, observed.settings)
    doubted = tuple(doubt.sentence for doubt in doubts)
    memory = _memory_band(observed.reported, available_bytes)
    if any(doubt.weight is Weight.SETTLED for doubt in doubts):
        return Comparison(Outcome.UNKNOWN, told.stated, (), doubted)
    if told.unknown:
        return Comparison(Outcome.UNKNOWN, told.stated, (), (*doubted, *told.unknown))
    if memory is None and not observed.reported.num_gpu_blocks:
        unstated = "the file states neither the memory of the cache nor its blocks; give --memory"
        return Comparison(Outcome.UNKNOWN, told.stated, (), (*doubted, unstated))
    try:
        figures, refused = _figures(spec, told.policy, told.args, observed.reported, memory)
    except UnsupportedModel as error:
        return Comparison(Outcome.UNKNOWN, told.stated, (), (*doubted, error.message))
    matters = _names_that_matter(spec, told, observed.reported, memory)
    settings = tuple(each for each in told.settings if each.name not in told.unstated - matters)
    notes = (*doubted, *_notes(observed, told, memory), *(() if refused is None else (refused,)))
    if figures and all(figure.agrees for figure in figures):
        return Comparison(Outcome.AGREES, settings, figures, notes)
    gap = tuple(_gap(spec, told, observed.reported, memory))
    if any(doubt.weight is Weight.OPEN for doubt in doubts):
        return Comparison(Outcome.UNKNOWN, settings, figures, (*notes, *gap))
    changes = tuple(_changes(spec, told, told.assumed, observed.reported, memory))
    if not changes:
        changes = tuple(_changes(spec, told, frozenset(_OTHER_VALUES), observed.reported, memory))
    opened = (*_left_open(matters & told.assumed), *_caveats(spec, told))
    if not figures and refused is None:
        opened = (*opened, "the file has no figure that can be predicted from what it states")
    outcome = Outcome.UNKNOWN if opened or not figures else Outcome.DIFFERS
    return Comparison(outcome, settings, figures, (*notes, *opened, *gap), changes)


# --- the prediction ---------------------------------------------------------------------


def _memory_band(reported: Reported, available_bytes: int | None) -> tuple[int, int] | None:
    """Lowest and highest bytes of one GPU; of several ranks that print theirs, the smallest."""
    if reported.available_bytes is not None:
        return reported.available_bytes, reported.available_bytes
    if reported.available_gib:
        middle = round(min(reported.available_gib) * GIB)
        return middle - HALF_A_STEP_BYTES, middle + HALF_A_STEP_BYTES
    return None if available_bytes is None else (available_bytes, available_bytes)


def _figures(
    spec: CacheSpec, policy: CachePolicy, args: EngineArgs, reported: Reported, memory: tuple[int, int] | None
) -> tuple[tuple[Figure, ...], str | None]:
    """Every figure that is both reported and predicted; and the engine's refusal, where that is the prediction."""
    if reported.needed_gib is not None:
        return _refusal_figures(spec, policy, args, reported, memory), None
    if memory is None:
        args = replace(args, num_gpu_blocks_override=min(reported.num_gpu_blocks))
        memory = (PLENTY_BYTES, PLENTY_BYTES)
    low, high = (reserve(spec, policy, args, available) for available in memory)
    if isinstance(high, Refusal):
        return (), f"the prediction is that the engine does not start: {high.text}"
    if isinstance(low, Refusal):
        low = reserve(spec, policy, args, (high.blocks_per_request + 1) * high.pool.bytes_per_block)
    if isinstance(low, Refusal):
        return (), f"the prediction is that the engine does not start: {low.text}"
    return tuple(_capacity_figures(low, high, args, reported)), None


def _capacity_figures(low: Capacity, high: Capacity, args: EngineArgs, reported: Reported) -> Iterator[Figure]:
    low_line, high_line = low.reported(args.version), high.reported(args.version)
    if reported.num_gpu_blocks and args.num_gpu_blocks_override is None:
        yield Figure("num_gpu_blocks", low.num_blocks, high.num_blocks, min(reported.num_gpu_blocks))
    if reported.kv_cache_tokens:
        yield Figure("tokens", low_line.tokens, high_line.tokens, min(reported.kv_cache_tokens))
    if reported.max_concurrency is not None:
        half = 0.5000001 * 10**-reported.concurrency_decimals
        yield Figure(
            "max_concurrency",
            low_line.max_concurrency - half,
            high_line.max_concurrency + half,
            reported.max_concurrency,
        )


def _refusal_figures(
    spec: CacheSpec, policy: CachePolicy, args: EngineArgs, reported: Reported, memory: tuple[int, int] | None
) -> tuple[Figure, ...]:
    """What one request needs, and the longest that would fit."""
    found: list[Figure] = []
    ample = reserve(spec, policy, replace(args, num_gpu_blocks_override=None), PLENTY_BYTES)
    if isinstance(ample, Capacity) and reported.needed_gib is not None:
        needed = ample.blocks_per_request * ample.pool.bytes_per_block / GIB
        found.append(Figure("needed GiB", needed - 0.005, needed + 0.005, reported.needed_gib))
    if reported.estimated_max_len is not None and memory is not None:
        low, high = (reserve(spec, policy, replace(args, max_model_len=-1), available) for available in memory)
        if isinstance(low, Capacity) and isinstance(high, Capacity):
            found.append(Figure("longest that fits", low.max_model_len, high.max_model_len, reported.estimated_max_len))
    return tuple(found)


# --- what was left open, and what would explain a difference ----------------------------


def _names_that_matter(
    spec: CacheSpec, told: Told, reported: Reported, memory: tuple[int, int] | None
) -> frozenset[str]:
    """Of the settings that nobody stated or typed, those whose other values would give other figures."""
    figures = _figures(spec, told.policy, told.args, reported, memory)
    return frozenset(
        name
        for name, policy, args in _alternatives(spec, told, told.unstated)
        if _tried(spec, policy, args, reported, memory) != figures
    )


def _changes(
    spec: CacheSpec, told: Told, names: frozenset[str], reported: Reported, memory: tuple[int, int] | None
) -> Iterator[Change]:
    """Single settings of these names that would make everything agree; where there is none, pairs of them."""
    singles = tuple(_alternatives(spec, told, names))
    found = False
    for name, policy, args in singles:
        if _all_agree(_tried(spec, policy, args, reported, memory)):
            found = True
            yield Change(((name, _described(name, policy, args)),))
    if found:
        return
    for (name, policy, args), (other, other_policy, other_args) in combinations(singles, 2):
        if name == other:
            continue
        both = _merged(told.args, args, other_args)
        merged_policy = policy if other_policy == told.policy else other_policy
        if _all_agree(_tried(spec, merged_policy, both, reported, memory)):
            yield Change(((name, _described(name, policy, args)), (other, _described(other, other_policy, other_args))))


def _tried(
    spec: CacheSpec, policy: CachePolicy, args: EngineArgs, reported: Reported, memory: tuple[int, int] | None
) -> tuple[tuple[Figure, ...], str | None] | None:
    """The figures of settings that nobody stated; None where they are not modelled."""
    try:
        return _figures(spec, policy, args, reported, memory)
    except UnsupportedModel:
        return None


def _all_agree(tried: tuple[tuple[Figure, ...], str | None] | None) -> bool:
    return tried is not None and bool(tried[0]) and all(figure.agrees for figure in tried[0])


def _alternatives(spec: CacheSpec, told: Told, names: frozenset[str]) -> Iterator[tuple[str, CachePolicy, EngineArgs]]:
    """Other values of these settings: name, policy, arguments."""
    for name in sorted(names):
        match name:
            case "kv_cache_dtype":
                yield name, _other_dtype(told.policy), told.args
            case "kv_cache_dtype_skip_layers":
                if (sliding := spec.layers_of(LayerKind.SLIDING)) and not told.policy.is_native:
                    yield name, CachePolicy.fp8(spec.num_layers, Scaling.UNIT, sliding), told.args
            case "num_speculative_tokens" if not spec.draft_layers:
                continue
            case _:
                for value in _OTHER_VALUES.get(name, ()):
                    args = replace(told.args, **{name: value})  # type: ignore[arg-type]
                    if args != told.args:
                        yield name, told.policy, args


_OTHER_VALUES: Mapping[str, tuple[object, ...]] = {
    "version": (EngineVersion(0, 20), EngineVersion(0, 25)),
    "max_num_batched_tokens": (2048, 4096, 8192, 16384, 32768),
    "async_scheduling": (True, False),
    "enable_prefix_caching": (True, False),
    "hybrid_manager": (HybridManager.OFF,),
    "block_size": (32, 64, 128),
    "num_speculative_tokens": (1, 2, 3, 4),
    "tensor_parallel_size": (1, 2, 4, 8),
}


_STATED_BY: Mapping[str, str] = {
    "version": "--vllm-version",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "async_scheduling": "--async-scheduling or --no-async-scheduling",
    "enable_prefix_caching": "--enable-prefix-caching or --no-enable-prefix-caching",
    "hybrid_manager": "--disable-hybrid-kv-cache-manager or --no-disable-hybrid-kv-cache-manager",
    "block_size": "--block-size",
    "num_speculative_tokens": "--num-speculative-tokens",
    "tensor_parallel_size": "--tensor-parallel-size",
    "kv_cache_dtype": "--scaling, with --skip where layers are skipped",
    "kv_cache_dtype_skip_layers": "--skip",
}
"""Flags of `kvtriage plan` for every setting that has other values."""


def _other_dtype(policy: CachePolicy) -> CachePolicy:
    if policy.is_native:
        return CachePolicy.fp8(policy.num_layers, Scaling.UNIT)
    return CachePolicy.native(policy.num_layers)


def _merged(base: EngineArgs, one: EngineArgs, other: EngineArgs) -> EngineArgs:
    """Both changes of `base` at once."""
    changed = {name: value for name, value in vars(other).items() if value != vars(base)[name]}
    return replace(one, **changed)


def _described(name: str, policy: CachePolicy, args: EngineArgs) -> str:
    match name:
        case "kv_cache_dtype":
            return "auto" if policy.is_native else "fp8"
        case "kv_cache_dtype_skip_layers":
            return "sliding_window"
        case _:
            value = vars(args)[name]
            return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _left_open(names: frozenset[str]) -> Iterator[str]:
    """Settings that nobody stated, whose other values give other figures, and how to state them."""
    for name in sorted(names):
        yield f"{name} is assumed, and other values give other figures: give {_STATED_BY[name]}"


def _caveats(spec: CacheSpec, told: Told) -> tuple[str, ...]:
    return told.args.version.caveats(
        skips_layers=bool(told.policy.skip_layers) and not told.policy.is_native,
        is_recurrent=LayerKind.STATE in spec.kinds,
    )


def _notes(observed: Observed, told: Told, memory: tuple[int, int] | None) -> Iterator[str]:
    reported, args = observed.reported, told.args
    if observed.num_starts > 1:
        yield f"the file holds {observed.num_starts} starts of a server; this is the last"
    if memory is None:
        yield (
            "the file states no memory: the figures follow from its blocks, and what a block takes is not checked; "
            "give --memory to check that too"
        )
    if len(reported.available_gib) == 1 and args.tensor_parallel_size * args.pipeline_parallel_size > 1:
        yield "the memory printed is that of one rank, and the engine keeps to the smallest of all ranks"
    if len(set(reported.kv_cache_tokens)) > 1:
        yield f"{len(reported.kv_cache_tokens)} ranks or engines report; this compares with the smallest"


def _gap(spec: CacheSpec, told: Told, reported: Reported, memory: tuple[int, int] | None) -> Iterator[str]:
    """The difference in tokens and in memory."""
    if memory is None or not reported.kv_cache_tokens:
        return
    capacity = reserve(spec, told.policy, told.args, sum(memory) // 2)
    if isinstance(capacity, Refusal):
        return
    tokens, predicted = min(reported.kv_cache_tokens), capacity.reported(told.args.version).tokens
    if not predicted:
        return
    implied = tokens / predicted * capacity.num_blocks * capacity.pool.bytes_per_block
    yield (
        f"{tokens - predicted:+,} tokens ({format_change(tokens / predicted)}): under these settings the reported "
        f"tokens would take {implied / GIB:.2f} GiB, and {sum(memory) / 2 / GIB:.2f} GiB are there"
    )
