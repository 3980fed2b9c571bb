"""What BF16 writes: once, before any arm reads it, and the same after an interruption."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvtriage.engines import beginnings
from kvtriage.engines.base import Arm, Generation, ScoreRequest, ScoreResponse
from kvtriage.errors import CaseError, StudyError
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.records.trials import ContinuationTrial, ScoreTrial, Trial
from tests.unit.stages.fake_case import STUDY, FakeCase, uniform
from tests.unit.stages.test_ablate import comparable

LONG = msgspec.structs.replace(STUDY, generation_items=2, generated_tokens=40)


def case(dear: bool = False) -> FakeCase:
    made = FakeCase(spec=uniform(), study=LONG)
    made.engine.one_arm_at_a_time = dear
    return made


@pytest.mark.parametrize("dear", [False, True])
def test_bf16_writes_each_text_once_and_every_arm_reads_it(dear: bool) -> None:
    evidence, trials = case(dear).ablate()
    written = [t for t in trials if isinstance(t, ContinuationTrial)]
    scored = Counter(t.arm for t in trials if isinstance(t, ScoreTrial) and t.task == "generation")
    assert [(t.arm, len(t.token_ids)) for t in written] == [("bf16", 40)] * 4
    assert scored == {arm.name: 4 for arm in evidence.arms if arm.same_as is None}
    assert {t.scored_tokens for t in trials if isinstance(t, ScoreTrial) and t.task == "generation"} == {40}


def test_arms_read_the_text_with_what_was_written_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case()
    with made.engine.open(_native(made)) as session:
        kind: Any = type(session)
    score: Callable[..., ScoreResponse] = kind.score
    lengths: Counter[int] = Counter()

    def seen(session: Any, request: ScoreRequest) -> ScoreResponse:
        lengths[len(request.token_ids)] += 1
        return score(session, request)

    monkeypatch.setattr(kind, "score", seen)
    evidence, _ = made.ablate()
    own = sum(arm.same_as is None for arm in evidence.arms)
    assert lengths == {64: 3 * own, 128: 3 * own, 104: 2 * own, 168: 2 * own}


def test_a_continuation_begins_as_its_text_and_is_cut_there_after_a_kill_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a text is cut does not depend on what is there already, so neither does any score."""
    monkeypatch.setattr(beginnings, "PIECE_TOKENS", 16)
    made = case()
    with made.engine.open(_native(made)) as session:
        kind: Any = type(session)
    score: Callable[..., ScoreResponse] = kind.score
    asked: list[ScoreRequest] = []

    def seen(session: Any, request: ScoreRequest) -> ScoreResponse:
        asked.append(request)
        return score(session, request)

    monkeypatch.setattr(kind, "score", seen)
    _, trials = made.ablate()
    cuts = {request.item_id: request.cuts for request in asked}
    assert Counter(cuts.values()) == {(32,): 4, (32, 48): 2, (32, 48, 96): 4}
    assert [len(begun) for begun, _ in itertools.groupby(request.token_ids[:32] for request in asked)] == [32] * 3
    for kept in (1, len(trials) // 3, len(trials) // 2):
        asked.clear()
        made.ablate(done=trials[:kept])
        assert asked
        assert all(request.cuts == cuts[request.item_id] for request in asked)


@pytest.mark.parametrize("dear", [False, True])
def test_a_server_that_does_not_say_what_it_writes_is_refused(monkeypatch: pytest.MonkeyPatch, dear: bool) -> None:
    made = case(dear)
    with made.engine.open(_native(made)) as session:
        kind: Any = type(session)
    generate: Callable[..., Generation] = kind.generate

    def mute(*args: Any) -> Generation:
        return dataclasses.replace(generate(*args), token_ids=((),))

    monkeypatch.setattr(kind, "generate", mute)
    trials: list[Trial] = []
    with pytest.raises(StudyError, match="'generation' needs the tokens that BF16 writes"):
        made.ablate(sink=trials.append)
    assert not any(isinstance(trial, ContinuationTrial) for trial in trials)


def _native(made: FakeCase) -> Arm:
    return Arm("bf16", CachePolicy.native(made.spec.num_layers))


@pytest.mark.parametrize("dear", [False, True])
@pytest.mark.parametrize("kept", [5, 50, 58, 70])
def test_a_run_that_goes_on_reads_what_was_written_before(dear: bool, kept: int) -> None:
    _, trials = case(dear).ablate()
    before = trials[:kept]
    _, rest = case(dear).ablate(list(before))
    assert comparable(before + rest) == comparable(trials)


def _edited(trials: list[Trial], **changes: object) -> list[Trial]:
    at = next(i for i, trial in enumerate(trials) if isinstance(trial, ContinuationTrial))
    return [*trials[:at], msgspec.structs.replace(trials[at], **changes), *trials[at + 1 :]]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"token_ids": (1, 2)}, "holds 2 tokens written by arm 'bf16', where this study has 'bf16' write 40"),
        ({"arm": "fp8_unit"}, "written by arm 'fp8_unit'"),
        ({"item_id": "zzz"}, "continues item 'zzz'"),
        ({"task": "text"}, "of task 'text', which this study does not"),
    ],
)
def test_a_continuation_that_this_study_cannot_have_made_stops_it(changes: dict[str, object], named: str) -> None:
    _, trials = case().ablate()
    with pytest.raises(CaseError) as caught:
        case().ablate(_edited(trials, **changes))
    assert named in caught.value.message
