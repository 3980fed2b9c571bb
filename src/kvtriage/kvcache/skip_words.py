"""`--kv-cache-dtype-skip-layers`, word for word: what each word does to this model, and what it does not.

vLLM 0.32 compares strings and checks nothing (model_executor/layers/attention/attention.py:299-320,
mla_attention.py:493-500): a word that equals no layer's index and is not `sliding_window` is passed over in silence.
Indices are those of the model's layers, not of those that attend. `sliding_window` means layers with a window: not
chunked ones, and not latent ones, which are asked for their index alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtriage.kvcache.allocator import Capacity, HybridManager, Layout
from kvtriage.kvcache.engine_args import EngineArgs, reserve
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.server_args import SLIDING_WINDOW
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec

__all__ = [
    "BLOCKS_OUTERMOST",
    "WITHOUT_HYBRID_MANAGER",
    "IgnoredWord",
    "SkipReading",
    "find_starting_flags",
    "read_skip_words",
]

ENOUGH_BYTES = 2**58
ENOUGH_TOKENS = 4096

WITHOUT_HYBRID_MANAGER = "--disable-hybrid-kv-cache-manager"
BLOCKS_OUTERMOST = "VLLM_KV_CACHE_LAYOUT=BLHNC"


@dataclass(frozen=True)
class IgnoredWord:
    """A word that the engine passes over, and why it matches nothing here."""

    word: str
    because: str


@dataclass(frozen=True)
class SkipReading:
    """`layers` keep the model's dtype, ascending. `said` is what else the words do, and of that `torn` names the
    layers that share a cache and are named apart."""

    layers: tuple[int, ...]
    ignored: tuple[IgnoredWord, ...]
    said: tuple[str, ...]
    torn: tuple[str, ...] = ()


def read_skip_words(words: Sequence[str], spec: CacheSpec) -> SkipReading:
    """What `words` skip in this model under an FP8 cache."""
    layers: set[int] = set()
    ignored: list[IgnoredWord] = []
    said: list[str] = []
    for word in dict.fromkeys(words):
        if word == SLIDING_WINDOW and (windowed := spec.layers_of(LayerKind.SLIDING)):
            layers.update(layer_idx for layer_idx in windowed if spec.layers[layer_idx].holds_kv)
        elif (because := _why_ignored(word, spec)) is not None:
            ignored.append(IgnoredWord(word, because))
        elif int(word) < spec.num_layers:
            if spec.layers[int(word)].holds_kv:
                layers.add(int(word))
        else:
            said.append(f"{word} is a layer of the checkpoint's drafter, which has a cache only where it is used")
    if words and not layers:
        said.append("no layer is skipped, yet any list at all lengthens the block until it holds a page of BF16")
    torn = tuple(_torn_shares(spec, frozenset(words)))
    return SkipReading(tuple(sorted(layers)), tuple(ignored), (*said, *torn), torn)


def _why_ignored(word: str, spec: CacheSpec) -> str | None:
    """None for a word that means something."""
    if word == SLIDING_WINDOW:
        return _why_no_window(spec)
    if not word.isascii() or not word.lstrip("-").isdigit():
        return f"only {SLIDING_WINDOW} and the indices of layers mean anything"
    if word.startswith("-"):
        return "layers are not counted from the end"
    if len(word) > 9 or str(int(word)) != word:
        return "an index is compared as text, without leading zeros"
    return _why_no_layer(int(word), spec)


def _why_no_window(spec: CacheSpec) -> str:
    if spec.layers_of(LayerKind.CHUNKED):
        return "chunked layers have no window: name them by their indices"
    if spec.layers_of(LayerKind.LATENT):
        return "latent layers are asked for their index alone"
    return "no layer has a window"


def _why_no_layer(layer_idx: int, spec: CacheSpec) -> str | None:
    if layer_idx < spec.num_layers:
        return _why_no_cache(spec.layers[layer_idx])
    if layer_idx in {layer.layer_idx for layer in spec.draft_layers}:
        return None
    return f"the model's layers are 0 to {spec.num_layers - 1}"


def _why_no_cache(layer: LayerSpec) -> str | None:
    match layer.kind:
        case LayerKind.STATE:
            return "a recurrent state is never FP8"
        case LayerKind.NONE:
            return "the layer has no attention"
        case _:
            return None


def _torn_shares(spec: CacheSpec, words: frozenset[str]) -> list[str]:
    """A layer that reads another's cache takes its dtype from the words as they stand, not from that layer."""
    torn: dict[int, list[int]] = {}
    for layer in spec.layers:
        target = layer.shares_with
        if target is not None and _is_named(layer, words) != _is_named(spec.layers[target], words):
            torn.setdefault(target, []).append(layer.layer_idx)
    return [
        f"layers {', '.join(map(str, readers))} read the cache of layer {target}: name all of them or none, "
        "for the engine decides on the dtype of each by itself, and would read FP8 as BF16 or BF16 as FP8"
        for target, readers in torn.items()
    ]


def _is_named(layer: LayerSpec, words: frozenset[str]) -> bool:
    return str(layer.layer_idx) in words or (layer.kind is LayerKind.SLIDING and SLIDING_WINDOW in words)


def find_starting_flags(spec: CacheSpec, skip_layers: Sequence[int], args: EngineArgs) -> tuple[str, ...]:
    """The flags, each alone, with which the engine does start; () when it starts as it is or none of them helps.

    In a model of sliding and full layers vLLM 0.32 fails an assertion when a full layer is skipped
    (v1/kv_cache_interface.py:558). The answer is computed: each is tried on the allocator with ample memory.
    """
    policy = CachePolicy.fp8(spec.num_layers, Scaling.UNIT, skip_layers)
    trial = replace(args, max_model_len=min(ENOUGH_TOKENS, spec.max_model_len))
    if _starts(spec, policy, trial):
        return ()
    tries = (
        (WITHOUT_HYBRID_MANAGER, replace(trial, hybrid_manager=HybridManager.OFF)),
        (BLOCKS_OUTERMOST, replace(trial, layout=Layout.BLHNC)),
    )
    return tuple(flag for flag, changed in tries if _starts(spec, policy, changed))


def _starts(spec: CacheSpec, policy: CachePolicy, args: EngineArgs) -> bool:
    outcome = reserve(spec, policy, args, ENOUGH_BYTES)
    return isinstance(outcome, Capacity) and outcome.breaks is None
