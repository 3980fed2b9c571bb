"""The engine's flags with every open value filled in, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvtriage.cli.plan.engine_flags import AUTO_LENGTH, EngineFlags
from kvtriage.errors import StudyError
from kvtriage.kvcache.allocator import Backend, SpeculativeMethod
from kvtriage.kvcache.declared import DeclaredCache
from kvtriage.kvcache.engine_args import EngineArgs
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from kvtriage.kvcache.support.backend_choice import Serving, pick_backend
from kvtriage.kvcache.support.gpus import Gpu, default_max_num_batched_tokens

__all__ = ["fill_in"]


def fill_in(
    spec: CacheSpec,
    policy: CachePolicy,
    contexts: Sequence[int],
    gpu: Gpu | None,
    flags: EngineFlags,
    declared: DeclaredCache,
) -> tuple[EngineArgs, tuple[str, ...]]:
    """The flags with every open value filled in, and what was filled in, with its reason.

    Raises StudyError for lengths and batches that vLLM refuses.
    """
    args = replace(EngineArgs(), **flags.typed)
    said: list[str] = []
    args = replace(args, max_model_len=_max_model_len(spec, contexts, flags, said))
    args = replace(args, max_num_batched_tokens=_batched_tokens(gpu, args, flags, said))
    _check_seqs(args, flags)
    guesses_ngrams = args.speculative_method is SpeculativeMethod.NGRAM and args.num_speculative_tokens > 0
    if guesses_ngrams and flags.async_scheduling is None:
        args = replace(args, async_scheduling=False)
        said.append("async_scheduling = off (vLLM turns it off when ngrams are guessed)")
    if flags.attention_backend is None:
        args = replace(args, attention_backend=_backend(spec, policy, gpu, declared, said))
    return args, tuple(said)


def _max_model_len(spec: CacheSpec, contexts: Sequence[int], flags: EngineFlags, said: list[str]) -> int:
    longest = max(contexts, default=spec.max_model_len)
    length = flags.max_model_len
    if length is None:
        because = "the longest --context" if contexts else "the longest that the model reads"
        said.append(f"max_model_len = {longest:,} ({because})")
        return longest
    if length == AUTO_LENGTH:
        return length
    if length > spec.max_model_len:
        raise StudyError(
            f"--max-model-len {length:,} is beyond the {spec.max_model_len:,} tokens that {spec.model_type} can read",
            hint=f"vLLM refuses that too; give {spec.max_model_len} or less",
        )
    if contexts and length < longest:
        raise StudyError(
            f"a --context of {longest:,} tokens does not fit --max-model-len {length:,}",
            hint="no request is longer than --max-model-len: raise it, or ask about a shorter context",
        )
    return length


def _batched_tokens(gpu: Gpu | None, args: EngineArgs, flags: EngineFlags, said: list[str]) -> int:
    if flags.max_num_batched_tokens is not None:
        return flags.max_num_batched_tokens
    if gpu is None:
        tokens = args.max_num_batched_tokens
        because = "vLLM's default for a server on a GPU of 70 GiB or more"
    else:
        tokens = default_max_num_batched_tokens(gpu)
        because = f"vLLM's default for a server on {gpu.title}"
    if flags.max_num_seqs is not None and args.max_model_len is not None and args.max_model_len > 0:
        bound = flags.max_num_seqs * args.max_model_len
        if bound < tokens:
            tokens, because = bound, "--max-num-seqs requests of max_model_len, which is less than vLLM's default"
    said.append(f"max_num_batched_tokens = {tokens:,} ({because})")
    return tokens


def _check_seqs(args: EngineArgs, flags: EngineFlags) -> None:
    """As vLLM checks it when it reads its flags (config/scheduler.py)."""
    tokens, seqs = args.max_num_batched_tokens, flags.max_num_seqs
    if seqs is not None and flags.max_num_batched_tokens is not None and seqs > tokens:
        raise StudyError(
            f"--max-num-seqs {seqs} is more than --max-num-batched-tokens {tokens}",
            hint="vLLM refuses that: each request of a step has a token of it at least",
        )


def _backend(
    spec: CacheSpec, policy: CachePolicy, gpu: Gpu | None, declared: DeclaredCache, said: list[str]
) -> Backend:
    """What vLLM chooses for this GPU, as far as its blocks are modelled."""
    if gpu is None:
        return Backend.FLASH_ATTN
    name = pick_backend(spec, policy, gpu, Serving(declared=declared)).name
    if name in set(Backend):
        said.append(f"attention_backend = {name} (what vLLM chooses on {gpu.title})")
        return Backend(name)
    if name is not None and LayerKind.LATENT not in spec.kinds:
        said.append(f"blocks are those of FLASH_ATTN ({name}, which vLLM chooses on {gpu.title}, is not modelled)")
    return Backend.FLASH_ATTN
