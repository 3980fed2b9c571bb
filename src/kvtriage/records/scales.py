"""scales.json: the scales, and how they do on text that they were not calibrated on."""

from __future__ import annotations

from kvtriage.records.form import Part, Record

__all__ = ["HeldOutRow", "LayerScalesRecord", "ScaleRecord", "SweepRow"]


class LayerScalesRecord(Part, frozen=True):
    """Scales of one layer: real = stored × scale, float32. q [H], k and v [Hkv], or [1]."""

    layer_idx: int
    q: tuple[float, ...]
    k: tuple[float, ...]
    v: tuple[float, ...]


class HeldOutRow(Part, frozen=True):
    """Shares of the held-out K or V elements of one head, under one scaling."""

    scaling: str
    layer_idx: int
    tensor: str
    head: int
    saturated: float
    below_normal: float
    amax: float


class SweepRow(Part, frozen=True):
    """Largest |K| or |V| of one layer by position: edges[i] ≤ position < edges[i+1]."""

    layer_idx: int
    tensor: str
    amax: tuple[float, ...]


class ScaleRecord(Record, frozen=True):
    """scales.json: both scale sets, what was seen, and how they do on text not calibrated on."""

    per_tensor: tuple[LayerScalesRecord, ...]
    per_head: tuple[LayerScalesRecord, ...]
    sub_octave_k: tuple[tuple[float, ...], ...]
    """Best sub-octave position of each KV head for the scale-free bound: [L][Hkv]."""
    sub_octave_v: tuple[tuple[float, ...], ...]
    calibration_items: tuple[str, ...]
    calibration_tokens: int
    held_out: tuple[HeldOutRow, ...]
    position_edges: tuple[int, ...]
    sweep: tuple[SweepRow, ...]
    peak_bytes: int
    warnings: tuple[str, ...]
    compute_dtype: str = "float32"
    """What the model was computed in while Q, K and V were observed."""
