"""What was answered is not asked again, to the bit, and an arm that has answered everything is not opened."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import msgspec
import pytest

from kvtriage.engines.base import Generation, ScoreRequest, ScoreResponse, Session
from kvtriage.engines.fake import FakeEngine
from kvtriage.engines.info import Applied
from kvtriage.engines.remembering import Remembering
from kvtriage.errors import CaseError
from kvtriage.records.answers import Answer, Written, digest_of
from tests.unit.stages.fake_case import hybrid
from tests.unit.tasks.texts import FakeDistribution


@dataclass
class Counting:
    """Each token costs a third of a nat, or what `nll` says; writes ones."""

    nll: float = 1 / 3
    asked: list[object] = field(default_factory=list)
    opened: int = 0

    def open(self) -> AbstractContextManager[Session]:
        self.opened += 1
        return contextlib.nullcontext(self)

    def applied(self) -> Applied:
        raise NotImplementedError

    def score(self, request: ScoreRequest) -> ScoreResponse:
        self.asked.append(request.token_ids)
        count = len(request.token_ids) - request.score_from
        return ScoreResponse((self.nll,) * count, (7,) * count, FakeDistribution((0.0,) * count))

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generation:
        self.asked += prompts
        return Generation(((1,) * new_tokens,), 0.0, (), None, (0,))


def quiet(_done: int, _total: int) -> None:
    """Nobody is watching."""


def remembering(
    session: Counting,
    known: Sequence[Answer],
    sink: Callable[[Answer], None],
    arm: str = "bf16",
    conditions: str = "c",
) -> Remembering:
    """On an engine that reads one text after another."""
    return Remembering(FakeEngine(hybrid()), lambda _engine: session.open(), arm, conditions, known, sink)


def told(session: Counting, known: Sequence[Answer] = (), arm: str = "bf16", conditions: str = "c") -> list[Answer]:
    """What reaches the sink, as a file gives it back."""
    kept: list[Answer] = []
    with remembering(session, known, kept.append, arm, conditions) as one:
        both = one.likelihoods([((5, 7, 7), 2), ((5, 7, 7), 1), ((5, 7, 7), 2)], quiet)
        assert [(answer.nats, answer.greedy) for answer in both] == [(-2 / 3, True), (-1 / 3, True), (-2 / 3, True)]
        assert one.likelihoods([((5, 7, 7), 2)], quiet) == both[:1]
        assert [answer.token_ids for answer in one.written([((5, 7, 7), 2)] * 2, quiet)] == [(1, 1)] * 2
    return [msgspec.json.decode(msgspec.json.encode(answer), type=Answer) for answer in kept]


def test_what_was_answered_is_not_asked_again_and_opens_nothing() -> None:
    first, second = Counting(), Counting()
    answers = told(first)
    assert (len(answers), len(first.asked), first.opened) == (3, 3, 1)
    assert told(second, answers) == []
    assert (second.asked, second.opened) == ([], 0)
    assert len(told(Counting(), answers[:2])) == 1


@pytest.mark.parametrize("other", [{"arm": "fp8_unit"}, {"conditions": "d"}])
def test_answers_of_another_arm_or_engine_are_none(other: dict[str, str]) -> None:
    assert len(told(Counting(), told(Counting()), **other)) == 3


def test_an_answer_that_json_cannot_hold_is_asked_for_again() -> None:
    session, kept = Counting(nll=math.inf), list[Answer]()
    with remembering(session, (), kept.append) as one:
        assert [one.likelihoods([((5, 7), 1)], quiet)[0].nats for _ in range(2)] == [-math.inf] * 2
    assert (len(session.asked), kept) == (2, [])


@pytest.mark.parametrize("ids", [(), (1,), (1, 1, 1), (1, -1), (1, 2**40)])
def test_a_written_answer_that_was_edited_is_refused(ids: tuple[int, ...]) -> None:
    edited = Written(arm="bf16", asked=digest_of((5, 7), 2), conditions="c", token_ids=ids)
    with remembering(Counting(), [edited], print) as one, pytest.raises(CaseError, match="no tokens") as refused:
        one.written([((5, 7), 2)], quiet)
    says = f'"arm":"bf16","asked":"{edited.asked}"'
    assert says.encode() in msgspec.json.encode(edited)
    assert says in refused.value.hint


def test_texts_that_only_look_alike_are_told_apart() -> None:
    texts = [((1, 2), 3), ((1, 2, 3), 3), ((2, 1), 3), ((1, 2), 2), ((12,), 3)]
    assert len({digest_of(tokens, count) for tokens, count in texts}) == len(texts)
