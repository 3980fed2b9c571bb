"""All probes for a quarter of what they would cost one by one: screen everything, then measure what matters.

The price is counted in layers times tokens. Naively, BF16 and each of P probes are a whole pass: (P + 1) L T.
The screen estimates every probe that acts in one layer. What is left of a quarter is spent on exact
probes, most wanted first: the whole model and each attention type at scale 1, then in turn the layers and
heads with the largest estimates and a few layers spread over the depth. The exact ones also tell by how much
the screen falls short at which depth, and the estimates that stay are corrected by that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from statistics import fmean

import numpy as np

from kvtriage.engines.base import Treatments
from kvtriage.fp8.anatomy import Anatomy
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import ProbeCost, ProbeRow
from kvtriage.records.values import scale_set, sub_octaves
from kvtriage.stages.probe_runs import ProbeRuns
from kvtriage.stages.probes import UNIT, Probe, probe_arm

__all__ = ["Measured", "cost_probes", "measure_probes"]

_SHARE = 4
"""The exact probes may use up what the screen leaves of this part of the naive price."""
_REPAIRED = 2.0
"""A layer that scales repair by more than this factor is measured under them too."""
_SPREAD = 4
"""Layers, spread over the depth, that are measured to correct the screen by."""


@dataclass(frozen=True)
class Measured:
    """A row for each probe, what it took, and the anatomy where the engine shows one."""

    rows: Mapping[Probe, ProbeRow]
    cost: ProbeCost
    anatomy: Anatomy | None


def measure_probes(
    spec: CacheSpec, probes: Sequence[Probe], scales: ScaleRecord, runs: ProbeRuns, *, exactly: bool
) -> Measured:
    """Every probe on every request of `runs`; `exactly`: without estimates, and at their price. Raises NonFinite."""
    tokens, layers = sum(len(request.token_ids) for request in runs.requests), spec.num_layers
    naive = (len(probes) + 1) * layers * tokens
    arms = {probe: probe_arm(probe, spec, scales) for probe in probes}
    screening = runs.screen([] if exactly else list(arms.values()), _treatments(scales))
    if screening is None:
        rows = _exact_rows(runs.probe(arms, "probing layers and heads"))
        return Measured(rows, ProbeCost(evaluated=naive, naive=naive, screened=0, exact=len(probes)), None)
    if exactly:
        rows = _exact_rows(runs.probe(arms, "probing layers and heads"))
        spent = screening.evaluated + _price(probes, layers) * tokens
        return Measured(rows, ProbeCost(evaluated=spent, naive=naive, screened=0, exact=len(probes)), screening.anatomy)
    estimates = dict(zip(probes, screening.damage, strict=True))
    # The exact probes begin with a native pass of their own.
    left = naive // _SHARE - screening.evaluated - layers * tokens
    chosen = _affordable(_wanted(estimates, spec), left // tokens, layers)
    exact = {probe: arm for probe, arm in arms.items() if probe in chosen}
    found = runs.probe(exact, "probing what stands out")
    spent = screening.evaluated + _price(exact, layers) * tokens
    factors = _factors(estimates, found)
    return Measured(
        rows={
            probe: _row(probe, found[probe], exact=True)
            if probe in found
            else _row(probe, [factors[probe] * kl for kl in estimate], exact=False)
            for probe, estimate in estimates.items()
        },
        cost=ProbeCost(evaluated=spent, naive=naive, screened=len(probes) - len(exact), exact=len(exact)),
        anatomy=screening.anatomy,
    )


def cost_probes(spec: CacheSpec, probes: Sequence[Probe], tokens: int, *, screens: bool, exactly: bool) -> int:
    """Tokens of whole passes that `measure_probes` comes to on `tokens` of requests, at most.

    screens: whether the engine does. One that does not runs a whole pass for each probe.
    """
    naive = (len(probes) + 1) * tokens
    if not screens:
        return naive
    if exactly:
        return -(-(spec.num_layers + _price(probes, spec.num_layers)) * tokens // spec.num_layers)
    return naive // _SHARE


def _price(exact: Collection[Probe], layers: int) -> int:
    """Of a native pass and these probes, each from its first layer on; in layers, for each token."""
    return layers + sum(layers - probe.first for probe in exact) if exact else 0


def _exact_rows(found: Mapping[Probe, Sequence[float]]) -> dict[Probe, ProbeRow]:
    return {probe: _row(probe, kl, exact=True) for probe, kl in found.items()}


def _treatments(scales: ScaleRecord) -> Treatments:
    sets = (scale_set(scales, Scaling.PER_TENSOR), scale_set(scales, Scaling.PER_HEAD))
    return Treatments(sets, sub_octaves(scales))


def _row(probe: Probe, kl: Sequence[float], *, exact: bool) -> ProbeRow:
    return ProbeRow(format=probe.format, layers=probe.layers, head=probe.head, kl=tuple(kl), exact=exact)


def _wanted(estimates: Mapping[Probe, Sequence[float]], spec: CacheSpec) -> Iterator[Probe]:
    """Each probe once, the one whose exact value matters most first.

    A layer's shortfall is much the same in all formats, so one format of each is measured before a second of any.
    """
    damage = {probe: fmean(kl) for probe, kl in estimates.items()}
    worst_first = sorted(damage, key=lambda probe: -damage[probe])
    units = [probe for probe in worst_first if probe.scope == "layer" and probe.format == UNIT]
    least = {probe.first: probe for probe in worst_first if probe.scope == "layer"}
    repaired = sorted(least.values(), key=lambda probe: -damage[probe])
    unit_of = {probe.first: probe for probe in units}
    spread = {spec.num_layers * step // _SPREAD for step in range(_SPREAD)}
    queues = (
        units,
        [p if damage[unit_of[p.first]] > _REPAIRED * damage[p] else unit_of[p.first] for p in repaired],
        [probe for probe in units if probe.first in spread],
        [probe for probe in worst_first if probe.scope == "head"],
    )
    types = [probe for probe in damage if probe.scope == "type"]
    in_turn = chain.from_iterable(zip_longest(*queues))
    ordered = chain((probe for probe in types if probe.format == UNIT), in_turn, repaired, types, worst_first)
    yield from dict.fromkeys(probe for probe in ordered if probe is not None)


def _affordable(wanted: Iterator[Probe], budget: int, layers: int) -> set[Probe]:
    """What fits into `budget`, in layers: an exact probe runs from its first layer on."""
    chosen: set[Probe] = set()
    for probe in wanted:
        price = layers - probe.first
        if price <= budget:
            chosen.add(probe)
            budget -= price
    return chosen


def _factors(
    estimates: Mapping[Probe, Sequence[float]], found: Mapping[Probe, Sequence[float]]
) -> Mapping[Probe, float]:
    """Exact over estimated damage, for every probe: as measured on the same layers, or by the line through depth."""
    shortfall = {
        probe: float(np.log(fmean(exact) / fmean(estimates[probe])))
        for probe, exact in found.items()
        if fmean(exact) > 0 and fmean(estimates[probe]) > 0
    }
    by_layers: dict[tuple[tuple[int, ...], int | None], list[float]] = {}
    for probe, value in shortfall.items():
        by_layers.setdefault((probe.layers, probe.head), []).append(value)
    line = _depth_line([(probe.first, value) for probe, value in shortfall.items() if probe.scope != "type"])
    return {
        probe: float(np.exp(fmean(by_layers.get((probe.layers, probe.head), [line(probe.first)]))))
        for probe in estimates
    }


def _depth_line(values: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """The least-squares line through (layer, value), held between the least and the largest; 0 without any."""
    if not values:
        return lambda layer_idx: 0.0
    at, seen = np.array(values, dtype=np.float64).T
    spread = float(((at - at.mean()) ** 2).sum())
    slope = float(((at - at.mean()) * (seen - seen.mean())).sum()) / spread if spread > 0 else 0.0
    return lambda layer_idx: float(np.clip(seen.mean() + slope * (layer_idx - at.mean()), seen.min(), seen.max()))
