"""What was timed is told with its interval, what was not is told as such."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.explorer import hybrid
from kvtriage.explore.latency import DRAWN_ON, expect_latency
from kvtriage.explore.policies import policy_of
from kvtriage.explore.subject import Measured, Subject
from kvtriage.kvcache.policy import Scaling
from kvtriage.records.latency import itl_line, longest_timed
from kvtriage.records.pairing import Trials
from kvtriage.stages.wording import format_interval
from kvtriage.stats.lines import Line
from kvtriage.units import format_seconds
from tests.unit.explore.subjects import measured
from tests.unit.report.cases import gemma_like, without_arms


def timed() -> tuple[Subject, Trials]:
    subject = measured(gemma_like())
    assert subject.measured is not None
    assert subject.measured.trials is not None
    return subject, subject.measured.trials


def test_a_timed_policy_is_told_by_its_own_line() -> None:
    subject, trials = timed()
    found = expect_latency(subject, policy_of(subject, (), Scaling.UNIT), Scaling.UNIT, 800)
    line = itl_line(trials, "fp8_unit")
    assert found is not None
    assert line is not None
    assert found.exact
    assert found.arms[0].itl_s == pytest.approx(line.at(800))
    band = line.band_at(800, 0.95)
    assert band is not None
    assert found.arms[0].text == format_interval(line.at(800), *band, format_seconds)


def test_no_token_takes_less_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, _ = timed()
    monkeypatch.setattr(Line, "band_at", lambda _self, _at, _confidence: (-0.2, 1.1))
    found = expect_latency(subject, policy_of(subject, (), Scaling.UNIT), Scaling.UNIT, 800)
    assert found is not None
    assert found.text.endswith(" ms (up to 1.1 s)")


def test_another_policy_lies_between_two_lines() -> None:
    subject, _ = timed()
    found = expect_latency(subject, policy_of(subject, (7,), Scaling.UNIT), Scaling.UNIT, 800)
    assert found is not None
    assert not found.exact
    assert [end.arm for end in found.arms] == ["bf16", "fp8_unit"]
    assert found.text == "not timed itself"
    assert [note.partition(":")[0] for note in found.notes[:2]] == ["BF16", found.arms[1].label]


def test_a_line_is_drawn_on_a_little_and_no_further() -> None:
    subject, trials = timed()
    policy = policy_of(subject, (), Scaling.UNIT)
    longest = longest_timed(trials, "bf16")
    near = expect_latency(subject, policy, Scaling.UNIT, DRAWN_ON * longest)
    far = expect_latency(subject, policy, Scaling.UNIT, DRAWN_ON * longest + 1)
    at_end = expect_latency(subject, policy, Scaling.UNIT, longest)
    assert near is not None
    assert far is not None
    assert at_end is not None
    assert any("drawn on beyond" in note for note in near.notes)
    assert far.arms == at_end.arms
    assert "too far beyond" in far.notes[0]


def test_nothing_is_told_where_nothing_was_timed() -> None:
    model = hybrid(6)
    assert expect_latency(model, policy_of(model, (), Scaling.UNIT), Scaling.UNIT, 800) is None
    subject, trials = timed()
    bare = replace(subject, measured=Measured(None, replace(trials, timings={}), 0.95, 0.05))
    assert expect_latency(bare, policy_of(bare, (), Scaling.UNIT), Scaling.UNIT, 800) is None


def test_an_arm_that_is_missing_leaves_the_other_end() -> None:
    subject = measured(without_arms(gemma_like(), "fp8_unit"))
    found = expect_latency(subject, policy_of(subject, (7,), Scaling.UNIT), Scaling.UNIT, 800)
    assert found is not None
    assert [end.arm for end in found.arms] == ["bf16"]
