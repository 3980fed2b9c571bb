"""From a fault to the edits that plant it: where, how much, and what is then true."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvtriage.checkpoints.attention_weights import AttentionWeights
from kvtriage.checkpoints.faults.edits import Edits, offset_v, shift_k, shift_v
from kvtriage.checkpoints.faults.family import Family, UnsupportedFault
from kvtriage.checkpoints.faults.v_estimate import v_rms
from kvtriage.kvcache.policy import Scaling

__all__ = ["PLANTERS", "Change", "Site"]


@dataclass(frozen=True)
class Site:
    """Where a fault is wanted. `layer` and `head` are None for the default."""

    weights: AttentionWeights
    family: Family
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
class Change:
    edits: Edits
    layers: frozenset[int] = frozenset()
    skip_layers: frozenset[int] = frozenset()
    scaling: Scaling = Scaling.UNIT
    head: int | None = None
    biases: bool = False


def _plant_none(site: Site) -> Change:
    return Change({})


def _plant_v_underflow(site: Site) -> Change:
    edits: Edits = {}
    for layer_idx in site.some_layers():
        edits |= shift_v(site.weights, layer_idx, site.heads(layer_idx), -site.octaves)
    return Change(edits, frozenset(site.some_layers()), scaling=Scaling.PER_TENSOR, head=site.head)


def _plant_k_overflow(site: Site) -> Change:
    edits: Edits = {}
    for layer_idx in site.some_layers():
        _check_qk_norm(site, layer_idx)
        edits |= shift_k(site.weights, layer_idx, site.heads(layer_idx), site.octaves)
    return Change(edits, frozenset(site.some_layers()), scaling=Scaling.PER_TENSOR, head=site.head)


def _plant_head_spread(site: Site) -> Change:
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
    return Change(edits, frozenset(site.some_layers()), scaling=Scaling.PER_HEAD, head=head)


def _plant_layer_off_range(site: Site) -> Change:
    layer_idx = site.one_layer()
    heads = site.heads(layer_idx)
    edits = shift_v(site.weights, layer_idx, heads, -site.octaves)
    if not site.weights.has(layer_idx, "k_norm.weight"):
        edits |= shift_k(site.weights, layer_idx, heads, site.octaves)
    return Change(edits, frozenset({layer_idx}), scaling=Scaling.PER_TENSOR)


def _plant_v_offset(site: Site) -> Change:
    return _offsets(site, frozenset({site.one_layer()}))


def _plant_v_offset_type(site: Site) -> Change:
    spec = site.weights.spec
    if not spec.is_hybrid:
        raise UnsupportedFault(
            "all layers of this model have the same attention type, so that skipping the type would skip them all",
            hint="plant v_offset in one layer, or use a model with sliding and full layers",
        )
    windowed = [layer.layer_idx for layer in spec.layers if layer.window_tokens is not None]
    wanted = spec.layers[windowed[0] if site.layer is None else site.layer].kind
    return _offsets(site, frozenset(spec.layers_of(wanted)))


def _plant_range_and_mantissa(site: Site) -> Change:
    offset_layer = site.one_layer()
    if site.num_layers < 2:
        raise UnsupportedFault("this model has one layer, and the fault needs two", hint="plant v_offset instead")
    upper = 2 * site.num_layers // 3
    range_layer = upper if upper != offset_layer else 0
    every_head = range(site.weights.layer(range_layer).num_kv_heads)
    offset = _offsets(site, frozenset({offset_layer}))
    return Change(
        shift_v(site.weights, range_layer, every_head, -_RANGE_OCTAVES) | offset.edits,
        frozenset({range_layer, offset_layer}),
        skip_layers=offset.skip_layers,
        scaling=Scaling.PER_TENSOR,
        biases=True,
    )


_RANGE_OCTAVES = 12

PLANTERS: Mapping[str, Callable[[Site], Change]] = MappingProxyType(
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


def _offsets(site: Site, layers: frozenset[int]) -> Change:
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
    return Change(offset_v(site.weights, offsets), layers, skip_layers=layers, head=site.head, biases=True)


def _check_qk_norm(site: Site, layer_idx: int) -> None:
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
