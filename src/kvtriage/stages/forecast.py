"""What each way of choosing scales would win back, foretold from one look at the text.

A layer's damage at scale 1 is known from its probe, and which head does how much of it from the heads'
probes. Another scale changes a head's share as it changes the error of that head's attention output:
the output errors that K and V cause at scale 1 are measured, and each changes with the squared error of
what is stored, which the histogram of magnitudes gives for any scale. Percentile and clip are fitted to
the probe texts themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import numpy as np

from kvtriage.fp8.anatomy import Anatomy, LayerAnatomy
from kvtriage.fp8.magnitudes import Floats
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerSpec
from kvtriage.records.scales import LayerScalesRecord, ScaleRecord
from kvtriage.records.sensitivities import OperandRow, ProbeRow, RepairRow
from kvtriage.stages.probes import MANTISSA, UNIT, Probe

__all__ = ["operand_rows", "repair_rows"]

_PERCENTILE = 0.9999

Rows = Mapping[Probe, ProbeRow]


def operand_rows(anatomy: Anatomy) -> Iterator[OperandRow]:
    """Every layer, operand and treatment, in relative squared errors."""
    for layer_idx, layer in enumerate(anatomy.layers):
        for (operand, treatment), found in layer.operands.items():
            cache, output = _relative(found.cache, found.signal), _relative(found.output, layer.output_signal)
            yield OperandRow(
                layer_idx=layer_idx,
                operand=operand,
                treatment=treatment,
                sqnr_db=tuple(round(float(db), 3) if np.isfinite(db) else None for db in found.sqnr_db),
                saturated=cache[0],
                flushed=cache[1],
                subnormal=cache[2],
                mantissa=cache[3],
                output=output[0],
                output_saturated=output[1],
                output_underflow=output[2],
                output_mantissa=output[3],
            )


def _relative(errors: Floats, signal: Floats) -> list[tuple[float, ...]]:
    """[n, parts] over [n] to [parts][n], six digits of each."""
    shares = np.divide(errors, signal[:, None], out=np.zeros_like(errors), where=signal[:, None] > 0)
    return [tuple(float(f"{share:.6g}") for share in part) for part in shares.T]


def repair_rows(
    anatomy: Anatomy, rows: Rows, spec: CacheSpec, scales: ScaleRecord, numerics: str
) -> Iterator[RepairRow]:
    """Every repair, of all layers at once (layer_idx None) and of each alone, beside what its probe measured."""
    shares: dict[str, list[float]] = {}
    for layer in spec.layers:
        for repair, share in _left(layer, anatomy.layers[layer.layer_idx], rows, scales, numerics).items():
            shares.setdefault(repair, []).append(share)
    unit = [fmean(rows[Probe("layer", UNIT, (layer.layer_idx,))].kl) for layer in spec.layers]
    everything = tuple(range(spec.num_layers))
    whole, added = fmean(rows[Probe("type", UNIT, everything)].kl), sum(unit)
    for repair, left in shares.items():
        alone = [kl * share for kl, share in zip(unit, left, strict=True)]
        joint = whole * sum(alone) / added if added > 0 else 0.0
        yield _repair_row(repair, None, joint, rows.get(Probe("type", _format(repair), everything)))
        for layer_idx, kl in enumerate(alone):
            yield _repair_row(repair, layer_idx, kl, rows.get(Probe("layer", _format(repair), (layer_idx,))))


def _format(repair: str) -> str:
    return MANTISSA if repair == MANTISSA else f"fp8:{repair}"


def _repair_row(repair: str, layer_idx: int | None, predicted: float, probe: ProbeRow | None) -> RepairRow:
    measured = fmean(probe.kl) if probe is not None and probe.exact else None
    return RepairRow(layer_idx=layer_idx, repair=repair, predicted_kl=predicted, measured_kl=measured)


def _left(layer: LayerSpec, anatomy: LayerAnatomy, rows: Rows, scales: ScaleRecord, numerics: str) -> dict[str, float]:
    """For each repair, the share of the layer's damage at scale 1 that is left."""
    weights = _head_weights(layer, rows)
    output = {operand: _by_kv_head(anatomy, layer, operand, Scaling.UNIT) for operand in ("q", "k", "v", "p")}
    quantised = ("q", "k", "v", "p") if numerics == "attention" else ("k", "v")
    whole = sum((output[operand] for operand in quantised), np.zeros(layer.num_kv_heads))
    found = {}
    for repair, stored in _stored_errors(layer, anatomy, scales).items():
        left = np.zeros(layer.num_kv_heads)
        for operand in quantised:
            match operand:
                case "p":
                    left += output["p"]
                case "q":
                    scaling = repair if repair in (Scaling.UNIT, Scaling.PER_TENSOR) else Scaling.PER_HEAD
                    left += _by_kv_head(anatomy, layer, "q", scaling)
                case _:
                    left += output[operand] * stored[operand]
        share = np.divide(left, whole, out=np.ones_like(left), where=whole > 0)
        found[repair] = float(weights @ share)
    return found


def _head_weights(layer: LayerSpec, rows: Rows) -> Floats:
    """Which part of the layer's damage each KV head does, summing to 1: [Hkv]."""
    own = (layer.layer_idx,)
    if layer.num_kv_heads == 1:
        return np.ones(1)
    damage = np.array([fmean(rows[Probe("head", UNIT, own, head)].kl) for head in range(layer.num_kv_heads)])
    return damage / damage.sum() if damage.sum() > 0 else np.full(len(damage), 1 / len(damage))


def _by_kv_head(anatomy: LayerAnatomy, layer: LayerSpec, operand: str, treatment: str) -> Floats:
    """Squared output error summed over the queries of each KV head: [Hkv]."""
    return np.asarray(anatomy.operands[operand, treatment].output[:, 0].reshape(layer.num_kv_heads, -1).sum(axis=1))


def _stored_errors(layer: LayerSpec, anatomy: LayerAnatomy, scales: ScaleRecord) -> dict[str, dict[str, Floats]]:
    """Squared error of K and V under each repair, over that at scale 1: repair → 'k' or 'v' → [Hkv]."""
    found: dict[str, dict[str, Floats]] = {}
    heads, index = layer.num_kv_heads, layer.layer_idx
    for tensor, held in anatomy.magnitudes.items():
        unit = held.squared_error(np.ones(heads)).sum(axis=1)
        chosen = {
            str(Scaling.UNIT): np.ones(heads),
            str(Scaling.PER_TENSOR): np.resize(_numbers(scales.per_tensor[index], tensor), heads),
            str(Scaling.PER_HEAD): np.resize(_numbers(scales.per_head[index], tensor), heads),
            "per_head_percentile": held.percentile_scale(_PERCENTILE),
            "per_head_least_error": held.least_error_scale(),
        }
        errors = {repair: held.squared_error(scale).sum(axis=1) for repair, scale in chosen.items()}
        errors[MANTISSA] = held.bound_error()
        for repair, error in errors.items():
            ratio = np.divide(error, unit, out=np.ones_like(error), where=unit > 0)
            found.setdefault(repair, {})[tensor] = ratio
    return found


def _numbers(row: LayerScalesRecord, tensor: str) -> Sequence[float]:
    return row.k if tensor == "k" else row.v
