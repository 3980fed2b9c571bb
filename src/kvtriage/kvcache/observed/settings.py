"""From what a file states to what its engine was told: every setting with where it comes from."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvtriage.errors import BadInput
from kvtriage.kvcache.allocator import (
    CACHE_DTYPES,
    LAYOUT_ALIASES,
    Backend,
    CacheDtype,
    HybridManager,
    Layout,
    MambaDtype,
    SpeculativeMethod,
)
from kvtriage.kvcache.engine_args import EngineArgs
from kvtriage.kvcache.observed.account import METRICS, Observed, Settings
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.server_args import skip_entries
from kvtriage.kvcache.skip_words import read_skip_words
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.kvcache.versions import EngineVersion

__all__ = ["Origin", "Setting", "Told", "what_it_was_told"]


class Origin(enum.StrEnum):
    """Where a setting comes from: the file, the user's flag, vLLM's default where the file shows that nothing else was
    typed, or thin air."""

    FILE = "file"
    FLAG = "flag"
    DEFAULT = "default"
    ASSUMED = "assumed"


@dataclass(frozen=True)
class Setting:
    """`name` as vLLM names it, `value` as it would be typed; `note` says what there is to say."""

    name: str
    value: str
    origin: Origin
    note: str = ""


@dataclass(frozen=True)
class Told:
    """What the engine was told. `unknown` are reasons why nothing can be predicted from it."""

    policy: CachePolicy
    args: EngineArgs
    settings: tuple[Setting, ...]
    unknown: tuple[str, ...]

    @property
    def assumed(self) -> frozenset[str]:
        """Names of the settings that neither the file nor a flag gives."""
        return self._names(Origin.ASSUMED)

    @property
    def stated(self) -> tuple[Setting, ...]:
        """Without those that were left at vLLM's default or are assumed."""
        return tuple(setting for setting in self.settings if setting.origin in (Origin.FILE, Origin.FLAG))

    @property
    def unstated(self) -> frozenset[str]:
        """The same, and those that were left at vLLM's default."""
        return self._names(Origin.ASSUMED, Origin.DEFAULT)

    def _names(self, *origins: Origin) -> frozenset[str]:
        return frozenset(setting.name for setting in self.settings if setting.origin in origins)


def what_it_was_told(
    spec: CacheSpec,
    observed: Observed,
    flags: Mapping[str, object],
    policy: CachePolicy | None,
    *,
    auto: str = "auto",
) -> Told:
    """The file first, then `flags` (EngineArgs by name) and `policy` that the user gave, then vLLM's defaults.

    `auto` is the word that the checkpoint makes of `auto` by itself.
    """
    reading = _Resolving(observed, flags)
    for name in EngineArgs.__dataclass_fields__:
        reading.resolve(name)
    found_policy = reading.resolve_policy(spec, policy, auto)
    if observed.settings.kv_connector is not None:
        reading.unknown.append(f"the KV connector {observed.settings.kv_connector} may take memory of its own")
    args = replace(EngineArgs(), **reading.values)  # type: ignore[arg-type]
    return Told(found_policy, args, tuple(reading.settings), tuple(reading.unknown))


