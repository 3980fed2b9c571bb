"""What each server reserved for its cache, beside what the allocator says it would reserve."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from kvtriage.kvcache.allocator import Backend
from kvtriage.kvcache.observed.account import METRICS, Observed, Reported, Settings
from kvtriage.kvcache.observed.comparison import Comparison, Outcome, compare
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.server_args import skip_entries
from kvtriage.records.evidence import ArmRecord, Conditions
from kvtriage.records.trials import PoolTrial
from kvtriage.report.arms import style_of
from kvtriage.report.figures.base import Cell, Table
from kvtriage.report.numbers import Shown, times
from kvtriage.report.view import CaseView
from kvtriage.units import format_bytes, format_tokens

__all__ = ["reserved_pools"]

_COUNTS: Mapping[str, str] = {
    "--block-size": "block_size",
    "--max-model-len": "max_model_len",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--num-gpu-blocks-override": "num_gpu_blocks_override",
    "--pipeline-parallel-size": "pipeline_parallel_size",
    "--tensor-parallel-size": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-tp": "tensor_parallel_size",
}
_SWITCHES: Mapping[str, tuple[str, bool]] = {
    "--async-scheduling": ("async_scheduling", True),
    "--no-async-scheduling": ("async_scheduling", False),
    "--enable-prefix-caching": ("enable_prefix_caching", True),
    "--no-enable-prefix-caching": ("enable_prefix_caching", False),
    "--disable-hybrid-kv-cache-manager": ("disable_hybrid_kv_cache_manager", True),
}
_TWO_BYTES = ("bfloat16", "float16")
_ATTACHED = ("attached",)


def reserved_pools(view: CaseView) -> tuple[str, Table] | None:
    """None where no server was measured: the embedded engine's cache grows with what it is asked."""
    pools = {trial.arm: trial for trial in view.trials if isinstance(trial, PoolTrial)}
    arms = [arm for arm in view.products if arm.name in pools]
    if not arms:
        return None
    found = {arm.name: _compare(view, arm, pools[arm.name]) for arm in arms}
    agreeing = sum(isinstance(one, Comparison) and one.outcome is Outcome.AGREES for one in found.values())
    said = (
        f"Each server's pool, as it reports it, beside the allocator's prediction, which agrees for {agreeing} of "
        f"{len(arms)}. A pool is what is reserved at the start, for sequences of the longest context."
    )
    base = pools[arms[0].name].tokens if arms[0] is view.baseline else None
    rows = [_row(arm, pools[arm.name], found[arm.name], base) for arm in arms]
    names = ("arm", "came out", "memory", "blocks", "tokens a block", "sequences", "tokens", "predicted", "vs BF16")
    return said, Table.of(names, rows, words=2)


def _row(arm: ArmRecord, pool: PoolTrial, found: Comparison | str, base: int | None) -> tuple[Cell, ...]:
    return (
        style_of(arm).short,
        found if isinstance(found, str) else _came_out(found),
        None if pool.memory_bytes is None else Shown(pool.memory_bytes, format_bytes(pool.memory_bytes)),
        pool.blocks,
        pool.block_size,
        Shown(pool.max_concurrency, f"{pool.max_concurrency:,.2f}"),
        pool.tokens,
        "" if isinstance(found, str) else _predicted(found),
        Shown(pool.tokens / base, times(pool.tokens / base)) if base else None,
    )


def _predicted(found: Comparison) -> str:
    for figure in found.figures:
        if figure.name == "tokens":
            ends = (format_tokens(int(figure.low)), format_tokens(int(figure.high)))
            return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
    return ""


def _came_out(found: Comparison) -> str:
    match found.outcome:
        case Outcome.AGREES:
            return "as predicted"
        case Outcome.DIFFERS:
            return "not as predicted"
        case Outcome.UNKNOWN if found.figures:
            return "not as predicted, and not everything that matters is known"
        case Outcome.UNKNOWN:
            return f"not predicted: {found.because[0]}" if found.because else "not predicted"


def _compare(view: CaseView, arm: ArmRecord, pool: PoolTrial) -> Comparison | str:
    """Words where nothing can be predicted."""
    seen, policy = view.evidence.conditions, view.policy_of(arm)
    if seen.native_dtype not in _TWO_BYTES and (policy.is_native or policy.skip_layers):
        return f"not predicted: pages of a {seen.native_dtype} cache are not modelled"
    observed = Observed(
        METRICS,
        _settings(view, seen, policy),
        Reported(
            available_bytes=pool.memory_bytes,
            num_gpu_blocks=(pool.blocks,),
            block_size=pool.block_size,
            kv_cache_tokens=(pool.tokens,),
            max_concurrency=pool.max_concurrency,
            concurrency_decimals=9,
        ),
        shows_flags=seen.server != _ATTACHED,
    )
    return compare(view.spec, observed, flags={})


def _settings(view: CaseView, seen: Conditions, policy: CachePolicy) -> Settings:
    known = {backend.value for backend in Backend}
    backend = next((word for word in seen.backend.replace("+", " ").replace(",", " ").split() if word in known), None)
    return Settings(
        version=seen.engine_version,
        kv_cache_dtype=seen.native_dtype if policy.is_native else "fp8",
        kv_cache_dtype_skip_layers=() if policy.is_native else skip_entries(policy, view.spec),
        attention_backend=backend,
        **_typed(seen.server),  # type: ignore[arg-type]
    )


def _typed(words: Sequence[str]) -> dict[str, int | bool]:
    """The flags of all servers that move a pool's size, under vLLM's own names."""
    found: dict[str, int | bool] = {}
    for word, after in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        count = value if equals else after
        if name in _COUNTS and count.isdecimal():
            found[_COUNTS[name]] = int(count)
        elif name in _SWITCHES:
            setting, on = _SWITCHES[name]
            found[setting] = on
    return found
