"""What `diagnose` measured, line by line: probes.jsonl.

    screen    one probe item: the estimate of every probe, and the anatomy of the same pass
    probe     one probe on one item, measured exactly

The anatomy is kept to the bit, so that one that goes on sums up to what one that was never stopped does.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import numpy as np

from kvtriage.fp8.anatomy import Anatomy, LayerAnatomy, OperandError
from kvtriage.fp8.magnitudes import Floats, Magnitudes
from kvtriage.records.form import Part

__all__ = [
    "PackedAnatomy",
    "PackedArray",
    "PackedLayer",
    "PackedOperand",
    "ProbeLine",
    "ProbeTrial",
    "ScreenTrial",
    "pack_anatomy",
    "unpack_anatomy",
]

_DOUBLE = np.dtype("<f8")


class PackedArray(Part, frozen=True):
    """Little-endian doubles, deflated."""

    shape: tuple[int, ...]
    deflated: bytes


class PackedOperand(Part, frozen=True):
    operand: str
    treatment: str
    signal: PackedArray
    cache: PackedArray
    output: PackedArray


class PackedLayer(Part, frozen=True):
    output_signal: PackedArray
    operands: tuple[PackedOperand, ...]
    magnitudes: dict[str, PackedArray]


class PackedAnatomy(Part, frozen=True):
    """See fp8.anatomy.Anatomy."""

    layers: tuple[PackedLayer, ...]
    tokens: int


class ProbeTrial(Part, frozen=True, tag="probe"):
    """`scope`, `format`, `layers` and `head` name the probe; KL is the mean from native, nats per token."""

    scope: str
    format: str
    layers: tuple[int, ...]
    head: int | None
    item_id: str
    kl: float
    conditions: str


class ScreenTrial(Part, frozen=True, tag="screen"):
    item_id: str
    kl: tuple[float, ...]
    """Of every probe, in the order they are designed in; () where all are measured and none is estimated."""
    evaluated: int
    """Layers times tokens that were computed."""
    anatomy: PackedAnatomy
    conditions: str


ProbeLine = ProbeTrial | ScreenTrial
"""A line of probes.jsonl."""


def pack_anatomy(anatomy: Anatomy) -> PackedAnatomy:
    return PackedAnatomy(layers=tuple(map(_pack_layer, anatomy.layers)), tokens=anatomy.tokens)


def unpack_anatomy(packed: PackedAnatomy) -> Anatomy:
    """The very same numbers. Raises ValueError for arrays that do not hold what they say."""
    return Anatomy(tuple(map(_unpack_layer, packed.layers)), packed.tokens)


def _pack_layer(layer: LayerAnatomy) -> PackedLayer:
    return PackedLayer(
        output_signal=_pack(layer.output_signal),
        operands=tuple(
            PackedOperand(
                operand=operand,
                treatment=treatment,
                signal=_pack(error.signal),
                cache=_pack(error.cache),
                output=_pack(error.output),
            )
            for (operand, treatment), error in layer.operands.items()
        ),
        magnitudes={tensor: _pack(held.moments) for tensor, held in layer.magnitudes.items()},
    )


def _unpack_layer(layer: PackedLayer) -> LayerAnatomy:
    operands: Mapping[tuple[str, str], OperandError] = {
        (error.operand, error.treatment): OperandError(
            _unpack(error.signal), _unpack(error.cache), _unpack(error.output)
        )
        for error in layer.operands
    }
    magnitudes = {tensor: Magnitudes(_unpack(moments)) for tensor, moments in layer.magnitudes.items()}
    return LayerAnatomy(_unpack(layer.output_signal), operands, magnitudes)


def _pack(values: Floats) -> PackedArray:
    return PackedArray(shape=values.shape, deflated=zlib.compress(values.astype(_DOUBLE).tobytes()))


def _unpack(packed: PackedArray) -> Floats:
    """No more is inflated than the shape has room for."""
    size = _DOUBLE.itemsize * math.prod(packed.shape)
    if min(packed.shape, default=1) < 1:
        raise ValueError(f"an array of shape {packed.shape}")
    try:
        held = zlib.decompressobj().decompress(packed.deflated, size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(held) != size:
        raise ValueError(f"{len(held)} bytes or more in an array of {size}")
    return np.frombuffer(held, _DOUBLE).astype(np.float64).reshape(packed.shape)
