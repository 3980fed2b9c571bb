"""How each layer's K and V are stored. Arms, probes, prices and server flags derive from this.

A format is one of three things:

    Native            the model's own dtype, two bytes per element
    Fp8(scaling)      E4M3 bytes, real value = stored × scale
    Mantissa          a probe and never a product: E4M3's 3-bit mantissa with an unlimited
                      exponent: about what an ideal scale would still lose.

`Fp8` and `Mantissa` may be narrowed to some KV heads of a layer; the others stay native.
That too is for probes: no engine stores half a layer in FP8.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["CachePolicy", "Format", "Fp8", "Mantissa", "Native", "Scaling"]


class Scaling(enum.StrEnum):
    """Where the scale of an FP8 layer comes from.

    UNIT        scale 1 for every tensor, nothing calibrated
    PER_TENSOR  one scale for K and one for V of the layer:      [1]
    PER_HEAD    one scale for each KV head of K and of V:        [Hkv]
    """

    UNIT = "unit"
    PER_TENSOR = "per_tensor"
    PER_HEAD = "per_head"


@dataclass(frozen=True)
class Native:
    """The model's own dtype (BF16): two bytes per element."""


@dataclass(frozen=True)
class Fp8:
    """E4M3 bytes under `scaling`; `heads` narrows a probe to some KV heads."""

    scaling: Scaling
    heads: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Mantissa:
    """The scale-free bound; `heads` narrows a probe to some KV heads."""

    heads: tuple[int, ...] | None = None


Format = Native | Fp8 | Mantissa


@dataclass(frozen=True)
class CachePolicy:
    """One format per layer, L in all."""

    formats: tuple[Format, ...]

    @classmethod
    def native(cls, num_layers: int) -> CachePolicy:
        """Every layer in the model's dtype."""
        return cls((Native(),) * num_layers)

    @classmethod
    def fp8(cls, num_layers: int, scaling: Scaling, skip: Iterable[int] = ()) -> CachePolicy:
        """Every layer in FP8 but those in `skip`. Raises IndexError for a layer beyond L."""
        return cls.uniform(num_layers, Fp8(scaling), skip)

    @classmethod
    def uniform(cls, num_layers: int, fmt: Format, skip: Iterable[int] = ()) -> CachePolicy:
        """`fmt` everywhere but in the `skip` layers, which stay native."""
        formats: list[Format] = [fmt] * num_layers
        for layer_idx in skip:
            formats[_checked(layer_idx, num_layers)] = Native()
        return cls(tuple(formats))

    @classmethod
    def only(cls, num_layers: int, layers: Iterable[int], fmt: Format) -> CachePolicy:
        """`fmt` in `layers` alone, everything else native: a probe."""
        formats: list[Format] = [Native()] * num_layers
        for layer_idx in layers:
            formats[_checked(layer_idx, num_layers)] = fmt
        return cls(tuple(formats))

    @property
    def num_layers(self) -> int:
        return len(self.formats)

    @property
    def skip_layers(self) -> tuple[int, ...]:
        """Layers kept in the model's dtype, ascending."""
        return tuple(i for i, fmt in enumerate(self.formats) if isinstance(fmt, Native))

    @property
    def is_native(self) -> bool:
        return all(isinstance(fmt, Native) for fmt in self.formats)

    @property
    def scaling(self) -> Scaling | None:
        """The scaling that all FP8 layers share; None when there is none or more than one."""
        found = {fmt.scaling for fmt in self.formats if isinstance(fmt, Fp8)}
        return found.pop() if len(found) == 1 else None

    @property
    def first_quantized_layer(self) -> int:
        """Index of the first layer that is not native; L when there is none."""
        for i, fmt in enumerate(self.formats):
            if not isinstance(fmt, Native):
                return i
        return len(self.formats)

    def encode(self) -> tuple[str, ...]:
        """One word per layer, for JSON: 'native', 'fp8:per_head', 'mantissa', 'fp8:unit@0,2'."""
        return tuple(_encode(fmt) for fmt in self.formats)

    @classmethod
    def decode(cls, words: Iterable[str]) -> CachePolicy:
        """The inverse of `encode`. Raises ValueError on an unknown word."""
        return cls(tuple(_decode(word) for word in words))


def _checked(layer_idx: int, num_layers: int) -> int:
    if not 0 <= layer_idx < num_layers:
        raise IndexError(f"layer {layer_idx} does not exist: the model has layers 0 to {num_layers - 1}")
    return layer_idx


def _encode(fmt: Format) -> str:
    match fmt:
        case Native():
            return "native"
        case Fp8(scaling, heads):
            return f"fp8:{scaling}" + _encode_heads(heads)
        case Mantissa(heads):
            return "mantissa" + _encode_heads(heads)


def _encode_heads(heads: tuple[int, ...] | None) -> str:
    return "" if heads is None else "@" + ",".join(map(str, heads))


def _decode(word: str) -> Format:
    name, at, tail = word.partition("@")
    heads = tuple(int(head) for head in tail.split(",")) if at else None
    if name == "native" and heads is None:
        return Native()
    if name == "mantissa":
        return Mantissa(heads)
    if name.startswith("fp8:"):
        return Fp8(Scaling(name.removeprefix("fp8:")), heads)
    raise ValueError(f"{word!r} is not a storage format")
