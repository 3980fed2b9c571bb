"""--dry-run: the arms, the tokens each will process, and about how long it all takes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import click
import msgspec

from kvtriage.cli.job import Subject
from kvtriage.cli.terminal import say
from kvtriage.engines.base import Arm, Engine, ScoreRequest
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.case import ArmRecord, LayerScalesRecord, ScaleRecord, Sensitivities
from kvtriage.stages.ablate import design_arms, estimate
from kvtriage.stages.diagnose import count_probes
from kvtriage.units import format_seconds, format_tokens

__all__ = ["print_dry_run"]

_WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class _Row:
    name: str
    label: str
    tokens: int


def print_dry_run(
    subject: Subject, engine: Engine, scales: ScaleRecord | None, sensitivities: Sensitivities | None
) -> None:
    """The table on stdout, from a speed measured here and now. Writes nothing.

    Without `scales` and `sensitivities` the stages before the ablation are counted as well, and
    the arms are as many as there can be.
    """
    rows = []
    if scales is None or sensitivities is None:
        rows = _stages_before(subject)
        scales, sensitivities = _stand_ins(subject.spec)
        arms = tuple(map(_without_layers, design_arms(subject.plan, scales, sensitivities, engine.info())))
        say("which layers stay in BF16 is found by diagnose; these are as many arms as there can be")
    else:
        arms = design_arms(subject.plan, scales, sensitivities, engine.info())
    speed = _seconds_per_token(subject, engine)
    rows += [
        _Row(found.arm, found.label if arm.same_as is None else f"{found.label} (is {arm.same_as})", found.tokens)
        for found, arm in zip(estimate(subject.plan, arms, subject.items, speed), arms, strict=True)
    ]
    click.echo(_render(rows, speed))


def _render(rows: list[_Row], seconds_per_token: float) -> str:
    total = _Row("total", "", sum(row.tokens for row in rows))
    name_width = max(len(row.name) for row in rows)
    label_width = max(len(row.label) for row in rows)
    lines = [
        f"{row.name:<{name_width}}  {row.label:<{label_width}}  {format_tokens(row.tokens):>11} tokens"
        f"  about {format_seconds(row.tokens * seconds_per_token)}"
        for row in (*rows, total)
    ]
    return "\n".join(lines)


def _seconds_per_token(subject: Subject, engine: Engine) -> float:
    """One evaluation text read in BF16, after a warm-up."""
    token_ids = min((item.token_ids for item in subject.split.evaluation), key=len)
    arm = Arm("bf16", CachePolicy.native(subject.spec.num_layers))
    with engine.open(arm) as session:
        warm_up = token_ids[:_WARM_UP_TOKENS]
        session.score(ScoreRequest("warm-up", warm_up, len(warm_up) - 1))
        started = time.perf_counter()
        session.score(ScoreRequest("speed", token_ids, len(token_ids) - 1))
        return (time.perf_counter() - started) / len(token_ids)


def _stages_before(subject: Subject) -> list[_Row]:
    split, study = subject.split, subject.plan.study
    observed = sum(len(item.token_ids) for item in split.calibration)
    # Each of the three scalings is held against the held-out text.
    checked = 3 * sum(len(item.token_ids) for item in split.holdout)
    probed = count_probes(subject.spec) * study.probe_items * study.probe_tokens
    return [
        _Row("calibrate", "Q, K and V observed, scales checked", observed + checked),
        _Row("diagnose", "FP8 in each layer, head and type alone (at most)", probed),
    ]


def _stand_ins(spec: CacheSpec) -> tuple[ScaleRecord, Sensitivities]:
    """Records that no two arms are equal under, so that none is left out of the count."""
    per_head = tuple(
        LayerScalesRecord(
            layer_idx=layer.layer_idx,
            q=tuple(float(2 + head) for head in range(layer.num_attention_heads)),
            k=tuple(float(2 + head) for head in range(layer.num_kv_heads)),
            v=tuple(float(2 + head) for head in range(layer.num_kv_heads)),
        )
        for layer in spec.layers
    )
    per_tensor = tuple(
        LayerScalesRecord(layer_idx=layer.layer_idx, q=(2.0,), k=(2.0,), v=(2.0,)) for layer in spec.layers
    )
    scales = ScaleRecord(
        kvtriage_version="",
        per_tensor=per_tensor,
        per_head=per_head,
        sub_octave_k=(),
        sub_octave_v=(),
        calibration_items=(),
        calibration_tokens=0,
        held_out=(),
        position_edges=(),
        sweep=(),
        peak_bytes=0,
        warnings=(),
    )
    sensitivities = Sensitivities(
        kvtriage_version="",
        layer_probes=(),
        head_probes=(),
        type_probes=(),
        suspects=(0,),
        suspects_stand_out=True,
        explanation="",
        probe_items=(),
        peak_bytes=0,
    )
    return scales, sensitivities


def _without_layers(arm: ArmRecord) -> ArmRecord:
    """Stand-ins name a layer that was not found by anyone: the label must not."""
    return msgspec.structs.replace(arm, label=arm.label.replace("layer 0 in BF16", "suspected layers in BF16"))
