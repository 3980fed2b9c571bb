"""A session that is opened only for what is not known yet, and tells each answer before it gives it away."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack

from kvtriage.engines.base import ScoreRequest, Session
from kvtriage.errors import CaseError, StudyError
from kvtriage.records.answers import Answer, Likelihood, Written, digest_of

__all__ = ["Remembering"]

_MOST_ID = 2**31 - 1
"""Of a token: no tokenizer is asked for more."""


class Remembering:
    """One arm, asked for likelihoods and for what it writes. A context manager, around the session it may open."""

    def __init__(
        self,
        open_session: Callable[[], AbstractContextManager[Session]],
        arm: str,
        conditions: str,
        known: Iterable[Answer],
        sink: Callable[[Answer], None],
    ) -> None:
        """known: answers of any arm; those of this one under `conditions` are not asked for again."""
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

    def likelihood(self, token_ids: Sequence[int], scored: int) -> Likelihood:
        """Of the last `scored` tokens, [T]. Raises StudyError where the engine gives none, NonFinite."""
        asked = digest_of(token_ids, scored)
        match self._known.get((Likelihood, asked)):
            case Likelihood() as known:
                return known
        request = ScoreRequest("lm-eval", tuple(token_ids), len(token_ids) - scored)
        response = self._awake().score(request)
        if response.generated:
            raise StudyError(
                "a task of lm-eval asks for likelihoods, and these servers give none",
                hint="ask tasks that are answered by writing, or serve with vLLM",
            )
        found = Likelihood(
            arm=self._arm,
            asked=asked,
            conditions=self._conditions,
            nats=-math.fsum(response.nll),
            greedy=tuple(response.top1) == request.token_ids[request.score_from :],
        )
        if math.isfinite(found.nats):
            # JSON knows no infinity: such an answer is asked for again.
            self._keep(found)
        return found

    def written(self, prompt: Sequence[int], new_tokens: int) -> Written:
        """Greedily behind `prompt`. Raises StudyError where the engine does not say which tokens, NonFinite, CaseError
        for a known answer that cannot be one."""
        asked = digest_of(prompt, new_tokens)
        match self._known.get((Written, asked)):
            case Written(token_ids=ids) as known:
                if len(ids) != new_tokens or not all(0 <= token <= _MOST_ID for token in ids):
                    raise CaseError(
                        f"answers.jsonl holds {len(ids)} tokens that arm {self._arm!r} wrote where {new_tokens} were "
                        "asked, or what are no tokens",
                        hint="it was edited by hand: remove it, and everything is asked again",
                    )
                return known
        (token_ids,) = self._awake().generate([prompt], new_tokens).token_ids
        if len(token_ids) != new_tokens:
            raise StudyError(
                "a task of lm-eval needs what is written, and this engine does not say which tokens it writes",
                hint="leave the task out, or measure on a server that takes return_token_ids",
            )
        found = Written(arm=self._arm, asked=asked, conditions=self._conditions, token_ids=tuple(token_ids))
        self._keep(found)
        return found

    def _awake(self) -> Session:
        if self._session is None:
            self._session = self._stack.enter_context(self._open_session())
        return self._session

    def _keep(self, answer: Answer) -> None:
        self._sink(answer)
        self._known[type(answer), answer.asked] = answer
