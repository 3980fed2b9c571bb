"""The options of `kvtriage plan` that are vLLM's own flags, and what they come to with the engine's defaults."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import click

from kvtriage.cli.plan.lengths import parse_length
from kvtriage.errors import StudyError
from kvtriage.kvcache.allocator import LAYOUT_ALIASES, Backend, HybridManager, Layout, MambaDtype, SpeculativeMethod
from kvtriage.kvcache.versions import EngineVersion

__all__ = ["AUTO_LENGTH", "EngineFlags", "engine_options"]

WIDEST = 2**20
MOST_BATCHED = 2**24
AUTO_LENGTH = -1
FLAGS: Mapping[str, str] = {
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_num_seqs": "--max-num-seqs",
    "async_scheduling": "--async-scheduling",
    "enable_prefix_caching": "--enable-prefix-caching",
    "block_size": "--block-size",
    "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "decode_context_parallel_size": "--decode-context-parallel-size",
    "hybrid_manager": "--disable-hybrid-kv-cache-manager",
    "attention_backend": "--attention-backend",
    "num_gpu_blocks_override": "--num-gpu-blocks-override",
    "mamba_cache_mode": "--mamba-cache-mode",
    "mamba_cache_dtype": "--mamba-cache-dtype",
    "mamba_ssm_cache_dtype": "--mamba-ssm-cache-dtype",
    "mamba_block_size": "--mamba-block-size",
}
"""Fields that are one flag of `vllm serve` each."""
BESIDE = ("max_num_seqs",)
"""Fields that the allocator does not ask for."""
MOST_GUESSED = 64


@dataclass(frozen=True)
class EngineFlags:
    """The flags as they were typed, under vLLM's names; None where one was not."""

    version: EngineVersion | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    async_scheduling: bool | None = None
    enable_prefix_caching: bool | None = None
    block_size: int | None = None
    num_speculative_tokens: int | None = None
    speculative_method: SpeculativeMethod | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    decode_context_parallel_size: int | None = None
    hybrid_manager: HybridManager | None = None
    attention_backend: Backend | None = None
    layout: Layout | None = None
    num_gpu_blocks_override: int | None = None
    mamba_cache_mode: str | None = None
    mamba_cache_dtype: MambaDtype | None = None
    mamba_ssm_cache_dtype: MambaDtype | None = None
    mamba_block_size: int | None = None
    max_num_seqs: int | None = None

    @property
    def typed(self) -> dict[str, Any]:
        """Name → value of what was typed, as far as the allocator asks for it."""
        return {name: value for name, value in vars(self).items() if value is not None and name not in BESIDE}

    def words(self, named: frozenset[str]) -> tuple[str, ...]:
        """The flags for `vllm serve`, but those that are `named` already. A layout is an environment variable."""
        found: list[str] = []
        for name, flag in FLAGS.items():
            value = vars(self)[name]
            if value is None or flag in named:
                continue
            match value:
                case bool():
                    found.append(f"--{'' if value else 'no-'}{flag.removeprefix('--')}")
                case HybridManager():
                    found.append(flag if value is HybridManager.OFF else f"--no-{flag.removeprefix('--')}")
                case _:
                    found += [flag, str(value)]
        if self.num_speculative_tokens:
            method = self.speculative_method or SpeculativeMethod.MTP
            config = f'{{"method": "{method}", "num_speculative_tokens": {self.num_speculative_tokens}}}'
            found += ["--speculative-config", f"'{config}'"]
        return tuple(found)


def _version(ctx: click.Context, param: click.Parameter, value: str | None) -> EngineVersion | None:
    return None if value is None else EngineVersion.parse(value)


