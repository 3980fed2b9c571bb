"""Open loops: when requests are due, and what a study records of them."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import msgspec
import pytest

from kvtriage.engines.base import Arm, Session
from kvtriage.engines.fake import FakeEngine
from kvtriage.errors import CaseError, StudyError
from kvtriage.records.trials import LoadTrial, Trial
from kvtriage.stages.ablate import cost_arm
from kvtriage.stages.loading import arrivals
from tests.unit.stages.fake_case import STUDY, FakeCase, hybrid

LOADED = msgspec.structs.replace(STUDY, request_rates=(5.0, 2000.0), requests_per_rate=12)


def loads(trials: list[Trial]) -> list[LoadTrial]:
    return [trial for trial in trials if isinstance(trial, LoadTrial)]


def test_gaps_are_exponential_with_the_mean_of_the_rate() -> None:
    gaps = [after - before for before, after in itertools.pairwise(arrivals(0, 4.0, 20_001))]
    assert statistics.fmean(gaps) == pytest.approx(0.25)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.median(gaps) == pytest.approx(0.25 * 0.693, rel=0.05)


def test_the_draw_is_the_seeds_and_a_rate_only_stretches_it() -> None:
    assert arrivals(0, 1.0, 9) == arrivals(0, 1.0, 9) != arrivals(1, 1.0, 9)
    assert arrivals(0, 2.0, 9) == pytest.approx(tuple(due / 2 for due in arrivals(0, 1.0, 9)))
    assert arrivals(7, 2.0, 9)[-1] == pytest.approx(8 / 2.0)
    assert arrivals(0, 1.0, 1) == (0.0,)


def test_every_arm_that_is_timed_gets_the_same_requests_at_each_rate() -> None:
    case = FakeCase(study=LOADED)
    evidence, trials = case.ablate()
    timed = [arm.name for arm in evidence.arms if arm.role in ("baseline", "candidate") and arm.same_as is None]
    found = loads(trials)
    assert sorted((t.request_rate, t.arm) for t in found) == sorted(itertools.product((5.0, 2000.0), timed))
    for trial in found:
        assert trial.due_s == arrivals(LOADED.seed, trial.request_rate, 12)
        assert trial.context_len == 64
        assert len(trial.ttft_s) == len(trial.token_s) == 12
        assert {len(steps) for steps in trial.token_s} == {LOADED.decode_tokens - 1}


def test_a_server_that_falls_behind_is_not_flattered() -> None:
    _, trials = FakeCase(study=LOADED).ablate()
    slow, fast = (t for t in loads(trials) if t.arm == "bf16")
    assert slow.ttft_s == pytest.approx([slow.ttft_s[0]] * 12)
    assert fast.ttft_s[-1] > 5 * fast.ttft_s[0]
    assert slow.achieved_rate == pytest.approx(12 / (slow.due_s[-1] + slow.ttft_s[-1] + sum(slow.token_s[-1])))
    assert fast.achieved_rate < 2000


def test_no_rates_no_loads() -> None:
    assert not loads(FakeCase().ablate()[1])


def test_an_interrupted_study_goes_on_and_repeats_no_loop() -> None:
    case = FakeCase(study=LOADED)
    _, whole = case.ablate()
    at = whole.index(loads(whole)[3])
    resumed = whole[:at] + case.ablate(whole[:at])[1]
    assert len(resumed) == len(whole)
    assert sorted((t.arm, t.request_rate) for t in loads(resumed)) == sorted(
        (t.arm, t.request_rate) for t in loads(whole)
    )
    twice = [*whole, loads(whole)[0]]
    with pytest.raises(CaseError, match="repeats a measurement"):
        case.ablate(twice)
    other = msgspec.structs.replace(loads(whole)[0], request_rate=7.0)
    with pytest.raises(CaseError, match="times a generation that this study does not ask for"):
        case.ablate([*whole[:at], other])
    broken = msgspec.structs.replace(loads(whole)[0], ttft_s=(-1.0,) * 12)
    with pytest.raises(CaseError, match="negative or not a number"):
        case.ablate([broken])


def test_loads_cost_what_they_read_and_decode() -> None:
    with_loads, without = FakeCase(study=LOADED), FakeCase()
    one, other = (cost_arm(case.plan, case.items, "candidate") for case in (with_loads, without))
    assert one.read_tokens - other.read_tokens == 2 * 12 * 64
    assert one.decoded_tokens - other.decoded_tokens == 2 * 12 * (LOADED.decode_tokens - 1)


class OneByOne:
    """A session that takes no load."""

    def __init__(self, session: Session) -> None:
        self.applied, self.score, self.generate = session.applied, session.score, session.generate


@dataclass
class Alone(FakeEngine):
    @contextlib.contextmanager
    def open(self, arm: Arm) -> Iterator[Session]:  # type: ignore[override]
        with super().open(arm) as session:
            yield cast(Session, OneByOne(session))


def test_an_engine_that_answers_one_after_another_is_refused_before_anything_is_measured() -> None:
    case = FakeCase(study=LOADED)
    scales, sensitivities = case.calibrate(), case.diagnose()
    case.engine = Alone(hybrid())
    assert scales
    assert sensitivities
    with pytest.raises(StudyError, match="one after another"):
        case.ablate()
    assert case.engine.scored == 0
