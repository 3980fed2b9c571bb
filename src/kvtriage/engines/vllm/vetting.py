"""Everything that is asked of an arm's server before its first trial, and of each that takes its place.

Its flags and its live layers against the arm, against what the arm's first server showed, and against the
other arms' servers; a smoke test; and whether it is the same model at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from kvtriage.engines.base import Arm, Tokenizer
from kvtriage.engines.info import Applied
from kvtriage.engines.vllm.dialect import VLLM
from kvtriage.engines.vllm.fleet import Served
from kvtriage.engines.vllm.identity import UNKNOWN
from kvtriage.engines.vllm.observer import LiveLayer, Observer
from kvtriage.engines.vllm.readback import (
    applied_from_config,
    applied_from_layers,
    check_config,
    check_live,
    doubts,
    say_readback,
)
from kvtriage.engines.vllm.smoke import SMOKE_TEXT, smoke_test
from kvtriage.errors import EngineError, PolicyNotApplied
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["Vetting"]

_SAME_MODEL_NATS = 1.0
"""Nats per token between two BF16 arms on the smoke text, beyond which they are no arms of one model."""
_SAME_MODEL_FP8_NATS = 4.0
"""The same for an FP8 arm: a cache may ruin a model, and is measured then; a model with another vocabulary or other
weights is further off."""


class Vetting:
    """Of the servers of one study. It remembers what it was shown."""

    def __init__(
        self, spec: CacheSpec, tokenizer: Tokenizer, say: Callable[[str], None], native_dtype: Callable[[], str]
    ) -> None:
        """native_dtype: what BF16's server stores an unquantised layer in."""
        self._spec = spec
        self._tokenizer = tokenizer
        self._say = say
        self._native_dtype = native_dtype
        self._baseline_nll: float | None = None
        self._shown: dict[str, Applied] = {}
        """What each arm's first server showed, its pool aside."""
        self._who: dict[str, object] = {}
        """What all servers run on, as far as one has said."""

    def vet(self, arm: Arm, served: Served) -> None:
        """Everything that may be wrong with a server before the first trial. Raises EngineError."""
        if served.dialect != VLLM:
            self._say(f"server {arm.name}: {served.dialect.words}")
        for warning in (*served.warnings, *doubts(served.ranks or ())):
            self._say(f"warning: server {arm.name}: {warning}")
        if served.unseen is not None:
            self._say(f"warning: server {arm.name}: {served.unseen}: its scales cannot be read back")
        if served.config is None or served.config.pool is None:
            self._say(f"warning: server {arm.name}: /metrics does not tell the size of its cache; none is recorded")
        if served.config is not None:
            check_config(arm, served.config)
            if served.ranks is None and served.config.cache_dtype == "auto":
                self._say(
                    f"warning: server {arm.name}: its cache dtype is auto, under which a checkpoint with a "
                    "kv_cache_scheme is in FP8 and nothing says so: start it with --kv-cache-dtype bfloat16"
                )
        if served.ranks is not None:
            check_live(arm, self._spec, served.ranks)
        self._check_alike(arm, served)
        self._say(say_readback(arm, self._shown[arm.name]))
        text = [*self._tokenizer.bos, *self._tokenizer.encode(SMOKE_TEXT)]
        with _watching(served.observer):
            nll = smoke_test(served, self._spec, text, self._tokenizer.encode)
        if self._baseline_nll is None:
            self._baseline_nll = nll
            return
        allowed = _SAME_MODEL_NATS if arm.policy.is_native else _SAME_MODEL_FP8_NATS
        if (away := abs(nll - self._baseline_nll)) > allowed:
            raise EngineError(
                f"arm {arm.name!r} is {away:.1f} nats per token away from BF16 on the smoke text",
                hint="that is another model, not another cache: look at what its server loaded",
            )

    def _check_alike(self, arm: Arm, served: Served) -> None:
        """A server that came back has to show what the arm's first one showed, and all arms run on the same.

        Raises PolicyNotApplied, EngineError.
        """
        shown = dataclasses.replace(self.read_back(arm, served, served.ranks), pool=None)
        if self._shown.setdefault(arm.name, shown) != shown:
            raise PolicyNotApplied(
                f"arm {arm.name!r}: its server came back with another cache or other scales than before",
                hint="start it as it was and run the same command again; nothing was recorded of the new one",
            )
        for what, found in _what_it_runs_on(served).items():
            if found not in (None, UNKNOWN) and self._who.setdefault(what, found) != found:
                raise EngineError(
                    f"the server of arm {arm.name!r} has {what} {found}, and that of another arm {self._who[what]}",
                    hint="arms are compared on equal servers: their difference would be that of the servers",
                )

    def read_back(self, arm: Arm, served: Served, ranks: Sequence[Sequence[LiveLayer]] | None) -> Applied:
        """What the server shows of itself; `ranks` is what its extension says, where it has one."""
        pool = None if served.config is None else served.config.pool
        if ranks is not None:
            return applied_from_layers(arm, self._spec, ranks, pool)
        if served.config is not None:
            return applied_from_config(arm, self._spec, served.config, self._native_dtype())
        nothing: tuple[tuple[float, ...], ...] = ((),) * self._spec.num_layers
        return Applied((UNKNOWN,) * self._spec.num_layers, nothing, nothing, nothing)


@contextlib.contextmanager
def _watching(observer: Observer | None) -> Iterator[None]:
    """NaN are counted within, where there is an extension to do it, and no longer whatever happens."""
    if observer is None:
        yield
        return
    observer.watch(True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(EngineError):
            observer.watch(False)
        raise
    observer.watch(False)


def _what_it_runs_on(served: Served) -> dict[str, object]:
    """GPUs by their models: how many of them a host has beside those that serve is of no concern."""
    gpus = served.facts.get("gpus")
    models = {line.partition(": ")[2] or line for line in str(gpus).splitlines()} if gpus else set()
    return {
        "version": served.version,
        "likelihoods by": served.dialect.scoring,
        **served.facts,
        "gpus": " and ".join(sorted(models)) or None,
    }