def _length(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A whole number of tokens, or 'auto', which vLLM also writes -1."""
    if value is None:
        return None
    if value in ("auto", "-1"):
        return AUTO_LENGTH
    return parse_length("--max-model-len", value, ", or auto for the longest that fits")


def _batched(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    tokens = parse_length("--max-num-batched-tokens", value)
    if tokens > MOST_BATCHED:
        raise StudyError(f"--max-num-batched-tokens {tokens:,} is beyond {MOST_BATCHED:,}", hint="give 8192, or 8K")
    return tokens


def _speculative(ctx: click.Context, param: click.Parameter, value: str | None) -> Mapping[str, Any]:
    """vLLM's JSON, as far as it is known here. Raises StudyError."""
    if value is None:
        return {}
    try:
        stated = json.loads(value)
    except (ValueError, RecursionError):
        stated = None
    match stated:
        case {"method": str(method), "num_speculative_tokens": int(tokens), **more} if (
            not more and method in set(SpeculativeMethod) and 0 <= tokens <= MOST_GUESSED
        ):
            return {"speculative_method": SpeculativeMethod(method), "num_speculative_tokens": int(tokens)}
    raise StudyError(
        f"--speculative-config {value[:60]!a} is not one that kvtriage reads",
        hint="give method (mtp, eagle or ngram) and num_speculative_tokens alone, such as "
        """'{"method": "mtp", "num_speculative_tokens": 2}'""",
    )


def _hybrid_manager(ctx: click.Context, param: click.Parameter, value: bool | None) -> HybridManager | None:
    if value is None:
        return None
    return HybridManager.OFF if value else HybridManager.ON


def _member(known: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A click callback: the member of an enum that has this value."""
    return lambda ctx, param, value: None if value is None else known(value)


def _layout(ctx: click.Context, param: click.Parameter, value: str | None) -> Layout | None:
    if value is None:
        return None
    return LAYOUT_ALIASES[value] if value in LAYOUT_ALIASES else Layout(value)


def _counted(name: str, *more: str, most: int, least: int = 1, help_text: str) -> Callable[[Any], Any]:
    return click.option(name, *more, type=click.IntRange(least, most), metavar="N", help=help_text)


def _dtype(name: str, help_text: str) -> Callable[[Any], Any]:
    choice = click.Choice([dtype.value for dtype in MambaDtype])
    return click.option(name, type=choice, callback=_member(MambaDtype), help=help_text)


OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--vllm-version",
        "version",
        metavar="VERSION",
        callback=_version,
        help="The release that will serve.  [default: 0.32.0]",
    ),
    click.option(
        "--max-model-len",
        metavar="TOKENS",
        callback=_length,
        help="Longest request; auto for the longest that fits.  [default: the longest --context, else the model's]",
    ),
    click.option(
        "--max-num-batched-tokens",
        metavar="TOKENS",
        callback=_batched,
        help="Tokens of one step.  [default: the GPU's]",
    ),
    _counted("--max-num-seqs", most=WIDEST, help_text="Requests of one step; the line does not depend on it."),
    click.option("--async-scheduling/--no-async-scheduling", default=None, help="Overlap steps.  [default: on]"),
    click.option(
        "--enable-prefix-caching/--no-enable-prefix-caching", default=None, help="Keep shared prefixes.  [default: on]"
    ),
    _counted("--block-size", most=WIDEST, help_text="Tokens of one block.  [default: the backend's]"),
    _counted("--num-speculative-tokens", least=0, most=MOST_GUESSED, help_text="Tokens guessed ahead in each step."),
    click.option(
        "--speculative-method",
        type=click.Choice([method.value for method in SpeculativeMethod]),
        callback=_member(SpeculativeMethod),
        help="Who guesses them.  [default: mtp, the model's own drafter]",
    ),
    click.option(
        "--speculative-config",
        metavar="JSON",
        callback=_speculative,
        help="The same two as vLLM takes them.",
    ),
    _counted("--tensor-parallel-size", "--tp", "-tp", most=WIDEST, help_text="GPUs that share each layer."),
    _counted("--pipeline-parallel-size", "--pp", "-pp", most=WIDEST, help_text="GPUs that share out the layers."),
    _counted(
        "--decode-context-parallel-size", "--dcp", "-dcp", most=WIDEST, help_text="GPUs that share out the tokens."
    ),
    click.option(
        "--disable-hybrid-kv-cache-manager/--no-disable-hybrid-kv-cache-manager",
        "hybrid_manager",
        default=None,
        callback=_hybrid_manager,
        help="Allocate every layer at full length.  [default: only where vLLM does]",
    ),
    click.option(
        "--attention-backend",
        type=click.Choice([backend.value for backend in Backend], case_sensitive=False),
        callback=_member(Backend),
        metavar="NAME",
        help="FLASH_ATTN, FLASHINFER or TRITON_ATTN.  [default: what vLLM chooses for the GPU, FLASH_ATTN without one]",
    ),
    click.option(
        "--kv-cache-layout",
        "layout",
        type=click.Choice([*(layout.value for layout in Layout), *LAYOUT_ALIASES], case_sensitive=False),
        callback=_layout,
        metavar="NAME",
        help="VLLM_KV_CACHE_LAYOUT, such as BLHNC, NHD or HND.  [default: LBNHC]",
    ),
    _counted("--num-gpu-blocks-override", most=2**40, help_text="Blocks, whatever the memory."),
    click.option(
        "--mamba-cache-mode", type=click.Choice(["none", "align"]), help="vLLM 0.32 derives it; checked only."
    ),
    _dtype("--mamba-cache-dtype", "Dtype of recurrent states.  [default: auto, what the model says]"),
    _dtype("--mamba-ssm-cache-dtype", "The same for their recurrent part alone."),
    _counted("--mamba-block-size", most=WIDEST, help_text="Tokens between kept states."),
)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's flags, which reach the command as one `engine`."""
    names = [field.name for field in fields(EngineFlags)]

    @functools.wraps(command)
    def with_engine(*args: Any, **kwargs: Any) -> Any:
        typed = {name: kwargs.pop(name) for name in names}
        speculative = kwargs.pop("speculative_config")
        if any(typed[name] not in (None, value) for name, value in speculative.items()):
            raise StudyError("--speculative-config contradicts the other flags that speculate", hint="give one of them")
        engine = EngineFlags(**{**typed, **speculative})
        return command(*args, engine=engine, **kwargs)

    wrapped: Callable[..., Any] = with_engine
    for option in reversed(OPTIONS):
        wrapped = option(wrapped)
    return wrapped
