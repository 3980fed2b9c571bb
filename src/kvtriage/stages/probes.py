"""What is probed: FP8, or the bound, in one part of the cache and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from kvtriage.engines.base import Arm
from kvtriage.kvcache.policy import CachePolicy, Fp8, Mantissa, Scaling
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.values import scale_set, sub_octaves

__all__ = ["MANTISSA", "UNIT", "Probe", "design_probes", "probe_arm"]

UNIT = f"fp8:{Scaling.UNIT}"
MANTISSA = "mantissa"


@dataclass(frozen=True)
class Probe:
    """FP8, or the bound, in some `layers` (or one `head`) alone. `scope`: 'layer', 'head' or 'type'."""

    scope: str
    format: str
    layers: tuple[int, ...]
    head: int | None = None

    @property
    def first(self) -> int:
        return min(self.layers)


def design_probes(spec: CacheSpec, finest: Scaling) -> list[Probe]:
    """FP8 at scale 1, at the `finest` scales the server takes, and the bound; heads at scale 1."""
    formats = (UNIT, f"fp8:{finest}", MANTISSA)
    everything = tuple(range(spec.num_layers))
    types = [everything]
    if spec.is_hybrid:
        types += [spec.layers_of(kind) for kind in spec.kinds]
    probes = [Probe("type", fmt, layers) for layers in types for fmt in formats]
    for layer in spec.layers:
        own = (layer.layer_idx,)
        probes += [Probe("layer", fmt, own) for fmt in formats]
        if layer.num_kv_heads > 1:
            probes += [Probe("head", UNIT, own, head) for head in range(layer.num_kv_heads)]
    return probes


def probe_arm(probe: Probe, spec: CacheSpec, scales: ScaleRecord) -> Arm:
    """The arm of one probe; its name tells it from all others."""
    heads = None if probe.head is None else (probe.head,)
    scaling = None if probe.format == MANTISSA else Scaling(probe.format.removeprefix("fp8:"))
    fmt = Mantissa(heads) if scaling is None else Fp8(scaling, heads)
    return Arm(
        name=f"probe {probe.scope} {probe.format} {probe.layers} {probe.head}",
        policy=CachePolicy.only(spec.num_layers, probe.layers, fmt),
        scales=None if scaling in (None, Scaling.UNIT) else scale_set(scales, scaling),
        bound=sub_octaves(scales),
    )
