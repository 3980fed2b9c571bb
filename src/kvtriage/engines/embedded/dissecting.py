"""The anatomy of one layer's error: what each operand's rounding does to the cache and to the output.

Axes: n heads of an operand, T tokens, S scored positions, the last ones, D dimensions, H query heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvtriage.engines.base import Treatments
from kvtriage.engines.embedded.attention import P_OFFSET, AttentionCall, attend, round_probabilities
from kvtriage.engines.embedded.codec import round_mantissa, to_e4m3
from kvtriage.engines.embedded.sums import row_sums
from kvtriage.fp8.anatomy import LayerAnatomy, OperandError
from kvtriage.fp8.e4m3 import SATURATES_ABOVE, SMALLEST_NORMAL
from kvtriage.fp8.magnitudes import BINS, BINS_PER_OCTAVE, LOWEST_OCTAVE, Floats, Magnitudes
from kvtriage.kvcache.policy import Scaling

__all__ = ["dissect"]


@dataclass(frozen=True, eq=False)
class _Rounded:
    """An operand after rounding, and how each element erred; values [n, T, D]."""

    exact: Tensor
    stored: Tensor
    saturated: Tensor
    flushed: Tensor
    subnormal: Tensor

    def parts(self) -> Floats:
        """Squared error by magnitudes.PARTS: [n, 4]."""
        error = (self.stored - self.exact).double().square()
        masks = (self.saturated, self.flushed, self.subnormal)
        parts = [_sums(error * mask) for mask in masks]
        return np.stack([*parts, _sums(error) - sum(parts)], axis=1).clip(min=0.0)

    def only(self, part: str) -> Tensor | None:
        """The operand with only those elements rounded that err in one of OUTPUT_PARTS' ways; None where none do."""
        underflow = self.flushed | self.subnormal
        masks = {"saturated": self.saturated, "underflow": underflow, "mantissa": ~(underflow | self.saturated)}
        mask = masks[part] & (self.stored != self.exact)
        return torch.where(mask, self.stored, self.exact) if bool(mask.any()) else None


def dissect(call: AttentionCall, scored: int, treatments: Treatments) -> LayerAnatomy:
    """One layer of one sequence, its Q, K and V exact; the output is looked at in the last `scored` positions."""
    call = replace(call, query=call.query[:, :, -scored:])
    exact = attend(call)
    operands: dict[tuple[str, str], OperandError] = {}
    for treatment, operand, rounded in _roundings(call, treatments):
        outputs = [rounded.stored, *(rounded.only(part) for part in ("saturated", "underflow", "mantissa"))]
        operands[operand, treatment] = OperandError(
            signal=_sums(rounded.exact.double().square()),
            cache=rounded.parts(),
            output=np.stack([_output_error(call, operand, values, exact) for values in outputs], axis=1),
        )
    operands["p", Scaling.UNIT] = _probabilities(call, exact)
    return LayerAnatomy(
        output_signal=_sums(exact[0].double().square()),
        operands=operands,
        magnitudes={"k": _magnitudes(call.key[0]), "v": _magnitudes(call.value[0])},
    )


