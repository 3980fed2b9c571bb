"""The harness's questions as scores and generations of a session."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvtriage.engines.base import Generation, ScoreRequest, ScoreResponse
from kvtriage.engines.fake import FakeEngine
from kvtriage.engines.info import Applied
from kvtriage.engines.remembering import Remembering
from kvtriage.errors import DataError, StudyError
from kvtriage.records.answers import Answer
from tests.unit.stages.fake_case import hybrid
from tests.unit.tasks.texts import FakeDistribution

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is the extra lm-eval")

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class Letters:
    """One token a letter; 1 begins a text and 2 ends it."""

    bos: tuple[int, ...] = (1,)
    eos: tuple[int, ...] = (2,)

    def encode(self, text: str) -> list[int]:
        return [100 + ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token - 100) for token in token_ids if token > 100)

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        return ""


@dataclass
class Parrot:
    """Finds each token half a nat unlikely, would write 'a' everywhere, and writes what it was told."""

    says: Sequence[int] = ()
    scored: list[ScoreRequest] = field(default_factory=list)
    prompts: list[tuple[int, ...]] = field(default_factory=list)

    def applied(self) -> Applied:
        raise NotImplementedError

    def score(self, request: ScoreRequest) -> ScoreResponse:
        self.scored.append(request)
        count = len(request.token_ids) - request.score_from
        return ScoreResponse((0.5,) * count, (100 + ord("a"),) * count, FakeDistribution((0.0,) * count))

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generation:
        self.prompts += [tuple(prompt) for prompt in prompts]
        written = (*self.says, *[0] * new_tokens)[:new_tokens]
        return Generation((tuple(written),), 0.0, (), None, (0,))


def model(session: Parrot, max_model_len: int = 32, tokenizer: Letters | None = None) -> Any:
    from kvtriage.engines.harness import SessionModel

    arm = remembering(session)
    return SessionModel(arm, tokenizer or Letters(), max_model_len, lambda done, total: None)


def remembering(session: Parrot) -> Remembering:
    answers: list[Answer] = []
    engine = FakeEngine(hybrid())
    return Remembering(
        engine, lambda _engine: contextlib.nullcontext(session), "bf16", "conditions", (), answers.append
    )


def asked(*args: object) -> Any:
    return SimpleNamespace(args=args)


def test_a_continuation_is_scored_behind_its_context() -> None:
    session = Parrot()
    found = model(session).loglikelihood([asked("sky", "aaa"), asked("sky ", "ab")], disable_tqdm=True)
    assert found == [(-1.5, True), (-1.5, False)]
    first, second = session.scored
    assert (first.token_ids[0], first.score_from, len(first.token_ids)) == (1, 4, 7)
    assert Letters().decode(second.token_ids[second.score_from :]) == " ab"


def test_without_a_context_the_beginning_of_a_text_stands_for_it() -> None:
    session = Parrot()
    assert model(session).loglikelihood([asked("", "aa")], disable_tqdm=True) == [(-1.0, True)]
    assert session.scored[0].token_ids[0] == 1
    with pytest.raises(DataError, match="nothing to begin with"):
        model(session, tokenizer=Letters((), ())).loglikelihood([asked("", "aa")], disable_tqdm=True)


def test_a_context_that_is_too_long_loses_its_beginning() -> None:
    session = Parrot()
    model(session, 8).loglikelihood([asked("c" * 20, "aa")], disable_tqdm=True)
    assert Letters().decode(session.scored[0].token_ids) == "c" * 6 + "aa"
    with pytest.raises(DataError, match="a continuation has 20 tokens, and the model takes 8"):
        model(session, 8).loglikelihood([asked("c", "a" * 20)], disable_tqdm=True)


def test_a_long_text_is_scored_in_windows_each_token_once() -> None:
    session = Parrot()
    assert model(session, 9).loglikelihood_rolling([asked("abcdefghijklmnopqrstuvwxyz0123")]) == [-15.0]
    assert sum(len(r.token_ids) - r.score_from for r in session.scored) == 30
    assert max(len(r.token_ids) for r in session.scored) <= 9


@pytest.mark.parametrize(
    ("says", "until", "text"),
    [
        ("four\nand more", ["\n"], "four"),
        ("four.and more", [".", "\n"], "four"),
        ("four", "u", "fo"),
        ("four", [], "four"),
    ],
)
def test_a_generation_ends_where_the_task_says(says: str, until: object, text: str) -> None:
    session = Parrot(Letters().encode(says))
    how = {"until": until, "max_gen_toks": len(says), "do_sample": False}
    assert model(session).generate_until([asked("sky", how)]) == [text]
    assert session.prompts == [(1, *Letters().encode("sky"))]


def test_a_generation_ends_with_the_end_of_the_text() -> None:
    session = Parrot([*Letters().encode("four"), 2, *Letters().encode("five")])
    assert model(session).generate_until([asked("sky", {"max_gen_toks": 12})]) == ["four"]


def test_prompt_and_generation_share_the_models_length() -> None:
    session = Parrot()
    model(session, 16).generate_until([asked("c" * 40, {"max_gen_toks": 10})])
    assert len(session.prompts[0]) == 6


def test_servers_that_do_not_say_what_a_task_needs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No likelihoods, or texts without their tokens: nothing that could be taken for an answer."""
    session = Parrot()
    mute = Generation(((),), 0.0, (), None, (0,))
    monkeypatch.setattr(session, "generate", lambda prompts, new_tokens: mute)
    with pytest.raises(StudyError, match="does not say which tokens it writes"):
        model(session).generate_until([asked("sky", {"max_gen_toks": 4})])
    score = session.score
    monkeypatch.setattr(session, "score", lambda request: dataclasses.replace(score(request), generated=True))
    with pytest.raises(StudyError, match="asks for likelihoods"):
        model(session).loglikelihood([asked("sky", "aa")], disable_tqdm=True)


def test_sampling_is_refused() -> None:
    with pytest.raises(DataError, match="asks for sampling"):
        model(Parrot()).generate_until([asked("sky", {"do_sample": True, "temperature": 0.7})])
