"""diagnose: where FP8 hurts when it acts alone, and whether a scale could help there.

Every probe stores some layers (or one head) in FP8 and all else natively. Beside each FP8 probe
at scale 1 stand the finest scales that the server can apply, and the scale-free bound, E4M3's
mantissa with an unlimited exponent. The suspects are layers that do too much damage under the
best of these: no scale repairs them there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from kvtriage import __version__
from kvtriage.engines.base import Engine, ScoreRequest
from kvtriage.engines.info import EngineInfo
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.plan import Plan
from kvtriage.records.probes import ProbeLine
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import ProbeRow, Sensitivities
from kvtriage.records.study import supports_per_head
from kvtriage.stages import Reporter
from kvtriage.stages.ablate import conditions_hash, study_conditions
from kvtriage.stages.forecast import operand_rows, repair_rows
from kvtriage.stages.probe_runs import ProbeRuns
from kvtriage.stages.probes import MANTISSA, UNIT, Probe, design_probes
from kvtriage.stages.probing import cost_probes, measure_probes
from kvtriage.stages.scale_findings import scale_findings
from kvtriage.tasks.split import Split

__all__ = ["Suspects", "cost_diagnose", "diagnose", "find_suspects"]

_TARGET = 0.7
"""Share of the KL margin that the layers left in FP8 may use up by themselves."""
_MOST_TOGETHER = 2.0
"""Single layers say so much about layers together, and no more: beyond it, whom to accuse is for the search to find."""


@dataclass(frozen=True)
class Suspects:
    """Layers that the fourth arm keeps in BF16, and why."""

    layers: tuple[int, ...]
    stand_out: bool
    """False when there is too little damage to accuse anyone of: the layers then only stand in."""
    explanation: str


def diagnose(
    plan: Plan,
    scales: ScaleRecord,
    split: Split,
    engine: Engine,
    done: Sequence[ProbeLine],
    sink: Callable[[ProbeLine], None],
    report: Reporter,
    inputs: Mapping[str, str],
) -> Sensitivities:
    """The probes, the anatomy of the error and what follows from it for scales.

    Measures what `done` does not hold yet; each line goes to `sink` at once. Raises NonFinite, and CaseError when
    `done` was measured under other conditions or holds what this study does not probe.
    """
    spec, study, info = engine.spec, plan.study, engine.info()
    requests = [
        ScoreRequest(item.item_id, item.token_ids, len(item.token_ids) - study.probe_score_tokens)
        for item in split.probe
    ]
    per_head = supports_per_head(study.backend)
    finest = Scaling.PER_HEAD if per_head else Scaling.PER_TENSOR
    probes = design_probes(spec, finest)
    exactly = study.probes == "exact"
    # Whom the probes accuse is not known yet, and is no condition of theirs.
    conditions = conditions_hash(study_conditions(plan, scales, (), info))
    runs = ProbeRuns(engine, requests, conditions, sink, report)
    runs.recall(done, probes, estimated=0 if exactly else len(probes))
    measured = measure_probes(spec, probes, scales, runs, exactly=exactly)
    rows, anatomy = measured.rows, measured.anatomy
    layer_rows = [row for probe, row in rows.items() if probe.scope == "layer"]
    reachable = {UNIT, f"fp8:{finest}"} | ({MANTISSA} if per_head else set())
    irreparable = {
        layer.layer_idx: min(
            fmean(row.kl) for row in layer_rows if row.layers == (layer.layer_idx,) and row.format in reachable
        )
        for layer in spec.layers
    }
    everywhere = tuple(range(spec.num_layers))
    together = min(fmean(row.kl) for row in rows.values() if row.layers == everywhere and row.format in reachable)
    suspects = find_suspects(irreparable, together, spec, study.rule.kl_margin)
    repairs = () if anatomy is None else tuple(repair_rows(anatomy, rows, spec, scales, study.numerics))
    return Sensitivities(
        kvtriage_version=__version__,
        inputs=dict(inputs),
        layer_probes=tuple(layer_rows),
        head_probes=_head_rows(rows, spec),
        type_probes=tuple(row for probe, row in rows.items() if probe.scope == "type"),
        suspects=suspects.layers,
        suspects_stand_out=suspects.stand_out,
        explanation=suspects.explanation + _left_out(info),
        probe_items=tuple(item.item_id for item in split.probe),
        peak_bytes=0,
        anatomy=() if anatomy is None else tuple(operand_rows(anatomy)),
        repairs=repairs,
        findings=() if anatomy is None else tuple(scale_findings(anatomy, repairs, spec, study)),
        cost=measured.cost,
    )


def _left_out(info: EngineInfo) -> str:
    """What these probes do not round and an arm does; '' where they round the same."""
    if info.probe_numerics in (None, info.numerics):
        return ""
    return ". The probes round K and V alone: what Q and the probabilities lose in FP8 is in the arms and not in them"


def cost_diagnose(plan: Plan, split: Split, spec: CacheSpec, info: EngineInfo) -> int:
    """Tokens of whole passes that `diagnose` comes to, at most."""
    probes, tokens = design_probes(spec, Scaling.PER_HEAD), sum(len(item.token_ids) for item in split.probe)
    return cost_probes(spec, probes, tokens, screens=info.screens, exactly=plan.study.probes == "exact")


def _head_rows(rows: Mapping[Probe, ProbeRow], spec: CacheSpec) -> tuple[ProbeRow, ...]:
    """Head by head; the only KV head of a layer is the layer itself, and is not measured twice."""
    found = []
    for layer in spec.layers:
        own = (layer.layer_idx,)
        if layer.num_kv_heads == 1:
            found.append(msgspec.structs.replace(rows[Probe("layer", UNIT, own)], head=0))
        else:
            found += [rows[Probe("head", UNIT, own, head)] for head in range(layer.num_kv_heads)]
    return tuple(found)


def find_suspects(damage: Mapping[int, float], together: float, spec: CacheSpec, kl_margin: float) -> Suspects:
    """The fewest layers to keep in BF16 so that the damage of the others fits most of the margin.

    damage: mean KL of each layer alone under the best scales there are, nats per token; together:
    of all layers at once. Damage of single layers is added up, and taken to be larger where it is
    together, up to twice: an estimate; the ablation is the proof. A layer that alone has half of all damage, and
    may use up half of what the others may, is suspected too: the margins are near. When the
    layers found are most of one attention type and no others, the whole type is suspected: it
    is one flag to the server. Without damage to repair, the most sensitive type (or layer)
    stands in, so that the fourth arm still shows what skipping buys.
    """
    total = sum(damage.values())
    target = _TARGET * kl_margin / min(max(1.0, together / total if total > 0 else 1.0), _MOST_TOGETHER)
    worst_first = sorted(damage, key=lambda layer_idx: (-damage[layer_idx], layer_idx))
    chosen: list[int] = []
    left = total
    for layer_idx in worst_first:
        if left <= target:
            break
        chosen.append(layer_idx)
        left -= damage[layer_idx]
    if not chosen and damage[worst_first[0]] >= max(total, target) / 2:
        chosen = worst_first[:1]
    if not chosen:
        return _stand_in(damage, spec, total)
    for kind in spec.kinds:
        of_kind = spec.layers_of(kind)
        if spec.is_hybrid and len(of_kind) > 1 and set(chosen) <= set(of_kind) and 2 * len(chosen) > len(of_kind):
            return Suspects(
                of_kind,
                True,
                f"{len(chosen)} of the {len(of_kind)} {kind} layers, and no others, lose "
                f"{sum(damage[i] for i in chosen):.3f} of {total:.3f} nats per token whatever the scale",
            )
    return Suspects(
        tuple(sorted(chosen)),
        True,
        f"{_listed(chosen)} alone lose{'s' if len(chosen) == 1 else ''} {sum(damage[i] for i in chosen):.3f} of "
        f"{total:.3f} nats per token whatever the scale",
    )


def _stand_in(damage: Mapping[int, float], spec: CacheSpec, total: float) -> Suspects:
    if spec.is_hybrid:
        kind = max(spec.kinds, key=lambda kind: sum(damage[i] for i in spec.layers_of(kind)))
        layers, what = spec.layers_of(kind), f"the {kind} layers"
    else:
        worst = max(damage, key=lambda layer_idx: damage[layer_idx])
        layers, what = (worst,), f"layer {worst}"
    share = sum(damage[i] for i in layers) / total if total > 0 else 0.0
    return Suspects(
        layers,
        False,
        f"no layer stands out: alone and under the best scales they cost {total:.4f} nats per token together, and "
        f"{what} {100 * share:.0f} % of it",
    )


def _listed(layers: Sequence[int]) -> str:
    names = ", ".join(map(str, sorted(layers)))
    return f"layer {names}" if len(layers) == 1 else f"layers {names}"