class _Resolving:
    """Goes through the settings and keeps count of where each came from."""

    def __init__(self, observed: Observed, flags: Mapping[str, object]) -> None:
        self.observed = observed
        self.flags = flags
        self.values: dict[str, object] = {}
        self.settings: list[Setting] = []
        self.unknown: list[str] = []

    def resolve(self, name: str) -> None:
        stated = self._stated(name)
        typed = self.flags.get(name)
        if stated is None and name == "max_model_len" and typed is None and (derived := _length_of(self.observed)):
            self._keep(name, derived, Origin.FILE, "its tokens over its concurrency")
        elif stated is not None:
            note = "" if typed is None or typed == stated else f"not {_written(typed)}, as the flag says"
            self._keep(name, stated, Origin.FILE, note)
        elif typed is not None:
            self._keep(name, typed, Origin.FLAG)
        else:
            known = self.observed.shows_flags and name not in RESOLVED_LATER
            self._keep(name, _default(name), Origin.DEFAULT if known else Origin.ASSUMED)

    def _keep(self, name: str, value: object, origin: Origin, note: str = "") -> None:
        self.values[name] = value
        self.settings.append(Setting(name, _written(value), origin, note))

    def _stated(self, name: str) -> object | None:
        """The file's value as EngineArgs has it; None where it states none that is known."""
        settings = self.observed.settings
        match name:
            case "version":
                return self._version(settings)
            case "hybrid_manager":
                return None if settings.disable_hybrid_kv_cache_manager is not True else HybridManager.OFF
            case "attention_backend":
                return self._backend(settings)
            case "speculative_method":
                return self._method(settings)
            case "mamba_cache_dtype" | "mamba_ssm_cache_dtype":
                word = vars(settings)[name]
                return MambaDtype(word) if word in set(MambaDtype) else None
            case "mamba_cache_mode" | "mamba_block_size":
                return None
            case "layout":
                word = settings.kv_cache_layout
                return LAYOUT_ALIASES.get(word or "", Layout(word) if word in set(Layout) else None)
            case _:
                return vars(settings).get(name)

    def _version(self, settings: Settings) -> EngineVersion | None:
        if settings.version is None:
            return None
        try:
            return EngineVersion.parse(settings.version)
        except BadInput as error:
            if self.flags.get("version") is None:
                self.unknown.append(f"{error.message}; give --vllm-version")
            return None

    def _method(self, settings: Settings) -> SpeculativeMethod | None:
        """mtp has many names, one for each model; EAGLE 3 is as EAGLE."""
        word = settings.speculative_method
        if word is None or not settings.num_speculative_tokens:
            return None
        for method in SpeculativeMethod:
            if word == method or (method is SpeculativeMethod.MTP and word.endswith("mtp")) or word == f"{method}3":
                return method
        self.unknown.append(f"the cache of a drafter of method {word[:40]} is not modelled")
        return None

    def _backend(self, settings: Settings) -> Backend | None:
        if settings.attention_backend in set(Backend):
            return Backend(settings.attention_backend)
        return None

    def resolve_policy(self, spec: CacheSpec, policy: CachePolicy | None, auto: str) -> CachePolicy:
        """What the file says of dtype and skipped layers; where it says nothing, the user's, or plain BF16."""
        settings = self.observed.settings
        word, origin = settings.kv_cache_dtype, Origin.FILE
        if word is None and self.observed.shows_flags:
            word, origin = "auto", Origin.DEFAULT
        if word is None and policy is not None:
            self.settings.append(Setting("kv_cache_dtype", "auto" if policy.is_native else "fp8", Origin.FLAG))
            if policy.skip_layers and not policy.is_native:
                self.settings.append(
                    Setting("kv_cache_dtype_skip_layers", " ".join(skip_entries(policy, spec)), Origin.FLAG)
                )
            return policy
        if word is None:
            word, origin = "auto", Origin.ASSUMED
        stored = auto if word == "auto" else word
        note = (
            "" if word != "auto" else "the model's own dtype" if auto == "auto" else f"{auto} by the checkpoint itself"
        )
        self.settings.append(Setting("kv_cache_dtype", word, origin, note))
        if stored == "auto" and settings.dtype in ("torch.float32", "float32", "float"):
            self.unknown.append("the model is served in float32, and pages of such a cache are not modelled")
        if stored not in CACHE_DTYPES:
            self.unknown.append(f"pages of kv_cache_dtype {stored[:40]} are not modelled")
        if CACHE_DTYPES.get(stored) is not CacheDtype.FP8:
            return CachePolicy.native(spec.num_layers)
        return CachePolicy.fp8(spec.num_layers, Scaling.UNIT, self._skip(spec, policy))

    def _skip(self, spec: CacheSpec, policy: CachePolicy | None) -> tuple[int, ...]:
        words = self.observed.settings.kv_cache_dtype_skip_layers
        if words is None and self.observed.shows_flags:
            return ()
        if words is None and policy is not None and not policy.is_native:
            entries = " ".join(skip_entries(policy, spec)) or "none"
            self.settings.append(Setting("kv_cache_dtype_skip_layers", entries, Origin.FLAG))
            return policy.skip_layers
        if words is None:
            self.settings.append(Setting("kv_cache_dtype_skip_layers", "none", Origin.ASSUMED))
            return ()
        reading = read_skip_words(words, spec)
        if words and not reading.layers:
            self.unknown.append(f"the skip list {' '.join(words)} skips nothing and lengthens the block all the same")
        ignored = f"the engine ignores {' '.join(word.word for word in reading.ignored)}" if reading.ignored else ""
        if words:
            self.settings.append(Setting("kv_cache_dtype_skip_layers", " ".join(words), Origin.FILE, ignored))
        return reading.layers


def _length_of(observed: Observed) -> int | None:
    """A page of metrics does not state max_model_len; it is the tokens over the concurrency, rounded up."""
    reported = observed.reported
    if observed.source != METRICS or not reported.max_concurrency or not reported.kv_cache_tokens:
        return None
    return math.ceil(min(reported.kv_cache_tokens) / reported.max_concurrency - 1e-6)


RESOLVED_LATER = frozenset(("version", "max_model_len", "max_num_batched_tokens", "attention_backend"))
"""What the engine settles for itself where nothing is typed, by model or by GPU."""


def _default(name: str) -> object:
    return vars(EngineArgs())[name]


def _written(value: object) -> str:
    match value:
        case None:
            return "not set"
        case bool():
            return "on" if value else "off"
        case int():
            return f"{value:,}"
        case _:
            return str(value)
