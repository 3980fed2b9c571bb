"""In which order arms and items are measured: items go round the arms, or each arm goes through all items.

Items go round where changing arms is cheap: what is there after a kill is paired, and slow drifts of
the machine hit all arms alike. Items whose texts begin alike come one after the other, so that an engine can read
what they share once. An engine that reads several texts at once takes several items, each through all arms; trials
come in the same order all the same. Arms on machines of their own may read an item all at once. Where an arm is a
server that takes minutes to start, each is opened once and goes through everything.
BF16 comes first; what it says of each scored position is kept, for all others are measured against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvtriage.engines.base import Arm, Engine, ScoreResponse, Session
from kvtriage.engines.beginnings import cut_where_alike, order_alike
from kvtriage.engines.side_by_side import read_each
from kvtriage.records.trials import ContinuationTrial, ScoreTrial
from kvtriage.stages.measuring import Measuring, Work, work_to_time
from kvtriage.tasks.base import TaskItem
from kvtriage.tasks.split import Split

__all__ = ["Across", "Check", "arm_by_arm", "in_turn", "item_by_item"]

Check = Callable[[Arm, Session], None]
"""Raises PolicyNotApplied for a session that does something else than the arm asks for."""

Across = Callable[[Callable[[Arm], ScoreResponse], Sequence[Arm]], Iterable[ScoreResponse]]
"""How one item is scored under several arms: in turn, or at once where each has a machine of its own. The answers come
in the order of the arms, so that the trials are the same either way."""


def in_turn(score: Callable[[Arm], ScoreResponse], arms: Sequence[Arm]) -> Iterable[ScoreResponse]:
    return map(score, arms)


def item_by_item(
    run: Measuring,
    items: Sequence[TaskItem],
    split: Split,
    arms: Sequence[Arm],
    timed: Sequence[Arm],
    check: Check,
    across: Across = in_turn,
) -> None:
    """All arms are checked before the first trial. `arms` begin with the baseline. Times are always taken in turn: this
    machine's clock serves one stream best."""
    shown = {}
    for arm in arms:
        with run.engine.open(arm) as session:
            check(arm, session)
            shown[arm.name] = session.applied()
    for arm in arms:
        run.add_pool(arm, shown[arm.name])
    _score_items(run, items, arms, across)
    _time_shapes(run, split, timed)


@dataclass(frozen=True)
class _Asked:
    """One item, and the arms that have no trial of it yet; BF16 answers in any case."""

    item: TaskItem
    baseline: Arm
    others: tuple[Arm, ...]
    with_baseline: bool


def _score_items(run: Measuring, items: Sequence[TaskItem], arms: Sequence[Arm], across: Across) -> None:
    baseline, *others = arms
    pending = {arm.name: {_key(item) for item in run.unscored(items, arm)} for arm in arms}
    asked = []
    for item in _cut(items):
        missing = tuple(arm for arm in others if _key(item) in pending[arm.name])
        with_baseline = _key(item) in pending[baseline.name]
        if missing or with_baseline:
            asked.append(_Asked(run.written(item) or item, baseline, missing, with_baseline))
    before = len(items) - len(asked)

    def add(number: int, trial: ScoreTrial | ContinuationTrial) -> None:
        run.report("scoring items", before + number, len(items))
        run.add(trial)

    run.report("scoring items", before, len(items))
    requests = [one.item.request for one in asked]
    read_each(run.engine, requests, lambda engine, number: _score_item(run, engine, asked[number], across), add)
    run.report("scoring items", len(items), len(items))


def _cut(items: Sequence[TaskItem]) -> list[TaskItem]:
    """The items as they are read: cut where others go on alike, whether or not these have their trials already."""
    requests = cut_where_alike([item.request for item in items])
    return [replace(items[number], request=requests[number]) for number in order_alike(requests)]


