"""A session that is opened only for what is not known yet, and tells each answer before it gives it away.

What is asked at once is read side by side where the engine can, and a context that several continuations share once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TypeVar

from kvtriage.engines.base import Engine, Progress, ScoreRequest, Session
from kvtriage.engines.beginnings import cut_where_alike, order_alike
from kvtriage.engines.side_by_side import ReadsSideBySide, read_each
from kvtriage.errors import CaseError, StudyError
from kvtriage.records.answers import Answer, Likelihood, Written, digest_of

__all__ = ["Remembering"]

_MOST_ID = 2**31 - 1
"""Of a token: no tokenizer is asked for more."""

A = TypeVar("A", Likelihood, Written)


class Remembering:
    """One arm, asked for likelihoods and for what it writes. A context manager, around the session it may open."""

    def __init__(
        self,
        engine: Engine,
        open_session: Callable[[Engine], AbstractContextManager[Session]],
        arm: str,
        conditions: str,
        known: Iterable[Answer],
        sink: Callable[[Answer], None],
    ) -> None:
        """open_session: of this arm, on `engine` or on a worker of it. known: answers of any arm; those of this one
        under `conditions` are not asked for again. sink: told in the caller's thread, in the same order for any number
        of workers."""
        self._engine = engine
        self._open_session = open_session
        self._arm = arm
        self._conditions = conditions
        self._known = {
            (type(answer), answer.asked): answer
            for answer in known
            if (answer.arm, answer.conditions) == (arm, conditions)
        }
        self._sink = sink
        self._stack = ExitStack()
        self._session: Session | None = None

    def __enter__(self) -> Remembering:
        return self

    def __exit__(self, *exc: object) -> None:
        self._session = None
        self._stack.close()

    def likelihoods(self, asked: Sequence[tuple[Sequence[int], int]], progress: Progress) -> list[Likelihood]:
        """Of each text's last so many tokens, [T] and how many. Raises StudyError where the engine gives none,
        NonFinite."""
        keys = [digest_of(token_ids, scored) for token_ids, scored in asked]
        plain = {
            key: ScoreRequest("lm-eval", tuple(token_ids), len(token_ids) - scored)
            for key, (token_ids, scored) in zip(keys, asked, strict=True)
        }
        # Cut before it is seen what is known: a text is read in the same pieces after an interruption.
        cut, names = cut_where_alike([*plain.values()]), [*plain]
        texts = {names[number]: cut[number] for number in order_alike(cut)}
        found = self._answers(Likelihood, texts, self._likelihood, progress)
        return [found[key] for key in keys]

    def written(self, asked: Sequence[tuple[Sequence[int], int]], progress: Progress) -> list[Written]:
        """Greedily behind each prompt, [T] and how many new tokens. Raises StudyError where the engine does not say
        which tokens, NonFinite, CaseError for a known answer that cannot be one."""
        keys = [digest_of(prompt, new_tokens) for prompt, new_tokens in asked]
        wanted = {key: new_tokens for key, (_, new_tokens) in zip(keys, asked, strict=True)}
        for key in wanted:
            self._check_known(key, wanted[key])
        texts = {
            key: ScoreRequest("lm-eval", tuple(prompt), len(prompt))
            for key, (prompt, _) in zip(keys, asked, strict=True)
        }

        def write(session: Session, key: str, text: ScoreRequest) -> Written:
            return self._write(session, key, text.token_ids, wanted[key])

        found = self._answers(Written, texts, write, progress)
        return [found[key] for key in keys]

    def _answers(
        self,
        kind: type[A],
        texts: Mapping[str, ScoreRequest],
        answer: Callable[[Session, str, ScoreRequest], A],
        progress: Progress,
    ) -> dict[str, A]:
        """By what was asked. Each answer that was not known is kept as soon as it is there."""
        found: dict[str, A] = {}
        for key in texts:
            match self._known.get((kind, key)):
                case kind() as known:
                    found[key] = known
        missing = [key for key in texts if key not in found]

        def work(engine: Engine, number: int) -> Iterator[A]:
            with self._on(engine) as session:
                yield answer(session, missing[number], texts[missing[number]])

        def keep(number: int, one: A) -> None:
            found[missing[number]] = one
            self._keep(one)
            progress(len(found), len(texts))

        progress(len(found), len(texts))
        read_each(self._engine, [texts[key] for key in missing], work, keep)
        return found

    def _likelihood(self, session: Session, key: str, request: ScoreRequest) -> Likelihood:
        response = session.score(request)
        if response.generated:
            raise StudyError(
                "a task of lm-eval asks for likelihoods, and these servers give none",
                hint="ask tasks that are answered by writing, or serve with vLLM",
            )
        return Likelihood(
            arm=self._arm,
            asked=key,
            conditions=self._conditions,
            nats=-math.fsum(response.nll),
            greedy=tuple(response.top1) == request.token_ids[request.score_from :],
        )

    def _write(self, session: Session, key: str, prompt: Sequence[int], new_tokens: int) -> Written:
        (token_ids,) = session.generate([prompt], new_tokens).token_ids
        if len(token_ids) != new_tokens:
            raise StudyError(
                "a task of lm-eval needs what is written, and this engine does not say which tokens it writes",
                hint="leave the task out, or measure on a server that takes return_token_ids",
            )
        return Written(arm=self._arm, asked=key, conditions=self._conditions, token_ids=tuple(token_ids))

    def _check_known(self, key: str, new_tokens: int) -> None:
        match self._known.get((Written, key)):
            case Written(token_ids=ids) if len(ids) != new_tokens or not all(0 <= token <= _MOST_ID for token in ids):
                raise CaseError(
                    f"answers.jsonl holds {len(ids)} tokens that arm {self._arm!r} wrote where {new_tokens} were "
                    "asked, or what are no tokens",
                    hint="it was edited by hand: remove the line of what was written with "
                    f'"arm":"{self._arm}","asked":"{key}", and that is asked again',
                )

    def _on(self, engine: Engine) -> AbstractContextManager[Session]:
        """A worker's session is its own; where opening one starts a server, there is one for all."""
        if isinstance(self._engine, ReadsSideBySide):
            return self._open_session(engine)
        if self._session is None:
            self._session = self._stack.enter_context(self._open_session(engine))
        return nullcontext(self._session)

    def _keep(self, answer: Likelihood | Written) -> None:
        if isinstance(answer, Likelihood) and not math.isfinite(answer.nats):
            # JSON knows no infinity: such an answer is asked for again.
            return
        self._sink(answer)
        self._known[type(answer), answer.asked] = answer
