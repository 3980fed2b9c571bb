"""What is wrong, or looks wrong, with the scales of a checkpoint. Pure: a checkpoint as read → sentences.

vLLM checks none of this. A scale that is absent, a number that was never calibrated and memory that was never written
all load, and the model answers a little worse.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

from kvtriage.checkpoints.finding import Finding, Level
from kvtriage.checkpoints.scale_loading import Fate, Heads, LayerLoad, Loader, choose_loader, predict_loading
from kvtriage.checkpoints.scale_values import find_odd_values
from kvtriage.checkpoints.stored_scales import HeldScales, StoredScale
from kvtriage.kvcache.layer_runs import layer_runs, write_runs
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec

_Key = TypeVar("_Key", bound=Hashable)

__all__ = ["attention_heads", "find_suspects", "name_layers"]

_NO_CACHE = (LayerKind.STATE, LayerKind.NONE)


def attention_heads(held: HeldScales, spec: CacheSpec | None) -> dict[int, Heads]:
    """Every layer that has K and V, by config.json; without a spec those that the weights or the scales name."""
    if spec is not None:
        return {
            layer.layer_idx: Heads(
                layer.num_attention_heads, None if layer.kind is LayerKind.LATENT else layer.num_kv_heads
            )
            for layer in spec.layers
            if layer.kind not in _NO_CACHE
        }
    counted = max(held.attention_roots.values(), default=0)
    return dict.fromkeys({*range(counted), *(scale.layer_idx for scale in held.scales)}, Heads(None, None))


def find_suspects(held: HeldScales, spec: CacheSpec | None) -> tuple[Finding, ...]:
    """The worst first."""
    heads = attention_heads(held, spec)
    loads = predict_loading(held, heads)
    found = [*_of_config(held), *_of_producer(held)]
    if held.scales:
        found += [
            *_of_places(held, spec, heads),
            *_of_absence(held, spec, loads),
            *_of_fates(loads),
            *find_odd_values(held.scales),
            *_of_heads(held, heads),
            *_of_sharing(spec, loads),
        ]
    return tuple(sorted(found, key=lambda finding: [*Level].index(finding.level)))


def name_layers(layers: Collection[int], total: int | None = None) -> str:
    """'layers 0-2, 5', 'layer 3', 'all 30 layers'."""
    if total is not None and len(layers) == total > 1:
        return f"all {total} layers"
    return f"layer{'s' if len(layers) > 1 else ''} {write_runs(layer_runs(layers))}"


def _of_config(held: HeldScales) -> Iterator[Finding]:
    declared = held.declared
    if declared.refused is not None:
        yield Finding(Level.WRONG, f"vLLM does not start with this checkpoint: {declared.refused}")
    if not held.scales:
        if declared.is_fp8 and declared.scaling is not None:
            yield Finding(Level.SUSPECT, "it declares an FP8 cache and holds no scale: every layer runs at 1.0")
        else:
            yield Finding(Level.SAID, "it holds no scales: under --kv-cache-dtype fp8 every layer runs at 1.0")
    elif choose_loader(held) is Loader.NONE:
        method = f"quant_method {held.method}" if held.method else "no quantization_config"
        yield Finding(
            Level.WRONG,
            f"its config.json has {method}, under which vLLM has no place for a scale: it stops over them, or leaves "
            "them out with a warning",
        )
    elif not declared.is_fp8:
        yield Finding(
            Level.SAID,
            f"its scales act under --kv-cache-dtype fp8 alone: {declared.because}, so auto leaves the cache as it is",
        )


def _of_producer(held: HeldScales) -> Iterator[Finding]:
    """How some tools calibrate, where the checkpoint says which one it was."""
    quantization = held.config.get("quantization_config")
    words = quantization if isinstance(quantization, Mapping) else {}
    scheme = words.get("kv_cache_scheme")
    observer = scheme.get("observer") if isinstance(scheme, Mapping) else None
    if held.scales and "auto-round" in (held.method, words.get("provider")):
        yield Finding(Level.SUSPECT, "auto-round keeps the range of its last batch as the scale, and not the largest")
    match observer:
        case str() if observer.startswith("memoryless"):
            yield Finding(Level.SUSPECT, f"observer {observer}: the scales are those of the last batch alone")
        case "minmax":
            yield Finding(
                Level.SAID,
                "observer minmax averages exponentially: after 16 samples the first still has 86 % of the weight",
            )


def _of_places(held: HeldScales, spec: CacheSpec | None, heads: Mapping[int, Heads]) -> Iterator[Finding]:
    """Scales that nobody will look for where they are."""
    for file, scales in _grouped(held.scales, lambda scale: "" if scale.indexed else scale.file):
        if file:
            yield Finding(
                Level.WRONG,
                f"{len(scales)} scales lie in {file}, which the index does not name: vLLM never opens it",
            )
    for root, scales in _grouped(held.scales, lambda scale: scale.root):
        if held.attention_roots and root not in held.attention_roots:
            homes = " or ".join(f"{home}layers" for home in held.attention_roots)
            yield Finding(
                Level.WRONG,
                f"{len(scales)} scales are named below {root}layers, and the attention weights below {homes}",
            )
    foreign = {scale.layer_idx for scale in held.scales} - heads.keys()
    if foreign:
        yield Finding(
            Level.SUSPECT,
            f"scales for {name_layers(foreign)}, which config.json has no attention for: of another model, or a "
            "drafter's",
        )
    counted = max(held.attention_roots.values(), default=0)
    if spec is not None and 0 < counted < (own := sum(layer.holds_kv for layer in spec.layers)):
        yield Finding(
            Level.SUSPECT, f"the weights hold {counted} attention layers, and config.json means {own}: incomplete"
        )
    for (layer_idx, tensor), scales in _grouped(held.scales, lambda scale: (scale.layer_idx, scale.tensor)):
        if len(scales) > 1 and len({scale.values for scale in scales}) > 1:
            names = " and ".join(scale.name for scale in scales[:2])
            yield Finding(Level.SUSPECT, f"layer {layer_idx} has two {tensor} scales that differ: {names}")


def _of_absence(held: HeldScales, spec: CacheSpec | None, loads: Sequence[LayerLoad]) -> Iterator[Finding]:
    shared = {layer.layer_idx for layer in spec.layers if layer.shares_with is not None} if spec is not None else set()
    expected = {load.layer_idx for load in loads} - shared
    copied = {load.layer_idx for load in loads if load.v.fate is Fate.COPIED}
    has: dict[str, set[int]] = {"k": set(), "v": set(), "q": set()}
    for scale in held.scales:
        for tensor in ("k", "v") if scale.tensor == "kv" else (scale.tensor,):
            has[tensor].add(scale.layer_idx)
    neither = expected - has["k"] - has["v"]
    if neither:
        yield Finding(
            Level.SUSPECT, f"no scale for {name_layers(neither, len(expected))}: stored in FP8 they run at 1.0"
        )
    for tensor, other in (("k", "v"), ("v", "k")):
        if missing := expected & has[other] - has[tensor] - copied:
            yield Finding(Level.SUSPECT, f"no {tensor}_scale for {name_layers(missing, len(expected))}")
    if without := expected - has["q"] - neither:
        yield Finding(
            Level.SUSPECT,
            f"no q_scale for {name_layers(without, len(expected))}: it is 1.0, which matters where Q is quantised too "
            "(FlashAttention 3 and later, FlashInfer)",
        )


def _of_fates(loads: Sequence[LayerLoad]) -> Iterator[Finding]:
    words = {
        Fate.ROUNDED: (
            Level.SAID,
            "rounded to the dtype the model is served in, as vLLM loads it: where it was rounded down, by 0.2 % at "
            "most in BF16, the very largest values saturate",
        ),
        Fate.SPREAD: (Level.SUSPECT, "as one number, which vLLM spreads over all heads"),
        Fate.CUT: (Level.SUSPECT, "with more numbers than heads, of which vLLM takes the first ones"),
        Fate.COPIED: (Level.SUSPECT, "not there or not positive: vLLM takes the k_scale instead"),
        Fate.REFUSED: (Level.WRONG, "of a form or value over which vLLM stops"),
    }
    for fate, (level, says) in words.items():
        alike: dict[tuple[int, ...], list[str]] = {}
        for tensor in ("k", "v", "q"):
            layers = tuple(load.layer_idx for load in loads if getattr(load, tensor).fate is fate)
            alike.setdefault(layers, []).append(f"{tensor}_scale")
        for layers, tensors in alike.items():
            if layers:
                yield Finding(level, f"{', '.join(tensors)} of {name_layers(layers, len(loads))} {says}")


def _of_heads(held: HeldScales, heads: Mapping[int, Heads]) -> Iterator[Finding]:
    """One calibration per tensor in the dress of one per head."""
    if held.declared.scaling is not Scaling.PER_HEAD:
        return
    for tensor in ("k", "v"):
        several = [
            scale.values
            for scale in held.scales
            if scale.tensor == tensor and scale.values is not None and len(scale.values) > 1
        ]
        if several and all(len(set(values)) == 1 for values in several):
            yield Finding(
                Level.SUSPECT, f"strategy attn_head, and the {tensor}_scale is the same for all heads in every layer"
            )
    if all(known.kv == 1 for known in heads.values()):
        yield Finding(
            Level.SAID, "strategy attn_head with one KV head: strategy tensor is equal, and runs on any backend"
        )


def _of_sharing(spec: CacheSpec | None, loads: Sequence[LayerLoad]) -> Iterator[Finding]:
    own = {load.layer_idx: load for load in loads}
    sharing: list[LayerSpec] = [] if spec is None else [layer for layer in spec.layers if layer.shares_with is not None]
    apart = [
        layer.layer_idx
        for layer in sharing
        if layer.shares_with in own
        and layer.layer_idx in own
        and (own[layer.layer_idx].k, own[layer.layer_idx].v) != (own[layer.shares_with].k, own[layer.shares_with].v)
    ]
    if apart:
        yield Finding(
            Level.SUSPECT, f"{name_layers(apart)} read another layer's cache, and not by its scales but by their own"
        )


def _grouped(scales: Sequence[StoredScale], key: Callable[[StoredScale], _Key]) -> list[tuple[_Key, list[StoredScale]]]:
    found: dict[_Key, list[StoredScale]] = {}
    for scale in scales:
        found.setdefault(key(scale), []).append(scale)
    return list(found.items())
