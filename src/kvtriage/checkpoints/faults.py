"""Planted faults: real checkpoints whose right repair is known, because we broke them.

Every fault leaves the BF16 function as it was (`fault_edits`) and changes only how K and V look
on their way into the cache. What FP8 then needs is the truth that a verdict is held against:
nothing, scales, layers kept in BF16, or both.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from kvtriage.checkpoints.attention_weights import AttentionWeights, open_attention
from kvtriage.checkpoints.fault_edits import Edits, offset_v, shift_k, shift_v
from kvtriage.checkpoints.json_file import encode_object
from kvtriage.checkpoints.links import followed, link_or_copy
from kvtriage.checkpoints.model_folder import INDEX_NAME, ModelFolder
from kvtriage.checkpoints.safetensors_file import ITEM_BYTES, RawTensor, read_raw, write_shard
from kvtriage.checkpoints.v_estimate import v_rms
from kvtriage.errors import BadInput, ModelError
from kvtriage.files import new_folder, write_atomic
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["FAULTS", "TRUTH_NAME", "Fault", "Planted", "Strength", "UnsupportedFault", "plant"]

TRUTH_NAME = "kvtriage_fault.json"


class UnsupportedFault(ModelError):
    """A fault that this architecture cannot carry without changing its function."""


@dataclass(frozen=True)
class Strength:
    """What --strength means for one fault."""

    default: float
    low: float
    high: float
    unit: str
    """'octaves' (powers of two, whole numbers) or 'times the estimated RMS of V'."""


@dataclass(frozen=True)
class Fault:
    """One line of the table: what is done, and the repair that is right afterwards."""

    name: str
    title: str
    truth: str
    """'none', 'scales', 'skip' or 'both'."""
    description: str
    strength: Strength | None = None
    takes_layer: bool = True
    takes_head: bool = True


@dataclass(frozen=True)
class Planted:
    """The truth about a planted checkpoint; kvtriage_fault.json holds the same."""

    fault: str
    repair: str
    scaling: Scaling
    """The coarsest scaling that repairs what is a matter of range; UNIT when nothing is."""
    skip_layers: tuple[int, ...]
    """The layers that must stay in BF16, ascending."""
    layers: tuple[int, ...]
    """The layers that were changed, ascending."""
    head: int | None
    strength: float | None


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        fault.name: fault
        for fault in (
            Fault(
                "none",
                "Nothing planted",
                "none",
                "The checkpoint as it is. Whatever is found in it was there before.",
                takes_layer=False,
                takes_head=False,
            ),
            Fault(
                "v_underflow",
                "V too small for unit scale",
                "scales",
                "V × 2^-s, undone in o_proj: at scale 1 it falls below E4M3's smallest number.",
                Strength(12, 1, 60, "octaves"),
            ),
            Fault(
                "k_overflow",
                "K too large for unit scale",
                "scales",
                "K × 2^s, undone in its queries: at scale 1 it saturates at 448.",
                Strength(10, 1, 60, "octaves"),
            ),
            Fault(
                "head_spread",
                "One V head far below the others",
                "scales",
                "One head's V lies s octaves below the largest other head's: more than E4M3 spans, so that one "
                "scale for all heads flushes it, and only a scale per head keeps it.",
                Strength(22, 14, 60, "octaves"),
            ),
            Fault(
                "layer_off_range",
                "A whole layer off range",
                "scales",
                "All V heads of one layer × 2^-s, and all its K heads × 2^s where there is no QK-norm.",
                Strength(12, 1, 60, "octaves"),
                takes_head=False,
            ),
            Fault(
                "v_offset",
                "A V offset in one layer",
                "skip",
                "A constant added to each V channel and undone in o_proj's bias: V's own variation falls into the "
                "mantissa bits that E4M3 has not got, at any scale.",
                Strength(16, 2, 100, "times the estimated RMS of V"),
            ),
            Fault(
                "v_offset_type",
                "A V offset in all layers of one attention type",
                "skip",
                "The same offset in every sliding layer, or in every layer of --layer's type.",
                Strength(8, 2, 100, "times the estimated RMS of V"),
                takes_head=False,
            ),
            Fault(
                "range_and_mantissa",
                "Range in one layer, mantissa in another",
                "both",
                "v_underflow in one layer (12 octaves) and v_offset in another, the one that --layer names.",
                Strength(16, 2, 100, "times the estimated RMS of V"),
                takes_head=False,
            ),
        )
    }
)
"""Every fault, by name."""


def plant(
    model: ModelFolder,
    spec: CacheSpec,
    fault: str,
    *,
    layer: int | None,
    head: int | None,
    strength: float | None,
    out: Path,
) -> Planted:
    """Write the checkpoint `out`: `model` with `fault` planted, whole or not at all.

    Only the weights files that hold a changed tensor are written anew; the others are linked.
    `layer`, `head` and `strength` are None for the fault's own defaults. Raises BadInput for an
    argument that does not fit, UnsupportedFault for a model that cannot carry the fault.
    """
    if os.path.lexists(out):
        raise BadInput(f"{out} already exists", hint="choose a new folder; nothing is overwritten")
    kind = _known(fault)
    _refuse_second_fault(model)
    site = _Site(open_attention(model, spec), _family(model), layer, head, _checked_strength(kind, strength))
    _check_place(kind, spec, layer, head)
    change = _PLANTERS[kind.name](site)
    planted = Planted(
        fault=kind.name,
        repair=kind.truth,
        scaling=change.scaling,
        skip_layers=tuple(sorted(change.skip_layers)),
        layers=tuple(sorted(change.layers)),
        head=change.head,
        strength=None if kind.strength is None else site.strength,
    )
    _write(model, site.weights, change, planted, out)
    return planted


# --- what an architecture can carry -----------------------------------------------------


@dataclass(frozen=True)
class _Family:
    """Two facts of a modelling file that the weights alone do not tell."""

    model_type: str
    gain_plus_one: bool
    """Its RMS norms multiply by 1 + w."""
    bias_switch: bool
    """`attention_bias: true` gives q, k, v and o projections a bias."""


_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            _Family("llama", gain_plus_one=False, bias_switch=True),
            _Family("mistral", gain_plus_one=False, bias_switch=False),
            _Family("qwen2", gain_plus_one=False, bias_switch=False),
            _Family("qwen3", gain_plus_one=False, bias_switch=True),
            _Family("gemma", gain_plus_one=True, bias_switch=True),
            _Family("gemma2", gain_plus_one=True, bias_switch=True),
            _Family("gemma3_text", gain_plus_one=True, bias_switch=True),
        )
    }
)
"""As read in transformers' modeling_*.py: `attention_bias` in q, k, v and o, and the norm's form."""


def _family(model: ModelFolder) -> _Family:
    model_type = _text_config(model.config).get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise UnsupportedFault(
            f"kvtriage does not know how to plant faults in a model of type {model_type!r}",
            hint=f"it knows {', '.join(sorted(_FAMILIES))}",
        )
    return _FAMILIES[model_type]


def _text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


# --- the faults -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Site:
    """Where a fault is wanted. `layer` and `head` are None for the default."""

    weights: AttentionWeights
    family: _Family
    layer: int | None
    head: int | None
    strength: float

    @property
    def octaves(self) -> int:
        return round(self.strength)

    @property
    def num_layers(self) -> int:
        return self.weights.spec.num_layers

    def default_layer(self) -> int:
        """An early layer: what it loses is felt in all those above."""
        return self.num_layers // 8

    def one_layer(self) -> int:
        return self.default_layer() if self.layer is None else self.layer

    def some_layers(self) -> tuple[int, ...]:
        """The layer asked for, or three spread over the model: clear damage on any text."""
        if self.layer is not None:
            return (self.layer,)
        return tuple(sorted({self.default_layer(), self.num_layers // 3, 2 * self.num_layers // 3}))

    def heads(self, layer_idx: int) -> tuple[int, ...]:
        return tuple(range(self.weights.layer(layer_idx).num_kv_heads)) if self.head is None else (self.head,)


@dataclass(frozen=True)
class _Change:
    edits: Edits
    layers: frozenset[int] = frozenset()
    skip_layers: frozenset[int] = frozenset()
    scaling: Scaling = Scaling.UNIT
    head: int | None = None
    biases: bool = False


def _plant_none(site: _Site) -> _Change:
    return _Change({})


def _plant_v_underflow(site: _Site) -> _Change:
    edits: Edits = {}
    for layer_idx in site.some_layers():
        edits |= shift_v(site.weights, layer_idx, site.heads(layer_idx), -site.octaves)
    return _Change(edits, frozenset(site.some_layers()), scaling=Scaling.PER_TENSOR, head=site.head)


def _plant_k_overflow(site: _Site) -> _Change:
    edits: Edits = {}
    for layer_idx in site.some_layers():
        _check_qk_norm(site, layer_idx)
        edits |= shift_k(site.weights, layer_idx, site.heads(layer_idx), site.octaves)
    return _Change(edits, frozenset(site.some_layers()), scaling=Scaling.PER_TENSOR, head=site.head)


def _plant_head_spread(site: _Site) -> _Change:
    edits: Edits = {}
    head = 0 if site.head is None else site.head
    for layer_idx in site.some_layers():
        rms = v_rms(site.weights, layer_idx, gain_plus_one=site.family.gain_plus_one)
        if len(rms) < 2:
            raise UnsupportedFault(
                f"layer {layer_idx} has one KV head, so that no head can be far from the others",
                hint="plant v_underflow in it instead, or use a model with more KV heads",
            )
        largest_other = max(value for i, value in enumerate(rms) if i != head)
        octaves = site.octaves + math.ceil(math.log2(rms[head] / largest_other))
        edits |= shift_v(site.weights, layer_idx, (head,), -octaves)
    return _Change(edits, frozenset(site.some_layers()), scaling=Scaling.PER_HEAD, head=head)


def _plant_layer_off_range(site: _Site) -> _Change:
    layer_idx = site.one_layer()
    heads = site.heads(layer_idx)
    edits = shift_v(site.weights, layer_idx, heads, -site.octaves)
    if not site.weights.has(layer_idx, "k_norm.weight"):
        edits |= shift_k(site.weights, layer_idx, heads, site.octaves)
    return _Change(edits, frozenset({layer_idx}), scaling=Scaling.PER_TENSOR)


def _plant_v_offset(site: _Site) -> _Change:
    return _offsets(site, frozenset({site.one_layer()}))


def _plant_v_offset_type(site: _Site) -> _Change:
    spec = site.weights.spec
    if not spec.is_hybrid:
        raise UnsupportedFault(
            "all layers of this model have the same attention type, so that skipping the type would skip them all",
            hint="plant v_offset in one layer, or use a model with sliding and full layers",
        )
    windowed = [layer.layer_idx for layer in spec.layers if layer.window_tokens is not None]
    wanted = spec.layers[windowed[0] if site.layer is None else site.layer].kind
    return _offsets(site, frozenset(spec.layers_of(wanted)))


def _plant_range_and_mantissa(site: _Site) -> _Change:
    offset_layer = site.one_layer()
    if site.num_layers < 2:
        raise UnsupportedFault("this model has one layer, and the fault needs two", hint="plant v_offset instead")
    upper = 2 * site.num_layers // 3
    range_layer = upper if upper != offset_layer else 0
    every_head = range(site.weights.layer(range_layer).num_kv_heads)
    offset = _offsets(site, frozenset({offset_layer}))
    return _Change(
        shift_v(site.weights, range_layer, every_head, -_RANGE_OCTAVES) | offset.edits,
        frozenset({range_layer, offset_layer}),
        skip_layers=offset.skip_layers,
        scaling=Scaling.PER_TENSOR,
        biases=True,
    )


_RANGE_OCTAVES = 12

_PLANTERS: Mapping[str, Callable[[_Site], _Change]] = MappingProxyType(
    {
        "none": _plant_none,
        "v_underflow": _plant_v_underflow,
        "k_overflow": _plant_k_overflow,
        "head_spread": _plant_head_spread,
        "layer_off_range": _plant_layer_off_range,
        "v_offset": _plant_v_offset,
        "v_offset_type": _plant_v_offset_type,
        "range_and_mantissa": _plant_range_and_mantissa,
    }
)


def _offsets(site: _Site, layers: frozenset[int]) -> _Change:
    """V + strength × RMS, head by head, in `layers`."""
    if not site.family.bias_switch:
        raise UnsupportedFault(
            f"the attention of a {site.family.model_type} model has no bias in o_proj to undo a V offset with",
            hint="plant this fault in a Llama, Gemma or Qwen3 model",
        )
    offsets = {}
    for layer_idx in sorted(layers):
        rms = v_rms(site.weights, layer_idx, gain_plus_one=site.family.gain_plus_one)
        chosen = site.heads(layer_idx)
        offsets[layer_idx] = [site.strength * value if i in chosen else 0.0 for i, value in enumerate(rms)]
    return _Change(offset_v(site.weights, offsets), layers, skip_layers=layers, head=site.head, biases=True)


# --- arguments --------------------------------------------------------------------------


def _known(fault: str) -> Fault:
    if fault not in FAULTS:
        raise BadInput(f"there is no fault {fault!r}", hint=f"choose one of {', '.join(FAULTS)}")
    return FAULTS[fault]


def _refuse_second_fault(model: ModelFolder) -> None:
    if os.path.lexists(model.path / TRUTH_NAME):
        raise BadInput(
            f"{model.path} already has a fault planted in it",
            hint="plant into the original; range_and_mantissa is the combination with a known truth",
        )
    if model.already_fp8 is not None:
        raise BadInput(
            f"{model.path} carries KV-cache scales, which a fault would make wrong",
            hint="plant into the checkpoint that it was made from",
        )


def _checked_strength(fault: Fault, strength: float | None) -> float:
    allowed = fault.strength
    if allowed is None:
        if strength is not None:
            raise BadInput(f"{fault.name} has no strength", hint="leave --strength out")
        return 0.0
    if strength is None:
        return allowed.default
    whole = allowed.unit != "octaves" or strength % 1 == 0
    if not (allowed.low <= strength <= allowed.high and whole):
        number = "a whole number" if allowed.unit == "octaves" else "a number"
        raise BadInput(
            f"{fault.name} cannot be planted with strength {strength:g}",
            hint=f"give {number} from {allowed.low:g} to {allowed.high:g} {allowed.unit}",
        )
    return strength


def _check_place(fault: Fault, spec: CacheSpec, layer: int | None, head: int | None) -> None:
    if layer is not None and not fault.takes_layer:
        raise BadInput(f"{fault.name} is not planted in a layer", hint="leave --layer out")
    if head is not None and not fault.takes_head:
        raise BadInput(f"{fault.name} is planted in whole layers", hint="leave --head out")
    if layer is not None and not 0 <= layer < spec.num_layers:
        raise BadInput(f"there is no layer {layer}", hint=f"the model has layers 0 to {spec.num_layers - 1}")
    num_kv_heads = min(each.num_kv_heads for each in spec.layers)
    if head is not None and not 0 <= head < num_kv_heads:
        raise BadInput(f"there is no KV head {head}", hint=f"the model has KV heads 0 to {num_kv_heads - 1}")


def _check_qk_norm(site: _Site, layer_idx: int) -> None:
    if not site.weights.has(layer_idx, "k_norm.weight"):
        return
    if site.family.gain_plus_one:
        raise UnsupportedFault(
            f"K of a {site.family.model_type} model passes a norm that multiplies by 1 + w, and no BF16 w "
            "gives exactly 2^s times that",
            hint="plant v_underflow or layer_off_range instead, or use a model without QK-norm",
        )
    if site.head is not None:
        raise UnsupportedFault(
            "K of this model passes a norm whose gain all its heads share, so that one head cannot be shifted alone",
            hint="leave --head out",
        )


# --- writing ----------------------------------------------------------------------------


def _write(model: ModelFolder, weights: AttentionWeights, change: _Change, planted: Planted, out: Path) -> None:
    placed = _placed(weights, change)
    touched = {shard for name, shard in placed.items() if name in change.edits}
    with new_folder(out) as scratch:
        for entry in sorted(os.listdir(model.path)):
            source = followed(model.path, entry) if not entry.startswith(".") else None
            if source is None or not source.is_file():
                continue
            if entry in touched:
                write_shard(scratch / entry, _tensors(weights, change.edits, placed, entry), {"format": "pt"})
            elif entry == "config.json" and change.biases:
                write_atomic(scratch / entry, encode_object(_with_biases(model.config)))
            elif entry == INDEX_NAME and touched:
                write_atomic(scratch / entry, encode_object(_index(weights, change.edits, placed)))
            else:
                link_or_copy(source, scratch / entry)
        truth = asdict(planted) | {"base_fingerprint": model.fingerprint}
        write_atomic(scratch / TRUTH_NAME, encode_object(truth))


def _placed(weights: AttentionWeights, change: _Change) -> dict[str, str]:
    """Tensor → file of the new checkpoint. New biases all go into one file that is written anyway."""
    weight_map = weights.model.weight_map
    new = [name for name in change.edits if name not in weight_map]
    if not new:
        return weight_map
    return weight_map | dict.fromkeys(new, weight_map[weights.name(min(change.layers), "v_proj.weight")])


def _tensors(weights: AttentionWeights, edits: Edits, placed: Mapping[str, str], shard: str) -> dict[str, RawTensor]:
    """Every tensor of `shard`, those that the index leaves out included."""
    header = weights.headers[shard]
    file = followed(weights.model.path, shard)
    kept = {name: read_raw(file, header, name) for name in header.tensors if name not in edits}
    return kept | {name: tensor for name, tensor in edits.items() if placed[name] == shard}


def _with_biases(config: Mapping[str, object]) -> dict[str, object]:
    text = config.get("text_config")
    if isinstance(text, dict):
        return {**config, "text_config": text | {"attention_bias": True}}
    return {**config, "attention_bias": True}


def _index(weights: AttentionWeights, edits: Edits, placed: Mapping[str, str]) -> dict[str, object]:
    def size(name: str) -> int:
        if name in edits:
            return edits[name].data.nbytes
        entry = weights.headers[placed[name]].tensors[name]
        return entry.elements * ITEM_BYTES[entry.dtype]

    return {"metadata": {"total_size": sum(map(size, placed))}, "weight_map": dict(sorted(placed.items()))}
