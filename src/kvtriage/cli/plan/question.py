"""From what was typed to a question without open values: spec, policy, flags, memory, and what had to be assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvtriage.cli.plan.answer import Memory, Question
from kvtriage.cli.plan.engine_flags import AUTO_LENGTH, EngineFlags
from kvtriage.cli.plan.words import build_policy, parse_contexts, parse_memories, parse_skip, parse_weights
from kvtriage.errors import StudyError, UnsupportedModel
from kvtriage.kvcache.allocator import Backend, Refusal, SpeculativeMethod
from kvtriage.kvcache.declared import DeclaredCache, read_declared_cache, read_model_dtype
from kvtriage.kvcache.engine_args import EngineArgs, reserve
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.server_args import skip_entries
from kvtriage.kvcache.skip_words import read_skip_words
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from kvtriage.kvcache.support.backend_choice import Serving, pick_backend
from kvtriage.kvcache.support.findings import check_support
from kvtriage.kvcache.support.gpus import Gpu, Platform, default_max_num_batched_tokens, find_gpu
from kvtriage.kvcache.support.memory_band import cache_memory

__all__ = ["Asked", "open_question"]

UTILIZATION = 0.92


@dataclass(frozen=True)
class Asked:
    """The options of `kvtriage plan` as they were typed; `memories` and `contexts` are lists."""

    contexts: tuple[str, ...]
    skip: str | None
    scaling: str | None
    memories: tuple[str, ...]
    gpu: str | None
    weights_gib: str | None
    utilization: float | None
    engine: EngineFlags


def open_question(config: Mapping[str, object], hf_quant_config: Mapping[str, object] | None, asked: Asked) -> Question:
    """Raises StudyError and BadInput for options that make no sense, ModelError for the config."""
    spec = read_cache_spec(config)
    contexts = _contexts(spec, asked)
    gpu = None if asked.gpu is None else find_gpu(asked.gpu)
    skip = () if asked.skip is None else parse_skip(asked.skip, spec)
    scaling, chosen = _scaling(spec, skip, gpu, asked)
    policy = build_policy(spec, scaling, skip)
    declared = read_declared_cache(config, hf_quant_config)
    args, said = _engine_args(spec, policy, contexts if asked.contexts else (), gpu, asked.engine, declared)
    memory = _memory(asked, gpu, args)
    if args.max_model_len == AUTO_LENGTH and not asked.contexts and memory is not None:
        contexts = _longest_that_fits(spec, policy, args, memory) or contexts
    serving = Serving(
        backend=None if asked.engine.attention_backend is None else asked.engine.attention_backend.value,
        declared=declared,
        version=args.version,
    )
    return Question(
        spec=spec,
        policy=policy,
        contexts=contexts,
        args=args,
        said=(*chosen, *said),
        notes=(*_caveats(spec, policy, args), *_skip_notes(spec, policy)),
        memory=memory,
        gpu=gpu,
        declared=declared,
        native_dtype=read_model_dtype(config, has_bfloat16=_has_bfloat16(gpu)).served,
        findings=check_support(spec, policy, gpu, serving),
        typed=asked.engine,
    )


def _has_bfloat16(gpu: Gpu | None) -> bool:
    return gpu is None or gpu.platform is not Platform.CUDA or gpu.sm >= 80


def _contexts(spec: CacheSpec, asked: Asked) -> tuple[int, ...]:
    """As typed; else one request as long as the server takes. What `auto` comes to follows from the memory."""
    length = asked.engine.max_model_len
    if asked.contexts or length in (None, AUTO_LENGTH):
        return parse_contexts(asked.contexts, spec)
    return (min(length, spec.max_model_len),)


def _scaling(spec: CacheSpec, skip: tuple[int, ...], gpu: Gpu | None, asked: Asked) -> tuple[str, tuple[str, ...]]:
    """Per head unless something else was typed; per tensor where no backend of the GPU takes a scale for each head."""
    if asked.scaling is not None:
        return asked.scaling, ()
    plain = CachePolicy.fp8(spec.num_layers, Scaling.PER_TENSOR, skip)
    if gpu is None or asked.engine.attention_backend is not None or pick_backend(spec, plain, gpu).serves_per_head:
        return Scaling.PER_HEAD, ()
    return Scaling.PER_TENSOR, (f"scaling = per_tensor (no backend on {gpu.title} takes a scale for each head here)",)


# --- the engine's flags -----------------------------------------------------------------


def _engine_args(
    spec: CacheSpec,
    policy: CachePolicy,
    contexts: Sequence[int],
    gpu: Gpu | None,
    flags: EngineFlags,
    declared: DeclaredCache,
) -> tuple[EngineArgs, tuple[str, ...]]:
    """The flags with every open value filled in, and what was filled in, with its reason."""
    args = replace(EngineArgs(), **flags.typed)
    said: list[str] = []
    args = replace(args, max_model_len=_max_model_len(spec, contexts, flags, said))
    args = replace(args, max_num_batched_tokens=_batched_tokens(gpu, args, flags, said))
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
    said.append(f"max_num_batched_tokens = {tokens:,} ({because})")
    return tokens


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


def _caveats(spec: CacheSpec, policy: CachePolicy, args: EngineArgs) -> Iterator[str]:
    yield from args.version.caveats(
        skips_layers=bool(policy.skip_layers) and not policy.is_native, is_recurrent=LayerKind.STATE in spec.kinds
    )


def _skip_notes(spec: CacheSpec, policy: CachePolicy) -> tuple[str, ...]:
    if policy.is_native or not policy.skip_layers:
        return ()
    return read_skip_words(skip_entries(policy, spec), spec).said


def _longest_that_fits(
    spec: CacheSpec, policy: CachePolicy, args: EngineArgs, memory: Memory
) -> tuple[int, ...] | None:
    """What --max-model-len auto comes to; None where nothing fits, or where that is not modelled."""
    try:
        outcome = reserve(spec, policy, args, memory.available_bytes)
    except UnsupportedModel:
        return None
    return None if isinstance(outcome, Refusal) else (outcome.max_model_len,)


# --- the memory -------------------------------------------------------------------------


def _memory(asked: Asked, gpu: Gpu | None, args: EngineArgs) -> Memory | None:
    sizes = parse_memories(asked.memories)
    if asked.weights_gib is None:
        if asked.utilization is not None:
            raise StudyError(
                "--utilization says nothing without --weights-gib", hint="give --gpu and --weights-gib too"
            )
        if len(sizes) > 1:
            raise StudyError("--memory is given more than once", hint="give one amount, or add --sweep for a list")
        return Memory(sizes[0]) if sizes else None
    if sizes:
        raise StudyError(
            "--memory and --weights-gib both say how much memory there is",
            hint="--memory is exact; leave --weights-gib out",
        )
    if gpu is None:
        raise StudyError("--weights-gib needs a --gpu to hold them", hint="give --gpu h100-80g, or --memory 16GiB")
    band = cache_memory(
        gpu,
        parse_weights(asked.weights_gib),
        UTILIZATION if asked.utilization is None else asked.utilization,
        args.tensor_parallel_size * args.pipeline_parallel_size,
        args.max_num_batched_tokens,
    )
    if band.likely_bytes <= 0:
        raise StudyError(
            f"with weights of {asked.weights_gib} GiB the cache is likely to get nothing on {gpu.title}",
            hint="use more or larger GPUs, or smaller weights",
        )
    return Memory(band.likely_bytes, band)
