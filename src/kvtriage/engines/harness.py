"""An engine's session as a model of lm-evaluation-harness: its tasks, our cache.

The harness asks for likelihoods of continuations, of whole texts, and for greedy generations. All
of them become `Session.score` and `Session.generate`, so every engine of kvtriage can be asked,
servers included, under every arm that it stores. What was answered before an interruption is not
asked again. This is the only room that knows lm_eval.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from kvtriage.engines.base import Progress, Tokenizer
from kvtriage.engines.remembering import Remembering
from kvtriage.errors import DataError, StudyError

__all__ = ["SessionModel", "run_tasks"]

_NEW_TOKENS = 256
"""Of a generation for which the task names no number: the harness's own default."""


def run_tasks(
    arm: Remembering,
    tokenizer: Tokenizer,
    max_model_len: int,
    tasks: Sequence[str],
    *,
    include_path: Path | None,
    num_fewshot: int | None,
    limit: int | None,
    seed: int,
    progress: Progress,
) -> dict[str, Any]:
    """What `lm_eval.simple_evaluate` returns, its logged samples included.

    `include_path` is a folder of task files, whose Python functions the harness runs. Raises
    StudyError for a task that it does not know, DataError for one that it cannot load or that asks for sampling.
    """
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown:
        raise StudyError(
            f"lm-eval knows no task {unknown[0]!r}",
            hint="'lm-eval ls tasks' lists its own; --include-path names a folder with yours",
        )
    model = SessionModel(arm, tokenizer, max_model_len, progress)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        found: dict[str, Any] = simple_evaluate(
            model=model,
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=0,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    except (OSError, ValueError, KeyError, ConnectionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"lm-eval cannot run {', '.join(tasks)}: {reason}",
            hint="its data sets come from the Hugging Face hub unless the task file names local ones",
        ) from error
    finally:
        logging.disable(before)
    return found


class SessionModel(TemplateLM):
    """One arm, asked by the harness. Texts that are too long lose their beginning, as in the harness's own models."""

    def __init__(self, arm: Remembering, tokenizer: Tokenizer, max_model_len: int, progress: Progress) -> None:
        super().__init__()
        self._arm = arm
        self._tokens = tokenizer
        self._max_model_len = max_model_len
        self._progress = progress

    @property
    def eot_token_id(self) -> int:
        """The harness asks for it in place of an empty context alone."""
        return self.prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is replaced by. Raises DataError where the tokenizer has nothing to begin with."""
        first = self._tokens.bos or self._tokens.eos
        if not first:
            raise DataError(
                "a text of this task has no context, and this model's tokenizer nothing to begin with",
                hint="give its tokenizer_config.json a bos_token or an eos_token",
            )
        return first[0]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        tokens, bos = self._tokens.encode(string), list(self._tokens.bos)
        return tokens if add_special_tokens is False or tokens[: len(bos)] == bos else bos + tokens

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return self._scored([(context, continuation) for _, context, continuation in requests])

    def _scored(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """Of each continuation behind its context: log-likelihood in nats, and whether greedy decoding would write
        exactly this."""
        asked = [(self._fitted(*pair), len(pair[1])) for pair in pairs if pair[1]]
        found = iter(self._arm.likelihoods(asked, self._progress))
        told = ((one.nats, one.greedy) for one in found)
        return [next(told) if continuation else (0.0, True) for _, continuation in pairs]

    def _fitted(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[int, ...]:
        if len(continuation) >= self._max_model_len:
            raise DataError(
                f"a continuation has {len(continuation):,} tokens, and the model takes {self._max_model_len:,}",
                hint="leave that task out",
            )
        return (*context, *continuation)[-self._max_model_len :]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [[make_disjoint_window(window) for window in self._windows(request.args[0])] for request in requests]
        found = iter(self._scored([window for windows in texts for window in windows]))
        return [math.fsum(nats for nats, _ in itertools.islice(found, len(windows))) for windows in texts]

    def _windows(self, text: str) -> Iterable[tuple[list[int], list[int]]]:
        windows: Iterable[tuple[list[int], list[int]]] = get_rolling_token_windows(
            token_list=self.tok_encode(text, add_special_tokens=False),
            prefix_token=self.prefix_token_id,
            max_seq_len=self._max_model_len - 1,
            context_len=1,
        )
        return windows

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        asked = [self._prompt(*request.args) for request in requests]
        found = self._arm.written(asked, self._progress)
        return [self._text(one.token_ids, request.args[1]) for one, request in zip(found, requests, strict=True)]

    def _prompt(self, context: str, how: dict[str, Any]) -> tuple[list[int], int]:
        """And how many tokens are to be written behind it."""
        if how.get("do_sample") and how.get("temperature") != 0:
            raise DataError(
                "a task of lm-eval asks for sampling, and arms are compared by what greedy decoding writes",
                hint="set do_sample: false in the task's generation_kwargs",
            )
        new_tokens = min(int(how.get("max_gen_toks", _NEW_TOKENS)), self._max_model_len - 1)
        prompt = self.tok_encode(context)[-(self._max_model_len - new_tokens) :] or [self.prefix_token_id]
        return prompt, new_tokens

    def _text(self, token_ids: Sequence[int], how: dict[str, Any]) -> str:
        """Of what was written, up to where it is to stop."""
        until = how.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        kept = list(token_ids)
        ends = [kept.index(token) for token in self._tokens.eos if token in kept]
        text = self._tokens.decode(kept[: min(ends)] if ends else kept)
        for stop in filter(None, stops):
            text = text.partition(stop)[0]
        return text
