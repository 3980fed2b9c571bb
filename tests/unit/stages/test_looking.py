"""Studies that are read while they run: what each look has, when they stop, and that nothing depends on kills."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
import pytest

from kvtriage.engines.base import ScoreRequest
from kvtriage.errors import CaseError, StudyError
from kvtriage.records.evidence import Evidence, Stop
from kvtriage.records.rule import Rule
from kvtriage.records.study import Study
from kvtriage.records.study_limits import validate_study
from kvtriage.records.trials import ScoreTrial, Trial
from kvtriage.records.verdict import Verdict
from kvtriage.stages.decide import decide
from kvtriage.stages.examine import examine
from kvtriage.stages.explain import explain
from kvtriage.stages.findings import Findings
from kvtriage.stages.ladder import Outcome
from kvtriage.stages.looking import deal_looks, key_of, why_stop
from kvtriage.tasks.base import TaskItem
from tests.unit.stages.fake_case import STUDY, FakeCase, uniform

SEVERAL = msgspec.structs.replace(STUDY, items_per_bucket=24, looks=3)


def clear() -> FakeCase:
    """Every arm far within its margins."""
    return FakeCase(spec=uniform(), study=SEVERAL)


def unclear() -> FakeCase:
    """What every arm drifts lies on the margin."""
    rule = Rule(kl_margin=0.0024, range_margin=0.001)
    return FakeCase(spec=uniform(), study=msgspec.structs.replace(SEVERAL, rule=rule))


@functools.cache
def measured(case: Callable[[], FakeCase]) -> tuple[Evidence, tuple[Trial, ...]]:
    """What comes of it without an interruption."""
    evidence, trials = case().ablate()
    return evidence, tuple(trials)


def found_in(case: FakeCase, evidence: Evidence, trials: Sequence[Trial]) -> Findings:
    return examine(case.plan, case.calibrate(), case.diagnose(), evidence, trials, None)


def decided_on(case: FakeCase, evidence: Evidence, trials: Sequence[Trial]) -> Verdict:
    return decide(case.plan, case.calibrate(), case.diagnose(), evidence, trials, None, {})


def item(task: str, bucket: int, number: int) -> TaskItem:
    return TaskItem(task=task, bucket=bucket, request=ScoreRequest(f"{number}", (1, 2, 3), 2))


def scored(trials: Iterable[Trial]) -> Counter[str]:
    return Counter(trial.arm for trial in trials if isinstance(trial, ScoreTrial))


@pytest.mark.parametrize("total", [1, 2, 3, 4, 8])
def test_a_look_has_its_share_of_every_task_and_bucket(total: int) -> None:
    counts = {"text": 9, "needle": 5}
    items = [item(task, bucket, n) for task, count in counts.items() for bucket in (64, 128) for n in range(count)]
    looks = deal_looks(items, total)
    assert sorted(map(key_of, (i for look in looks for i in look))) == sorted(map(key_of, items))
    for number in range(1, total + 1):
        so_far = Counter((i.task, i.bucket) for look in looks[:number] for i in look)
        for task, count in counts.items():
            assert {so_far[task, bucket] for bucket in (64, 128)} == {-(-count * number // total)}


def test_the_first_look_is_spread_over_all_items() -> None:
    """Five depths: the first look of two has both ends and the middle, and not the three that come first."""
    first, second = deal_looks([item("needle", 64, n) for n in range(5)], 2)
    assert [i.request.item_id for i in first] == ["0", "2", "4"]
    assert [i.request.item_id for i in second] == ["1", "3"]


def test_one_look_keeps_the_order_of_the_items() -> None:
    items = [item("text", 64, n) for n in (3, 1, 2)]
    assert deal_looks(items, 1) == (tuple(items),)


def test_a_clear_study_stops_at_the_first_look_with_all_arms_alike() -> None:
    evidence, trials = measured(clear)
    assert evidence.stop == Stop(look=1, looks=3, items=16, of_items=48, why="the choice is clear, FP8 with scale 1")
    assert set(scored(trials).values()) == {16}
    assert evidence.trials == len(trials)


def test_an_unclear_study_goes_on_to_the_end_and_says_what_it_takes() -> None:
    case = unclear()
    evidence, trials = measured(unclear)
    assert evidence.stop == Stop(look=3, looks=3, items=48, of_items=48, why=None)
    verdict = decided_on(case, evidence, trials)
    assert (verdict.status, verdict.choice) == ("cannot_tell", None)
    assert verdict.items_needed is None or verdict.items_needed > 24


def test_a_look_says_what_it_is_for_and_times_nothing_again() -> None:
    told: dict[str, None] = {}
    unclear().ablate(report=lambda what, done, total: told.setdefault(what))
    first, *later = told
    assert first == "look 1 of 3, scoring items"
    assert "look 1 of 3, timing" in told
    scoring = [what for what in later if what.endswith(", scoring items")]
    assert [what[:11] for what in scoring] == ["look 2 of 3", "look 3 of 3"]
    assert all(" (KL at 64 tokens of FP8 with scale 1 in doubt), " in what for what in scoring)
    assert len(told) == 4


def test_a_study_of_one_look_says_nothing_of_looks() -> None:
    case = FakeCase(spec=uniform(), study=msgspec.structs.replace(SEVERAL, looks=1))
    evidence, trials = case.ablate()
    assert evidence.stop is None
    assert set(scored(trials).values()) == {48}
    verdict = decided_on(case, evidence, trials)
    assert not any("look" in sentence for sentence in (*verdict.sentences, *verdict.caveats))
    assert not any("look" in line for line in explain(found_in(case, evidence, trials)))


def test_arms_that_are_dear_to_change_stop_at_the_same_look() -> None:
    case = clear()
    case.engine = dataclasses.replace(case.engine, one_arm_at_a_time=True)
    evidence, trials = case.ablate()
    assert evidence == measured(clear)[0]
    assert set(scored(trials).values()) == {16}


@pytest.mark.parametrize("case", [clear, unclear])
@pytest.mark.parametrize("kept", [0.1, 0.6, 1.0])
def test_a_killed_study_stops_where_it_would_have(case: Callable[[], FakeCase], kept: float) -> None:
    evidence, trials = measured(case)
    before = trials[: round(kept * len(trials))]
    again, rest = case().ablate(list(before))
    assert again == evidence
    assert scored((*before, *rest)) == scored(trials)


def test_scores_beyond_the_look_that_stops_are_refused() -> None:
    _, everything = measured(clear)
    case = clear()
    extra = case.items[1]
    assert (extra.task, extra.request.item_id) not in {
        (t.task, t.item_id) for t in everything if isinstance(t, ScoreTrial)
    }
    first = next(t for t in everything if isinstance(t, ScoreTrial) and t.bucket == extra.bucket)
    more = msgspec.structs.replace(first, item_id=extra.request.item_id)
    with pytest.raises(CaseError, match="goes on beyond look 1"):
        case.ablate([*everything, more])


@pytest.mark.parametrize(
    "changes", [{"look": 0}, {"look": 4}, {"look": -1, "looks": -3}, {"looks": 1_000_000}, {"of_items": 2}]
)
def test_a_look_that_no_study_has_is_refused(changes: dict[str, int]) -> None:
    evidence, _ = measured(clear)
    assert evidence.stop is not None
    with pytest.raises(ValueError, match="there is no look"):
        msgspec.structs.replace(evidence.stop, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"look": 2, "looks": 2},
        {"look": 3},
        {"items": 15},
        {"of_items": 16},
    ],
)
def test_a_stop_that_cannot_be_is_refused(changes: dict[str, int]) -> None:
    evidence, trials = measured(clear)
    assert evidence.stop is not None
    edited = msgspec.structs.replace(evidence, stop=msgspec.structs.replace(evidence.stop, **changes))
    with pytest.raises(CaseError, match="its plan and trials say otherwise"):
        decided_on(clear(), edited, trials)


def test_a_study_of_looks_that_says_of_none_is_refused_and_the_other_way_round() -> None:
    evidence, trials = measured(clear)
    case, named_none = clear(), msgspec.structs.replace(evidence, stop=None)
    with pytest.raises(CaseError, match="a study of 3 looks ended without looks"):
        decided_on(case, named_none, trials)
    assert found_in(case, named_none, trials).rungs, "a study under way is read all the same"
    read_once = FakeCase(spec=uniform(), study=msgspec.structs.replace(SEVERAL, looks=1))
    with pytest.raises(CaseError, match="a study of 1 look ended at look 1 of 3"):
        decided_on(read_once, evidence, trials)


def test_the_verdict_is_read_with_what_was_spent() -> None:
    """At look 1 of 3 intervals are wider than 95 %, and it is said."""
    case = clear()
    evidence, trials = measured(clear)
    found = found_in(case, evidence, trials)
    at_once = found_in(case, msgspec.structs.replace(evidence, stop=None), trials)
    for now, fixed in zip(found.rungs[0].reasons, at_once.rungs[0].reasons, strict=True):
        if now.clause in ("kl", "nll", "top1") and now.low is not None and fixed.low is not None:
            assert now.low < fixed.low
            assert (now.p_beyond or 0.0) >= (fixed.p_beyond or 0.0)
    told = " ".join(decided_on(case, evidence, trials).sentences)
    assert "The study stopped at look 1 of 3, after 16 of 48 items: intervals are drawn at 99.8 %" in told
    lines = "\n".join(explain(found))
    assert "look 1 of 3, after 16 of 48 items: the choice is clear" in lines
    assert "an interval here is drawn at 99.81 %" in lines


def test_what_was_not_shown_yet_does_not_stop_a_study() -> None:
    """Range in doubt and answers lost forbid nothing in the end, and are no reason to end early."""
    case = clear()
    evidence, trials = measured(clear)
    found = found_in(case, evidence, trials)
    assert why_stop(found) is not None
    for clause, change in (("range", {"status": "cannot_tell"}), ("found", {"value": 0.1})):
        reasons = tuple(
            msgspec.structs.replace(reason, clause=clause, **change) if reason.clause == "range" else reason
            for reason in found.leaning.reasons
        )
        leaning = dataclasses.replace(found.leaning, reasons=reasons)
        assert why_stop(dataclasses.replace(found, leaning=leaning)) is None


def test_bf16_is_no_clear_choice_where_a_repair_was_not_tried() -> None:
    """More items do not try it, so the study stops; but nothing is called clear that the verdict cannot tell."""
    case = clear()
    found = found_in(case, *measured(clear))
    left = Outcome(found.native, unmeasured=("calibrated scales", "layers kept in BF16"))
    told = why_stop(dataclasses.replace(found, outcome=left, leaning=found.native))
    assert told == ("no FP8 that was measured holds, and no more items try calibrated scales and layers kept in BF16")


def test_a_broken_baseline_stops_at_once() -> None:
    rule = Rule(baseline_nll_ceiling=0.01)
    evidence, _ = FakeCase(spec=uniform(), study=msgspec.structs.replace(SEVERAL, rule=rule)).ablate()
    assert evidence.stop is not None
    assert evidence.stop.look == 1
    assert evidence.stop.why == "BF16 itself falls short of its floors"


@pytest.mark.parametrize("looks", [2, 3])
def test_too_few_texts_for_so_many_looks_are_refused(looks: int) -> None:
    validate_study(Study(items_per_bucket=8 * looks, looks=looks))
    with pytest.raises(StudyError, match="too few to be read so often"):
        validate_study(Study(items_per_bucket=8 * looks - 1, looks=looks))
