"""Unfinished evidence is read as finished evidence is, and says that it is unfinished."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from kvtriage.explore.progress import Records, judge, measure_arms, name_stage, provisional
from kvtriage.records.evidence import Stop
from kvtriage.records.pairing import BASELINE
from kvtriage.records.study import Study
from kvtriage.records.trials import LoadTrial, Trial
from tests.unit.report.cases import CONDITIONS_HASH, Case, gemma_like, smollm_like
from tests.unit.report.test_frontier_figure import FRONTIER


def records(case: Case, *, whole: bool = False) -> Records:
    if whole:
        return Records(case.plan, case.scales, case.sensitivities, case.evidence, case.verdict)
    return Records(case.plan, case.scales, case.sensitivities)


def one_round(case: Case) -> tuple[Trial, ...]:
    """Every arm on the first item alone."""
    return tuple(case.trials[:1])


def test_stages_follow_one_another() -> None:
    case = gemma_like()
    assert name_stage(Records(case.plan)) == "calibrate"
    assert name_stage(Records(case.plan, case.scales)) == "diagnose"
    assert name_stage(records(case)) == "ablate"
    assert name_stage(Records(case.plan, case.scales, case.sensitivities, case.evidence)) == "decide"
    assert name_stage(records(case, whole=True)) == "done"


def asking(case: Case, study: Study) -> Records:
    return Records(msgspec.structs.replace(case.plan, study=study), case.scales, case.sensitivities)


def test_a_search_stands_between_diagnose_and_ablate() -> None:
    case = gemma_like()
    searching = asking(case, Study(search=True))
    assert name_stage(searching) == "search"
    assert name_stage(replace(searching, frontier=FRONTIER)) == "ablate"
    assert name_stage(replace(searching, evidence=case.evidence)) == "decide"


def test_every_task_and_every_loop_is_counted() -> None:
    """Two buckets, of which one reaches past the window of 512; two rates beside two lengths and a batch."""
    case = gemma_like()
    study = Study(
        buckets=(256, 1024),
        items_per_bucket=4,
        needle_depths=(0.5,),
        window_needles=3,
        recalls_per_bucket=2,
        generation_items=1,
        latency_contexts=(128, 256),
        latency_repeats=1,
        request_rates=(1.0, 2.0),
    )
    loop = LoadTrial(
        arm=BASELINE, request_rate=1.0, context_len=128, due_s=(0.0,), ttft_s=(0.1,), token_s=((0.1,),),
        conditions=CONDITIONS_HASH,
    )  # fmt: skip
    rows = measure_arms(asking(case, study), (*one_round(case), loop))
    baseline = next(arm for arm in rows if arm.name == BASELINE)
    assert (baseline.scored, baseline.asked) == (1, 2 * (4 + 1 + 2 + 1) + 2 * 3)
    assert (baseline.timed, baseline.to_time) == (1, 5)


def test_nothing_is_made_up_before_there_are_trials() -> None:
    case = gemma_like()
    assert provisional(records(case), ()) is None
    assert measure_arms(records(case), ()) == ()
    assert judge(records(case), ()).headline == "nothing to judge yet"


def test_arms_are_designed_as_the_study_designs_them() -> None:
    for case in (gemma_like(), smollm_like()):
        found = provisional(records(case), case.trials)
        assert found is not None
        designed = {arm.name: arm for arm in found.arms}
        for arm in case.evidence.arms:
            if arm.name in designed:
                assert designed[arm.name].policy == arm.policy
        assert {"bf16", "fp8_unit", "fp8_per_head_skip", "bound"} <= designed.keys()


def test_intervals_shrink_as_trials_come() -> None:
    case = smollm_like()
    early, late = (measure_arms(records(case), case.trials[:count]) for count in (len(case.trials) // 3, None))
    widths = []
    for arms in (early, late):
        unit = next(arm for arm in arms if arm.name == "fp8_unit")
        assert unit.low is not None
        assert unit.high is not None
        assert unit.scored <= unit.asked
        widths.append(unit.high - unit.low)
    assert widths[1] < widths[0]


def test_a_study_of_looks_is_read_at_the_look_that_its_trials_are_on_the_way_to() -> None:
    case = smollm_like()
    study = msgspec.structs.replace(case.plan.study, items_per_bucket=16)
    of_two = asking(case, msgspec.structs.replace(study, looks=2))
    stops = []
    for count in (len(case.trials) // 3, len(case.trials)):
        found = provisional(of_two, case.trials[:count])
        assert found is not None
        assert found.stop is not None
        stops.append((found.stop.look, found.stop.looks))
    assert stops == [(1, 2), (2, 2)]
    widths = []
    for asked in (asking(case, study), of_two):
        unit = next(arm for arm in measure_arms(asked, case.trials[: len(case.trials) // 3]) if arm.name == "fp8_unit")
        assert unit.low is not None
        assert unit.high is not None
        widths.append(unit.high - unit.low)
    assert widths[1] > 1.2 * widths[0]


def test_bf16_drifts_from_nothing() -> None:
    case = gemma_like()
    baseline = next(arm for arm in measure_arms(records(case), case.trials) if arm.name == BASELINE)
    assert baseline.kl is None
    assert baseline.timed > 0


def test_clauses_flip_from_cannot_tell() -> None:
    case = smollm_like()
    statuses = []
    for count in (len(case.trials) // 4, len(case.trials)):
        judged = judge(records(case), case.trials[:count])
        statuses.append({(row.arm, row.clause): row.status for row in judged.clauses})
    assert "cannot_tell" in statuses[0].values() or not statuses[0]
    assert set(statuses[1].values()) & {"met", "unmet"}


def test_too_few_trials_are_too_early_and_no_error() -> None:
    case = gemma_like()
    assert judge(records(case), one_round(case)).headline.startswith("too early to judge")


def test_a_study_of_several_looks_is_followed_before_it_has_stopped_at_one() -> None:
    case = smollm_like()
    study = msgspec.structs.replace(case.plan.study, looks=3)
    told, read_once = judge(asking(case, study), case.trials).clauses, judge(records(case), case.trials).clauses
    assert [(row.arm, row.clause) for row in told] == [(row.arm, row.clause) for row in read_once]
    assert told


def test_a_verdict_that_is_there_is_the_verdict() -> None:
    case = gemma_like()
    judged = judge(records(case, whole=True), case.trials)
    assert judged.decided
    assert judged.headline == case.verdict.headline


def test_a_study_that_stopped_early_is_drawn_as_its_look_says() -> None:
    case = smollm_like()
    stop = Stop(look=1, looks=3, items=28, of_items=84, why="the choice is clear, FP8")
    stopped = replace(case, evidence=msgspec.structs.replace(case.evidence, stop=stop))
    wide, plain = (
        next(arm for arm in measure_arms(records(one, whole=True), one.trials) if arm.name == "fp8_unit")
        for one in (stopped, case)
    )
    assert wide.kl == plain.kl
    assert wide.low is not None
    assert plain.low is not None
    assert wide.low < plain.low
