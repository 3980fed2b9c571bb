"""Screens and exact probes, asked of the engine where no earlier line of probes.jsonl holds the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtriage.engines.base import Arm, Engine, ScoreRequest, Screening, Treatments
from kvtriage.engines.side_by_side import read_each
from kvtriage.errors import CaseError
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.probes import ProbeLine, ProbeTrial, ScreenTrial, pack_anatomy, unpack_anatomy
from kvtriage.stages import Reporter
from kvtriage.stages.probes import Probe

__all__ = ["ProbeRuns"]

_BY_HAND = "probes.jsonl was edited or joined by hand: remove it to probe again, or start a new case folder"


@dataclass
class ProbeRuns:
    """Every line goes to `sink` at once. Each item is screened by itself, so that a kill costs one item."""

    engine: Engine
    requests: Sequence[ScoreRequest]
    conditions: str
    sink: Callable[[ProbeLine], None]
    report: Reporter
    screened: dict[str, Screening] = field(default_factory=dict)
    measured: dict[tuple[Probe, str], float] = field(default_factory=dict)

    def recall(self, done: Iterable[ProbeLine], probes: Sequence[Probe], estimated: int) -> None:
        """Take over what an interrupted diagnose measured; `estimated` is how many probes a screen has.

        Raises CaseError for the first line that could not be of this very diagnose, or that is there twice.
        """
        designed, asked = set(probes), {request.item_id for request in self.requests}
        for number, line in enumerate(done, start=1):
            if line.conditions != self.conditions:
                raise CaseError(
                    "the probes that are already there were measured under other conditions than these",
                    hint="same machine, threads, versions and study are needed to go on; or start a new case folder",
                )
            if line.item_id not in asked:
                raise _foreign(number, f"is of item {line.item_id!r}, which this study does not probe")
            match line:
                case ProbeTrial():
                    probe = Probe(line.scope, line.format, line.layers, line.head)
                    if probe not in designed:
                        raise _foreign(number, f"is of {line.format} in layers {line.layers}, which is not probed")
                    if (probe, line.item_id) in self.measured:
                        raise _foreign(number, "repeats a probe that an earlier line holds")
                    self.measured[probe, line.item_id] = line.kl
                case ScreenTrial():
                    if line.item_id in self.screened:
                        raise _foreign(number, "repeats a screen that an earlier line holds")
                    if len(line.kl) != estimated:
                        raise _foreign(number, f"estimates {len(line.kl)} probes, where this study has {estimated}")
                    self.screened[line.item_id] = _unpack(number, line, self.engine.spec)

    def screen(self, arms: Sequence[Arm], treatments: Treatments) -> Screening | None:
        """All items, in order; None from an engine that does not screen."""
        missing = [request for request in self.requests if request.item_id not in self.screened]
        before = len(self.requests) - len(missing)

        def look(engine: Engine, number: int) -> Iterator[Screening]:
            found = engine.screen([missing[number]], arms, treatments, lambda done, total: None)
            if found is not None:
                yield found

        def keep(number: int, found: Screening) -> None:
            self._keep_screen(missing[number], found)
            self.report("screening layers and heads", before + number + 1, len(self.requests))

        self.report("screening layers and heads", before, len(self.requests))
        read_each(self.engine, missing, look, keep)
        if len(self.screened) < len(self.requests):
            return None
        return Screening.merge_all([self.screened[request.item_id] for request in self.requests])

    def probe(self, arms: Mapping[Probe, Arm], what: str) -> dict[Probe, list[float]]:
        """Mean KL from native of each probe on each item, nats per token. Raises NonFinite."""
        probe_of = {arm.name: probe for probe, arm in arms.items()}

        def keep(request: ScoreRequest, arm: Arm, kl: float) -> None:
            probe = probe_of[arm.name]
            self.sink(
                ProbeTrial(
                    scope=probe.scope,
                    format=probe.format,
                    layers=probe.layers,
                    head=probe.head,
                    item_id=request.item_id,
                    kl=kl,
                    conditions=self.conditions,
                )
            )
            self.measured[probe, request.item_id] = kl

        missing: dict[tuple[Probe, ...], list[ScoreRequest]] = {}
        for request in self.requests:
            left = tuple(probe for probe in arms if (probe, request.item_id) not in self.measured)
            missing.setdefault(left, []).append(request)
        missing.pop((), None)
        for probes, requests in missing.items():
            self.engine.probe(requests, [arms[probe] for probe in probes], partial(self.report, what), keep)
        return {probe: [self.measured[probe, request.item_id] for request in self.requests] for probe in arms}

    def _keep_screen(self, request: ScoreRequest, found: Screening) -> None:
        self.sink(
            ScreenTrial(
                item_id=request.item_id,
                kl=tuple(kl for (kl,) in found.damage),
                evaluated=found.evaluated,
                anatomy=pack_anatomy(found.anatomy),
                conditions=self.conditions,
            )
        )
        self.screened[request.item_id] = found


def _unpack(number: int, line: ScreenTrial, spec: CacheSpec) -> Screening:
    try:
        anatomy = unpack_anatomy(line.anatomy)
    except ValueError as error:
        raise _foreign(number, f"is damaged: {error}") from error
    heads = [layer.output_signal.shape for layer in anatomy.layers]
    if heads != [(layer.num_attention_heads,) for layer in spec.layers]:
        raise _foreign(number, "takes another model apart")
    return Screening(tuple((kl,) for kl in line.kl), anatomy, line.evaluated)


def _foreign(number: int, what: str) -> CaseError:
    return CaseError(f"line {number} of probes.jsonl {what}", hint=_BY_HAND)
