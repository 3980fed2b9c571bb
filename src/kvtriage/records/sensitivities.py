"""sensitivities.json: where FP8 hurts, and what scales can repair of it."""

from __future__ import annotations

from kvtriage.records.form import Part, Record

__all__ = ["OperandRow", "ProbeCost", "ProbeRow", "RepairRow", "Sensitivities"]


class ProbeRow(Part, frozen=True):
    """Damage of one probe alone: `layers` (and `head`) in `format`, all else native."""

    format: str
    layers: tuple[int, ...]
    head: int | None
    kl: tuple[float, ...]
    """Mean KL from native of each probe item, nats per token."""
    exact: bool = True
    """False where it was screened: estimated at the scored positions, and corrected by what exact probes showed."""


class OperandRow(Part, frozen=True):
    """One operand of one layer quantised alone; n heads of the operand, H query heads.

    Squared errors are relative: of the cache to the operand's sum of squares, of the output to the output's.
    """

    layer_idx: int
    operand: str
    """'q', 'k', 'v', or 'p': the probabilities, which no scale reaches."""
    treatment: str
    """'unit', 'per_tensor', 'per_head', or 'mantissa': the scale-free bound, of k and v only."""
    sqnr_db: tuple[float | None, ...]
    """Signal over quantisation noise, decibels: [n]; None without noise or without signal."""
    saturated: tuple[float, ...]
    """Squared error of elements above E4M3's end: [n]. This and the next three add up to all of it."""
    flushed: tuple[float, ...]
    subnormal: tuple[float, ...]
    mantissa: tuple[float, ...]
    output: tuple[float, ...]
    """Squared error of the attention output at the scored positions: [H]."""
    output_saturated: tuple[float, ...]
    """The same when only the elements err that saturate: [H]. This and the next two need not add up to `output`."""
    output_underflow: tuple[float, ...]
    output_mantissa: tuple[float, ...]


class RepairRow(Part, frozen=True):
    """What one way of choosing scales is predicted to leave of the damage, and what a probe measured."""

    layer_idx: int | None
    """None: every layer in FP8 at once."""
    repair: str
    """'unit', 'per_tensor', 'per_head', 'per_head_percentile', 'per_head_least_error' or 'mantissa'."""
    predicted_kl: float
    """Nats per token."""
    measured_kl: float | None
    """None where this repair was not probed."""


class ProbeCost(Part, frozen=True):
    """What the probes cost, in layers times tokens; at most, since probes that begin alike share their beginning."""

    evaluated: int
    naive: int
    """One whole pass for BF16 and for each probe."""
    screened: int
    """Probes that were estimated only."""
    exact: int


class Sensitivities(Record, frozen=True):
    """sensitivities.json: where FP8 hurts, why, and the group suspected of it."""

    layer_probes: tuple[ProbeRow, ...]
    head_probes: tuple[ProbeRow, ...]
    type_probes: tuple[ProbeRow, ...]
    """`layers` is every layer of one attention type, or all of them."""
    suspects: tuple[int, ...]
    """The layers that the fourth arm keeps in BF16; never empty."""
    suspects_stand_out: bool
    """False when no layer stands out: the group is then only the most sensitive one."""
    explanation: str
    probe_items: tuple[str, ...]
    peak_bytes: int
    anatomy: tuple[OperandRow, ...] = ()
    """Empty from an engine that shows no attention outputs."""
    repairs: tuple[RepairRow, ...] = ()
    findings: tuple[str, ...] = ()
    """What scales can and cannot repair, in sentences."""
    cost: ProbeCost | None = None
