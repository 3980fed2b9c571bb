"""Servers that the user started: one URL for each arm, wherever they run and however they are spread."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from kvtriage.engines.base import Arm
from kvtriage.engines.vllm.client import Client, check_url
from kvtriage.engines.vllm.dialect import learn_dialect
from kvtriage.engines.vllm.fleet import Served, interrogate
from kvtriage.engines.vllm.recipe import served_policy
from kvtriage.errors import EngineError, StudyError
from kvtriage.records.pairing import BASELINE

__all__ = ["AttachedFleet", "read_urls"]


def read_urls(words: Sequence[str]) -> dict[str, str]:
    """`--arm NAME=URL`, several times. Raises StudyError."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, url = word.partition("=")
        if not equals or not name:
            raise StudyError("--arm is not of the form NAME=URL", hint="for example --arm bf16=http://127.0.0.1:8000")
        if name in found:
            raise StudyError(f"--arm {name} is given twice", hint="one server for each arm")
        found[name] = check_url(url)
    if found and BASELINE not in found:
        raise StudyError(
            f"no --arm {BASELINE}=URL is given", hint="every arm is measured against BF16: it needs a server too"
        )
    return found


class AttachedFleet:
    """The servers at `urls`, by arm. They are asked, and never started or stopped."""

    def __init__(
        self,
        urls: Mapping[str, str],
        names: Sequence[str],
        token: str | None,
        *,
        stall_s: float | None = None,
        total_s: float | None = None,
    ) -> None:
        """names: what the model may be called: the last part of its path, of its hub id, of an overlay.

        stall_s, total_s: of one answer, as Client has them.
        """
        self._urls = dict(urls)
        self._names = frozenset(names)
        self._token = token
        self._stall = {} if stall_s is None else {"stall_s": stall_s}
        self._total_s = total_s
        self._served: dict[str, Served] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> AttachedFleet:
        return self

    def __exit__(self, *exc: object) -> None:
        """Somebody's server rounds nothing any more, however the study ended."""
        for served in self._served.values():
            if served.observer is not None and served.probing != {}:
                with contextlib.suppress(EngineError):
                    served.observer.probe({})
        self._stack.close()

    @property
    def one_arm_at_a_time(self) -> bool:
        """Servers that all run already are measured item by item, unless one stands for several arms."""
        return len(set(self._urls.values())) < len(self._urls)

    @property
    def arms(self) -> frozenset[str] | None:
        return frozenset(self._urls)

    @property
    def server_args(self) -> tuple[str, ...]:
        return ("attached",)

    @property
    def sets_steps(self) -> bool:
        return False

    @property
    def devices(self) -> int:
        return 1

    def show(self, arm: Arm) -> str:
        return f"attached: {self._urls[self._name(arm)]}"

    def serve(self, arm: Arm) -> Served:
        name = self._name(arm)
        if arm.name not in self._urls and not served_policy(arm.policy).is_native:
            raise EngineError(f"no --arm {arm.name}=URL is given", hint="start a server for it, or leave the arm out")
        if name not in self._served:
            client = self._stack.enter_context(
                Client(self._urls[name], self._token, total_s=self._total_s, **self._stall)
            )
            served = interrogate(client, needs_extension=False)
            self._check_model(name, served)
            served.dialect = learn_dialect(client, served.model)
            self._served[name] = served
        return self._served[name]

    def has_ended(self, arm: Arm) -> bool:
        """Nobody tells of somebody else's server."""
        return False

    def restart(self, arm: Arm) -> None:
        """Somebody else's server may come back by itself: it is asked anew."""
        self._served.pop(self._name(arm), None)

    def _name(self, arm: Arm) -> str:
        """A native arm of another name, or one that is rounded as a probe, is answered for by the baseline's server."""
        return arm.name if arm.name in self._urls else BASELINE

    def _check_model(self, name: str, served: Served) -> None:
        """Raises StudyError for a server of another model."""
        called = {PurePosixPath(word).name for word in (served.model, served.root)}
        if not called & self._names:
            raise StudyError(
                f"the server of --arm {name} serves {served.root!r}, not {' or '.join(sorted(self._names))}",
                hint="give the URL of a server of this model, or start it with --served-model-name and that name",
            )