def _roundings(call: AttentionCall, treatments: Treatments) -> Iterator[tuple[str, str, _Rounded]]:
    """(treatment, operand, rounded): scale 1, each scale set, and the bound of K and V."""
    operands = {"q": call.query[0], "k": call.key[0], "v": call.value[0]}
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    for operand, values in operands.items():
        yield Scaling.UNIT, operand, _round_e4m3(values, values.new_ones(values.shape[0]))
    for scales in treatments.scales:
        layer = scales.layers[call.layer_idx]
        for operand, numbers in (("q", layer.q), ("k", layer.k), ("v", layer.v)):
            scale = operands[operand].new_tensor(numbers)
            if operand == "q" and len(numbers) == heads:
                scale = scale.view(kv_heads, -1).amax(dim=1).repeat_interleave(heads // kv_heads)
            yield scales.scaling, operand, _round_e4m3(operands[operand], scale)
    for operand, positions in (("k", treatments.bound.k), ("v", treatments.bound.v)):
        values = operands[operand]
        stored = round_mantissa(values, values.new_tensor(positions[call.layer_idx]).view(-1, 1, 1))
        none = torch.zeros_like(values, dtype=torch.bool)
        yield "mantissa", operand, _Rounded(values, stored, none, none, none)


def _round_e4m3(values: Tensor, scale: Tensor) -> _Rounded:
    """values [n, T, D]; scale [n] or [1]."""
    at = scale.view(-1, 1, 1)
    scaled = values / at
    code = to_e4m3(scaled).to(torch.float32)
    magnitude = scaled.abs()
    flushed = (code == 0) & (values != 0)
    return _Rounded(values, code * at, magnitude > SATURATES_ABOVE, flushed, (magnitude < SMALLEST_NORMAL) & ~flushed)


def _output_error(call: AttentionCall, operand: str, values: Tensor | None, exact: Tensor) -> Floats:
    """Squared error of the output with `values` for one operand: [H]; 0 where nothing was rounded."""
    if values is None:
        return np.zeros(exact.shape[1])
    match operand:
        case "q":
            changed = replace(call, query=values[None])
        case "k":
            changed = replace(call, key=values[None])
        case _:
            changed = replace(call, value=values[None])
    return _sums((attend(changed) - exact)[0].double().square())


def _probabilities(call: AttentionCall, exact: Tensor) -> OperandError:
    """P as FlashAttention rounds it: it cannot saturate."""
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    every = torch.ones(kv_heads, dtype=torch.bool, device=call.key.device)
    sums = np.zeros((5, heads))

    def round_whole(probabilities: Tensor) -> Tensor:
        stored = round_probabilities(probabilities)
        error, low = (stored - probabilities).double().square(), _is_low(probabilities)
        flushed = low & (stored == 0)
        parts = (error * flushed, error * (low & ~flushed), error * ~low, probabilities.double().square())
        sums[1:] += np.stack([part.sum(dim=(0, 3, 4)).flatten().cpu().numpy() for part in parts])
        return stored

    def round_low(probabilities: Tensor) -> Tensor:
        return torch.where(_is_low(probabilities), round_probabilities(probabilities), probabilities)

    def round_normal(probabilities: Tensor) -> Tensor:
        return torch.where(_is_low(probabilities), probabilities, round_probabilities(probabilities))

    whole, low, normal = (
        _sums((attend(call, every, rounding) - exact)[0].double().square())
        for rounding in (round_whole, round_low, round_normal)
    )
    return OperandError(
        signal=sums[4],
        cache=sums[:4].T.copy(),
        output=np.stack([whole, np.zeros(heads), low, normal], axis=1),
    )


def _is_low(probabilities: Tensor) -> Tensor:
    """Below E4M3's normal range once scaled by 2^8."""
    return probabilities * P_OFFSET < SMALLEST_NORMAL


def _magnitudes(values: Tensor) -> Magnitudes:
    """[n, T, D] by sixteenths of an octave."""
    heads = values.shape[0]
    size = values.abs().double().reshape(heads, -1)
    bins = ((size.log2() - LOWEST_OCTAVE) * BINS_PER_OCTAVE).floor().clamp(0, BINS - 1).long()
    bins += BINS * torch.arange(heads, device=values.device)[:, None]
    weights = ((size > 0).double(), size, size.square())
    moments = [torch.bincount(bins.flatten(), weight.flatten(), heads * BINS) for weight in weights]
    return Magnitudes(np.stack([found.view(heads, BINS).cpu().numpy() for found in moments], axis=1))


def _sums(values: Tensor) -> Floats:
    """[n, ...] → [n]."""
    return np.asarray(row_sums(values).cpu().numpy())
