"""Flags of `vllm serve` that may buy capacity, each as a ladder: as it is now, then ever further from it.

What a step costs is said in words, for the engine's line counts tokens and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kvtriage.kvcache.allocator import HybridManager, Layout
from kvtriage.kvcache.engine_args import EngineArgs
from kvtriage.units import format_tokens

__all__ = ["Change", "Ladder", "Step", "batch_ladder", "length_ladder", "other_ladders", "scheduling_ladder"]

BATCHES = (16384, 8192, 4096, 2048, 1024, 512)
BLOCKS = (16, 32, 64, 128)
MOST_REQUESTS = 1024
"""vLLM's own limit of requests at once on large GPUs; a smaller batch lowers it (engine/arg_utils.py:2929, :3180)."""


@dataclass(frozen=True)
class Change:
    """What to type for it, '--max-num-batched-tokens 2048', and in words what is lost by it."""

    flags: str
    cost: str


@dataclass(frozen=True)
class Step:
    """One way to set one flag. `change` is None for the way it is set now."""

    change: Change | None
    apply: Callable[[EngineArgs], EngineArgs]


Ladder = tuple[Step, ...]


def batch_ladder(args: EngineArgs) -> Ladder:
    """Smaller batches leave fewer tokens in flight, for which windows and chunks must have room."""
    return _ladder(_batch(size) for size in BATCHES if size < args.max_num_batched_tokens)


def scheduling_ladder(args: EngineArgs) -> Ladder:
    """One batch in flight in place of two."""
    if not args.async_scheduling:
        return _ladder(())
    change = Change("--no-async-scheduling", "steps no longer overlap: the GPU waits while the next one is scheduled")
    return _ladder([Step(change, lambda args: replace(args, async_scheduling=False))])


def length_ladder(longest: int) -> Ladder:
    """The longest request that fits, where the one asked for does not."""
    change = Change(f"--max-model-len {longest}", f"requests of more than {format_tokens(longest)} tokens are refused")
    return _ladder([Step(change, lambda args: replace(args, max_model_len=longest))])


def other_ladders(args: EngineArgs) -> tuple[Ladder, ...]:
    """Blocks of another size, no hybrid manager, no prefix caching, blocks outermost in memory."""
    ladders = [_ladder(_block(size) for size in BLOCKS if size != args.block_size)]
    if args.hybrid_manager is not HybridManager.OFF:
        change = Change(
            "--disable-hybrid-kv-cache-manager", "windows and chunks hold the whole text, as full layers do"
        )
        ladders.append(_ladder([Step(change, lambda args: replace(args, hybrid_manager=HybridManager.OFF))]))
    if args.enable_prefix_caching is not False:
        change = Change("--no-enable-prefix-caching", "no request reuses the prefix of another")
        ladders.append(_ladder([Step(change, lambda args: replace(args, enable_prefix_caching=False))]))
    if args.layout is Layout.LBNHC:
        change = Change(
            f"VLLM_KV_CACHE_LAYOUT={Layout.BLHNC}", "not the default layout: how fast it is, is not known here"
        )
        ladders.append(_ladder([Step(change, lambda args: replace(args, layout=Layout.BLHNC))]))
    return tuple(ladders)


def _ladder(steps: Iterable[Step]) -> Ladder:
    return (Step(None, lambda args: args), *steps)


def _batch(size: int) -> Step:
    cost = f"prompts are read in chunks of {format_tokens(size)}"
    if size < MOST_REQUESTS:
        cost += ", and no more requests than that run at once"
    change = Change(f"--max-num-batched-tokens {size}", cost)
    return Step(change, lambda args: replace(args, max_num_batched_tokens=size))


def _block(size: int) -> Step:
    change = Change(f"--block-size {size}", f"prefixes are reused in steps of {size} tokens or more")
    return Step(change, lambda args: replace(args, block_size=size))
