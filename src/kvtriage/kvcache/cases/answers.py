"""One case as JSON: a model, the engine's flags, and what comes of them. The form is stable.

A case has an `id`, an `input` (the flags) and a model: `layer_runs`, runs of equal layers of one
rank as [count, layer], or `config`, a config.json. The layers may also stand inside `input`, as
`layer_runs` or one by one as `layers`. Where both are given, the layers count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvtriage.errors import DataError, KvtriageError, UnsupportedModel
from kvtriage.kvcache.allocator.layers import CrossLayer, LayerStack
from kvtriage.kvcache.allocator.refusal import EngineRefused, Refusal
from kvtriage.kvcache.allocator.report import Capacity, allocate
from kvtriage.kvcache.allocator.settings import PoolSettings, ServingLimits
from kvtriage.kvcache.cases.flags import read_args, read_cache_dtype, refuse_misspelt, refuse_unmodelled
from kvtriage.kvcache.cases.layers import has_layers, layers_are_fp8, read_layers
from kvtriage.kvcache.cases.values import HINT, MOST_BYTES, mapping, whole, words
from kvtriage.kvcache.declared import read_declared_cache
from kvtriage.kvcache.engine_args import EngineArgs, check_args, layer_stack, pool_settings, serving_limits
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.kvcache.versions import EngineVersion

__all__ = ["Answer", "Question", "answer_case", "answer_error", "read_question"]

Answer = dict[str, object]

LONGEST_THAT_FITS = -1
FIGURES = ("num_blocks", "bytes_per_block", "blocks_per_request", "reported_tokens", "max_concurrency")


@dataclass(frozen=True)
class Question:
    """What a case asks of the allocator, and the release whose two figures it wants."""

    stack: LayerStack
    settings: PoolSettings
    limits: ServingLimits
    version: EngineVersion


def answer_case(case: Mapping[str, object]) -> Answer:
    """id, ok, five figures and error, whatever the case. A malformed one is an answer with an error too."""
    case_id = _case_id(case)
    try:
        asked = read_question(case)
        outcome = allocate(asked.stack, asked.settings, asked.limits)
    except EngineRefused as refused:
        return answer_error(case_id, refused.refusal.error_type, refused.refusal.text)
    except KvtriageError as error:
        return answer_error(case_id, type(error).__name__, error.message)
    if isinstance(outcome, Refusal):
        return answer_error(case_id, outcome.error_type, outcome.text)
    return _answer_capacity(case_id, outcome, asked.version)


def answer_error(case_id: object, error_type: str, reason: str) -> Answer:
    """An answer without figures."""
    error = {"error_type": error_type, "reason": reason}
    return {"id": case_id, "ok": False, **dict.fromkeys(FIGURES), "error": error}


def _answer_capacity(case_id: object, capacity: Capacity, version: EngineVersion) -> Answer:
    """Where the engine prints its line and breaks afterwards, both the figures and the error."""
    breaks = capacity.breaks
    has_cache = bool(capacity.pool.groups)
    line = capacity.reported(version)
    return {
        "id": case_id,
        "ok": breaks is None,
        "num_blocks": capacity.num_blocks,
        "bytes_per_block": capacity.pool.bytes_per_block if has_cache else None,
        "blocks_per_request": capacity.blocks_per_request if has_cache else None,
        "reported_tokens": line.tokens if has_cache else None,
        "max_concurrency": line.max_concurrency if has_cache else None,
        "error": None if breaks is None else {"error_type": breaks.error_type, "reason": breaks.text},
    }


def _case_id(case: Mapping[str, object]) -> object:
    """Any JSON value, as it is; null where there is none."""
    flags = case.get("input")
    return case.get("id", flags.get("id") if isinstance(flags, Mapping) else None)


# --- from JSON to the allocator's own values --------------------------------------------


def read_question(case: Mapping[str, object]) -> Question:
    """Raises DataError, UnsupportedModel or ModelError, and EngineRefused for flags that no engine takes."""
    flags = mapping(case.get("input"), "input")
    refuse_misspelt(flags)
    refuse_unmodelled(flags)
    args = read_args(flags)
    available_bytes = whole(flags, "available_memory_bytes", None, -MOST_BYTES, MOST_BYTES)
    skip_words = words(flags, "skip_layers")
    config = case.get("config")
    if config is None or has_layers(case, flags):
        dtype = read_cache_dtype(flags, "fp8" if layers_are_fp8(case, flags) else "auto")
        stack = read_layers(case, flags)
        spec, args = _bare_model(stack, args, config)
    else:
        if isinstance(config, str):
            raise DataError("config is a text: it must be the object that config.json holds, not its path", hint=HINT)
        declared = read_declared_cache(mapping(config, "config"))
        if declared.refused is not None:
            raise UnsupportedModel(f"vLLM does not load this checkpoint: {declared.refused}", hint=HINT)
        dtype = read_cache_dtype(flags, declared.cache_dtype)
        spec = read_cache_spec(mapping(config, "config"))
        stack = layer_stack(spec, args)
    check_args(spec, args)
    limits = serving_limits(spec, args, available_bytes)
    if limits.max_num_encoder_input_tokens == 0 and any(isinstance(kind, CrossLayer) for kind in stack.kinds):
        raise DataError("cross layers need max_num_encoder_input_tokens", hint=HINT)
    settings = pool_settings(spec, CachePolicy.native(spec.num_layers), args)
    return Question(stack, replace(settings, cache_dtype=dtype, skip_layers=skip_words), limits, args.version)


def _bare_model(stack: LayerStack, args: EngineArgs, config: object) -> tuple[CacheSpec, EngineArgs]:
    """What stands for the model where its layers are given: no more than the longest context is asked of it.

    A drafter's layers are among those given, and its chain is one module long.
    """
    if args.max_model_len != LONGEST_THAT_FITS:
        longest = 0
    elif config is None:
        raise DataError("max_model_len -1 asks for the model's own length, and there is no config", hint=HINT)
    else:
        longest = read_cache_spec(mapping(config, "config")).max_model_len
    if args.enable_prefix_caching is None:
        is_recurrent = stack.largest_state_bytes > 0
        args = replace(args, enable_prefix_caching=not (is_recurrent and args.version.keeps_states_by_prefix is False))
    return CacheSpec("", (), longest), replace(args, draft_layers=())