def _score_item(
    run: Measuring, engine: Engine, asked: _Asked, across: Across
) -> Iterator[ScoreTrial | ContinuationTrial]:
    """No more than two distributions are held at a time, BF16's and the one that is marked."""
    item, baseline = asked.item, asked.baseline
    if item.continued:
        with engine.open(baseline) as session:
            written = run.write(session, baseline, item)
        yield written
        item = item.carry_on(written.token_ids)
    answers = iter(across(partial(_score, engine, item), [baseline, *asked.others]))
    reference = next(answers)
    if asked.with_baseline:
        yield run.mark(baseline, item, reference, reference)
    for arm in asked.others:
        yield run.mark(arm, item, next(answers), reference)


def _score(engine: Engine, item: TaskItem, arm: Arm) -> ScoreResponse:
    with engine.open(arm) as session:
        return session.score(item.request)


def _time_shapes(run: Measuring, split: Split, arms: Sequence[Arm]) -> None:
    """Arms take turns within each piece of work, after one warm-up each."""
    left = {arm.name: set(run.untimed(arm)) for arm in arms}
    pending = [(work, arm) for work in work_to_time(run.plan) for arm in arms if work in left[arm.name]]
    warm: set[str] = set()
    for number, (work, arm) in enumerate(pending):
        run.report("timing", number, len(pending))
        with run.engine.open(arm) as session:
            if arm.name not in warm:
                run.warm_up(session, split)
                warm.add(arm.name)
            run.time(session, arm, work, split)
    if pending:
        run.report("timing", len(pending), len(pending))


def arm_by_arm(
    run: Measuring, items: Sequence[TaskItem], split: Split, arms: Sequence[Arm], timed: Sequence[Arm], check: Check
) -> None:
    """Each arm that has anything left to do is opened once, and checked before its first trial.

    An interrupted run scores again what BF16 says on the items that other arms still need: those
    distributions are in no record. Its trials that are there already are not made again.
    """
    baseline, *others = arms
    # Rounded as a probe, an arm is answered for by the baseline's own server, which runs already.
    others.sort(key=lambda arm: arm.bound is None)
    needed = {_key(item) for arm in others for item in run.unscored(items, arm)}
    references: dict[tuple[str, str], ScoreResponse] = {}
    for arm in (baseline, *others):
        missing = {_key(item) for item in run.unscored(items, arm)}
        wanted = missing | needed if arm is baseline else missing
        asked = [item for item in items if _key(item) in wanted]
        untimed: list[Work] = run.untimed(arm) if arm in timed else []
        if not asked and not untimed:
            continue
        with run.engine.open(arm) as session:
            check(arm, session)
            run.add_pool(arm, session.applied())
            for item, response in _answers(run, session, arm, asked):
                if arm is baseline:
                    references[_key(item)] = response
                if _key(item) in missing:
                    run.add(run.mark(arm, item, response, references[_key(item)]))
            if untimed:
                _time_all(run, session, arm, untimed, split)


def _answers(
    run: Measuring, session: Session, arm: Arm, asked: Sequence[TaskItem]
) -> Iterator[tuple[TaskItem, ScoreResponse]]:
    what = f"scoring items under {arm.name}"
    for number, item in enumerate(asked):
        run.report(what, number, len(asked))
        whole = run.written(item)
        if whole is None:
            trial = run.write(session, arm, item)
            run.add(trial)
            whole = item.carry_on(trial.token_ids)
        yield whole, session.score(whole.request)
    run.report(what, len(asked), len(asked))


def _time_all(run: Measuring, session: Session, arm: Arm, untimed: Sequence[Work], split: Split) -> None:
    what = f"timing {arm.name}"
    for number, work in enumerate(untimed):
        run.report(what, number, len(untimed))
        if number == 0:
            run.warm_up(session, split)
        run.time(session, arm, work, split)
    if untimed:
        run.report(what, len(untimed), len(untimed))


def _key(item: TaskItem) -> tuple[str, str]:
    return item.task, item.request.item_id
