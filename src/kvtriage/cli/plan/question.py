"""From what was typed to a question without open values: spec, policy, flags, memory, and what had to be assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvtriage.cli.plan.answer import Memory, Question
from kvtriage.cli.plan.defaults import fill_in
from kvtriage.cli.plan.engine_flags import AUTO_LENGTH, EngineFlags
from kvtriage.cli.plan.spelling import Spelling
from kvtriage.cli.plan.words import NATIVE, build_policy, parse_contexts, parse_memories, parse_skip, parse_weights
from kvtriage.errors import StudyError, UnsupportedModel
from kvtriage.kvcache.allocator import Backend, Refusal
from kvtriage.kvcache.declared import DeclaredCache, read_declared_cache, read_model_dtype
from kvtriage.kvcache.engine_args import EngineArgs, reserve
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.server_args import skip_entries
from kvtriage.kvcache.skip_words import read_skip_words
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from kvtriage.kvcache.support.backend_choice import Serving, pick_backend
from kvtriage.kvcache.support.findings import check_support
from kvtriage.kvcache.support.gpus import Gpu, Platform, find_gpu
from kvtriage.kvcache.support.memory_band import cache_memory

__all__ = ["CACHE_DTYPES", "Asked", "open_question"]

UTILIZATION = 0.92
CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
NATIVE_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Asked:
    """The options of `kvtriage plan` as they were typed; `memories` and `contexts` are lists.

    `cache_dtype` is vLLM's --kv-cache-dtype, one of CACHE_DTYPES.
    """

    contexts: tuple[str, ...]
    skip: str | None
    scaling: str | None
    memories: tuple[str, ...]
    gpu: str | None
    weights_gib: str | None
    utilization: float | None
    engine: EngineFlags
    cache_dtype: str | None = None
    spelling: Spelling = field(default_factory=Spelling)


def open_question(config: Mapping[str, object], hf_quant_config: Mapping[str, object] | None, asked: Asked) -> Question:
    """Raises StudyError and BadInput for options that make no sense, ModelError for the config."""
    spec = read_cache_spec(config)
    contexts = _contexts(spec, asked)
    gpu = None if asked.gpu is None else find_gpu(asked.gpu)
    skip = () if asked.skip is None else parse_skip(asked.skip, spec, asked.spelling.skip)
    declared = read_declared_cache(config, hf_quant_config)
    scaling, chosen = _scaling(spec, skip, gpu, asked, declared)
    native = "--scaling native" if asked.cache_dtype is None else f"--kv-cache-dtype {asked.cache_dtype}"
    policy = build_policy(spec, scaling, skip, f"{asked.spelling.skip} with {native}")
    args, said = fill_in(spec, policy, contexts if asked.contexts else (), gpu, asked.engine, declared)
    memory = _memory(asked, gpu, args)
    if args.max_model_len == AUTO_LENGTH and not asked.contexts and memory is not None:
        contexts = _longest_that_fits(spec, policy, args, memory) or contexts
    serving = Serving(
        backend=None if asked.engine.attention_backend is None else asked.engine.attention_backend.value,
        declared=declared,
        version=args.version,
    )
    native_dtype = read_model_dtype(config, has_bfloat16=_has_bfloat16(gpu)).served
    return Question(
        spec=spec,
        policy=policy,
        contexts=contexts,
        args=args,
        chosen=chosen,
        said=said,
        notes=(*_caveats(spec, policy, args), *_skip_notes(spec, policy), *_typed_notes(asked, native_dtype)),
        memory=memory,
        gpu=gpu,
        declared=declared,
        native_dtype=native_dtype,
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


def _scaling(
    spec: CacheSpec, skip: tuple[int, ...], gpu: Gpu | None, asked: Asked, declared: DeclaredCache
) -> tuple[str, tuple[str, ...]]:
    """Per head unless something else was typed; per tensor where no backend there takes a scale for each head.

    It is said, for both need a checkpoint that holds scales, and scales per head may have another backend chosen.
    """
    typed, backend = _typed_scaling(asked, declared), asked.engine.attention_backend
    if typed is not None:
        return typed, ()
    if backend not in (None, Backend.FLASH_ATTN):
        return Scaling.PER_TENSOR, (f"scaling = per_tensor ({backend} takes no scale for each head)",)
    because = "--scaling unit needs no checkpoint with scales"
    if gpu is None:
        return Scaling.PER_HEAD, (f"scaling = per_head ({because})",)
    serving = Serving(backend=backend)
    plain = pick_backend(spec, CachePolicy.fp8(spec.num_layers, Scaling.PER_TENSOR, skip), gpu, serving)
    if not plain.serves_per_head:
        return Scaling.PER_TENSOR, (
            f"scaling = per_tensor (no backend on {gpu.title} takes a scale for each head here)",
        )
    per_head = pick_backend(spec, CachePolicy.fp8(spec.num_layers, Scaling.PER_HEAD, skip), gpu, serving)
    if plain.name != per_head.name:
        because += f"; unit and per_tensor get {plain.name} on {gpu.title}"
    return Scaling.PER_HEAD, (f"scaling = per_head ({because})",)


def _typed_scaling(asked: Asked, declared: DeclaredCache) -> str | None:
    """What --scaling and --kv-cache-dtype ask for; None where they leave it open how FP8 is scaled."""
    dtype, scaling = asked.cache_dtype, asked.scaling
    if dtype is None:
        return scaling
    meant = _auto_scaling(declared) if dtype == "auto" else NATIVE if dtype in NATIVE_DTYPES else None
    agrees = meant in (None, scaling) and (meant is not None or scaling != NATIVE)
    if scaling is not None and not agrees:
        because = f", which is {meant} with this checkpoint" if dtype == "auto" else ""
        raise StudyError(
            f"--scaling {scaling} contradicts --kv-cache-dtype {dtype}{because}", hint="drop one of the two"
        )
    return scaling if meant is None else meant


def _auto_scaling(declared: DeclaredCache) -> str:
    """What `auto` comes to. Raises StudyError for a dtype that is not priced here."""
    if declared.is_fp8:
        return declared.scaling or Scaling.UNIT
    if declared.cache_dtype == "auto":
        return NATIVE
    raise StudyError(
        f"--kv-cache-dtype auto is {declared.cache_dtype} with this checkpoint, which is not priced here",
        hint="give --kv-cache-dtype fp8 or bfloat16",
    )


def _typed_notes(asked: Asked, native_dtype: str) -> Iterator[str]:
    """What was typed and does not do what one may think."""
    if asked.cache_dtype in NATIVE_DTYPES and asked.cache_dtype != native_dtype:
        yield f"the model is served in {native_dtype}, and so is a cache that is not FP8: the flags say that"
    if asked.engine.max_num_seqs is not None:
        yield "--max-num-seqs moves no figure by itself: the line is of memory, and that many requests run at most"


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
    spelling = asked.spelling
    sizes = parse_memories(asked.memories, spelling.memory)
    if asked.weights_gib is None:
        if asked.utilization is not None:
            raise StudyError(
                f"{spelling.utilization} says nothing without --weights-gib", hint="give --gpu and --weights-gib too"
            )
        if len(sizes) > 1:
            raise StudyError(
                f"{spelling.memory} is given more than once", hint="give one amount, or add --sweep for a list"
            )
        return Memory(sizes[0]) if sizes else None
    if sizes:
        raise StudyError(
            f"{spelling.memory} and --weights-gib both say how much memory there is",
            hint=f"{spelling.memory} is exact; leave --weights-gib out",
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
    return Memory(band.likely_bytes, band, asked.utilization)
