"""--dry-run: the arms, the tokens each will process, and about how long it all takes.

Of an engine of servers also each server's command, the requests that go to it, and the GPU-hours. The speed is
measured, and a server started for it, unless one is stated or this case has timed BF16 before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import click

from kvtriage.cli.dry_run_options import Speed
from kvtriage.cli.options import Servers
from kvtriage.cli.requests_file import write_requests
from kvtriage.cli.subject import Subject
from kvtriage.cli.terminal import say
from kvtriage.engines.base import Arm, Engine
from kvtriage.engines.info import EngineInfo
from kvtriage.engines.side_by_side import ReadsSideBySide, read_each
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.records.pairing import BASELINE
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.study import supports_per_head
from kvtriage.stages.ablate import ArmCost, cost_arm, design_arms
from kvtriage.stages.arms import build_arm
from kvtriage.stages.diagnose import cost_diagnose
from kvtriage.stages.looking import deal_looks, likely_look
from kvtriage.stages.measuring import shapes_to_time
from kvtriage.stages.search import cost_search
from kvtriage.tasks.base import TaskItem
from kvtriage.units import format_seconds, format_tokens

if TYPE_CHECKING:
    from kvtriage.engines.vllm.dialect import Dialect

__all__ = ["Serving", "measure_speed", "print_dry_run"]

_DECODED = 5
"""Tokens of the generation whose decode steps are timed."""


@dataclass(frozen=True)
class _Row:
    name: str
    label: str
    cost: ArmCost


def print_dry_run(
    subject: Subject,
    engine: Engine,
    scales: ScaleRecord | None,
    sensitivities: Sensitivities | None,
    *,
    speed: Speed | None = None,
    servers: Servers | None = None,
    requests: Path | None = None,
) -> None:
    """The table on stdout, from `speed`, or one measured here and now. Writes nothing but `requests`.

    Without `scales` and `sensitivities` the arms are not known yet: then the stages before the
    ablation are counted as well, and as many arms of each sort as there can be.
    """
    unasked = speed is not None and isinstance(engine, Serving)
    started = time.perf_counter()
    info = _unasked_info(servers) if unasked else engine.info()
    start_s = None if unasked else time.perf_counter() - started
    if scales is None or sensitivities is None:
        say("which arms there are is known after diagnose; this is what there can be at most")
    before = [*_stages_before(subject, info)] if scales is None or sensitivities is None else []
    rows = [*before, *_arm_rows(subject, scales, sensitivities, info)]
    speed = measure_speed(subject, engine) if speed is None else speed
    click.echo(_render(rows, speed))
    if subject.plan.study.looks > 1:

        def total(asked: tuple[TaskItem, ...]) -> ArmCost:
            return _total([*before, *_arm_rows(replace(subject, items=asked), scales, sensitivities, info)])

        click.echo(_render_looks(subject, total, speed))
    if isinstance(engine, Serving):
        arms = _known_arms(subject, scales, sensitivities, info)
        click.echo(_render_servers(subject, engine, rows, speed, start_s, arms))
        if requests is not None:
            timed = [arm.name for arm in arms if arm.bound is None and arm.prefill_chunk is None]
            dialect = None if unasked else engine.dialect()
            say(f"{write_requests(requests, subject, arms, timed, dialect):,} requests are in {requests}")


def _arm_rows(
    subject: Subject, scales: ScaleRecord | None, sensitivities: Sensitivities | None, info: EngineInfo
) -> list[_Row]:
    if scales is None or sensitivities is None:
        return [*_arms_at_most(subject, info)]
    return [
        _Row(arm.name, arm.label, cost_arm(subject.plan, subject.items, arm.role, read_once=info.reads_once))
        if arm.same_as is None
        else _Row(arm.name, f"{arm.label} (is {arm.same_as})", ArmCost(0, 0))
        for arm in design_arms(subject.plan, scales, sensitivities, info)
    ]


def _render_looks(subject: Subject, total: Callable[[tuple[TaskItem, ...]], ArmCost], speed: Speed) -> str:
    """What the table adds up to is the dearest way it may go: to the last look. This is the cheapest, and a likely one.

    total: what a study of these items alone would come to.
    """
    study = subject.plan.study
    dealt, likely = deal_looks(subject.items, study.looks), likely_look(study)

    def price(look: int) -> str:
        cost = total(tuple(item for batch in dealt[:look] for item in batch))
        tokens = format_tokens(cost.read_tokens + cost.decoded_tokens)
        return f"{tokens} tokens, about {format_seconds(speed.seconds(cost))}"

    return (
        f"{study.looks} looks: if the choice is clear at the first, {price(1)} in all; where drifts are half their "
        f"margins it is about look {likely}, {price(likely)}; at most the total above"
    )


def _unasked_info(servers: Servers | None) -> EngineInfo:
    """What the arms depend on, taken for granted: that servers take scales per head, and that all arms are there."""
    words = () if servers is None else servers.arms
    return EngineInfo(
        name="vllm",
        version="not asked",
        device="not asked",
        backend="not asked",
        numerics="storage",
        compute_dtype="not asked",
        native_dtype="bfloat16",
        threads=1,
        per_head_scales=True,
        arms=frozenset(word.partition("=")[0] for word in words) or None,
    )


@runtime_checkable
class Serving(Protocol):
    """What an engine of servers can say of them beside its contract."""

    @property
    def devices(self) -> int: ...

    def show(self, arm: Arm) -> str: ...

    def dialect(self) -> Dialect: ...


def _known_arms(
    subject: Subject, scales: ScaleRecord | None, sensitivities: Sensitivities | None, info: EngineInfo
) -> list[Arm]:
    """The arms with servers of their own; before diagnose those that need no scales."""
    if scales is None or sensitivities is None:
        count = subject.spec.num_layers
        return [Arm(BASELINE, CachePolicy.native(count)), Arm("fp8_unit", CachePolicy.fp8(count, Scaling.UNIT))]
    arms = design_arms(subject.plan, scales, sensitivities, info)
    return [build_arm(arm, scales) for arm in arms if arm.same_as is None]


def _render_servers(
    subject: Subject, engine: Serving, rows: list[_Row], speed: Speed, start_s: float | None, arms: list[Arm]
) -> str:
    """A server runs from its start to the end of its arm, whether it has work or not. `start_s` None was not timed."""
    shapes = shapes_to_time(subject.plan)
    study, scored = subject.plan.study, len(subject.items)
    timed = sum(shape.batch for shape in shapes) + shapes[0].batch + len(study.request_rates) * study.requests_per_rate
    shown = {arm.name: engine.show(arm) for arm in arms}
    # Arms of one command share a server: the bound is BF16's, rounded by the extension. Every look starts them again.
    starts = len(set(shown.values())) * study.looks
    seconds = sum(speed.seconds(row.cost) for row in rows) + starts * (start_s or 0.0)
    written = sum(item.continued > 0 for item in subject.items)
    long = f"; to BF16's {written} more, which write what all are to score" if written else ""
    hours = seconds * engine.devices / 3600
    return "\n".join(
        [
            "",
            *(f"{name}: {server}" for name, server in shown.items()),
            "",
            f"requests to each: {scored} to score, and {timed} generations to time where it is served as it stands"
            f"{long}",
            f"{_starts(start_s, starts)} the study takes about {format_seconds(seconds)}, on {engine.devices} "
            f"device{'s' if engine.devices > 1 else ''} {hours:.2f} device-hours",
        ]
    )


def _starts(start_s: float | None, count: int) -> str:
    if start_s is None:
        return f"no server was started to see how long that takes; without the starts of {count} servers"
    return f"a start takes about {format_seconds(start_s)}; with {count} of them"


def _render(rows: list[_Row], speed: Speed) -> str:
    total = _total(rows)
    name_width = max(len(row.name) for row in rows)
    label_width = max(len(row.label) for row in rows)
    return "\n".join(
        f"{row.name:<{name_width}}  {row.label:<{label_width}}"
        f"  {format_tokens(row.cost.read_tokens + row.cost.decoded_tokens):>11} tokens"
        + (f"  about {format_seconds(speed.seconds(row.cost))}" if row.cost.read_tokens else "")
        for row in (*rows, _Row("total", "", total))
    )


def _total(rows: list[_Row]) -> ArmCost:
    return ArmCost(sum(row.cost.read_tokens for row in rows), sum(row.cost.decoded_tokens for row in rows))


def measure_speed(subject: Subject, engine: Engine) -> Speed:
    """The longest and the shortest items scored, and a few tokens decoded, once a first generation has warmed up.

    Both, because a short text pays more for each of its tokens; of each as many as may be read at once.
    """
    whole = (item.request for item in subject.items if not item.continued)
    by_length = sorted(whole, key=lambda request: -len(request.token_ids))
    at_once = engine.info().threads if isinstance(engine, ReadsSideBySide) else 1
    ends = list(dict.fromkeys((*by_length[:at_once], *by_length[-at_once:])))
    native = Arm(BASELINE, CachePolicy.native(subject.spec.num_layers))

    def score(worker: Engine, number: int) -> tuple[()]:
        with worker.open(native) as session:
            session.score(ends[number])
        return ()

    with engine.open(native) as session:
        session.generate([ends[-1].token_ids], 2)
        started = time.perf_counter()
        read_each(engine, ends, score, lambda _number, _result: None)
        scored_s = time.perf_counter() - started
        steps = session.generate([ends[-1].token_ids], _DECODED).token_s
    return Speed(scored_s / sum(len(request.token_ids) for request in ends), statistics.median(steps))


def _stages_before(subject: Subject, info: EngineInfo) -> Iterator[_Row]:
    split, study = subject.split, subject.plan.study
    calibrated = sum(len(item.token_ids) for item in (*split.calibration, *split.holdout))
    yield _Row("calibrate", "Q, K and V observed, scales checked", ArmCost(calibrated, 0))
    probed = cost_diagnose(subject.plan, split, subject.spec, info)
    yield _Row("diagnose", "FP8 in each layer, head and type alone, at most", ArmCost(probed, 0))
    if study.search:
        searched = cost_search(subject.plan, split, subject.items, subject.spec)
        yield _Row("search", "sets of layers in BF16, at most", ArmCost(searched.read_tokens, searched.written_tokens))


def _arms_at_most(subject: Subject, info: EngineInfo) -> Iterator[_Row]:
    """A row for each sort of arm that `design_arms` may choose."""
    scalings = 3 if info.per_head_scales else 2
    served = 3 if info.per_head_scales and supports_per_head(subject.plan.study.backend) else 2
    sorts = [
        (BASELINE, "BF16", "baseline", 1),
        ("bf16_repeat", "BF16, prefill in chunks", "noise", 1),
        ("fp8", "FP8 under each scaling", "candidate", scalings),
        ("fp8_skip", "FP8 under each scaling that serves, suspected layers in BF16", "candidate", served),
        ("bound", "Scale-free bound", "bound", 1),
    ]
    if subject.spec.is_hybrid:
        sorts.append(("fp8_only", "FP8 in one attention type only", "contrast", len(subject.spec.kinds)))
    for name, label, role, count in sorts:
        one = cost_arm(subject.plan, subject.items, role, read_once=info.reads_once)
        many = f" ({count} arms)" if count > 1 else ""
        yield _Row(name, label + many, ArmCost(count * one.read_tokens, count * one.decoded_tokens))
