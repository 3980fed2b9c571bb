"""Whether two cases may stand side by side, and what differs between them.

They may differ in one thing, or in nothing: then whatever came out differently came from it, or from chance.

    the model    other weights of one geometry: a checkpoint and its fine-tune, or a copy with a planted fault
    the text     another file of traffic
    the engine   who ran the model, where, and in which arithmetic
    the rule     other margins on the same evidence
    a setting    one key of study.toml
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvtriage.errors import CaseError
from kvtriage.records.evidence import Conditions
from kvtriage.records.pairing import BASELINE
from kvtriage.records.rule import Rule
from kvtriage.records.study import Study
from kvtriage.records.trials import ScoreTrial
from kvtriage.report.view import CaseView

__all__ = ["Difference", "asked_alike", "differences", "only_difference", "other_kl"]

_ENGINE = (
    "engine",
    "engine_version",
    "device",
    "backend",
    "compute_dtype",
    "native_dtype",
    "threads",
    "kl_top_k",
    "readback",
    "scoring",
    "server",
    "repeat",
    "rounding",
    "probe_numerics",
    "mixed_backends",
)
"""Of the conditions: those that come with who ran the model, and how. The others follow from model, text and study."""


@dataclass(frozen=True)
class Difference:
    """What differs, and how it is in either case."""

    what: str
    before: str
    after: str


def differences(a: CaseView, b: CaseView) -> tuple[Difference, ...]:
    """In the order of the module's table."""
    return tuple(_differences(a, b))


def only_difference(a: CaseView, b: CaseView) -> Difference | None:
    """The one thing that differs; None for a repetition.

    Raises CaseError where two or more do, where the models differ in geometry, and where nothing was asked of both.
    """
    found = differences(a, b)
    if len(found) > 1:
        named = " and ".join(filter(None, (", ".join(one.what for one in found[:-1]), found[-1].what)))
        raise CaseError(
            f"these cases differ in {named}, and what made the numbers differ could not be told",
            hint="compare cases that differ in one thing: run one of them again with the rest alike",
        )
    if a.plan.layers != b.plan.layers:
        raise CaseError(
            "these cases are of models with other layers, whose caches and layers do not line up",
            hint="compare a model with its fine-tune, or one model under two texts, engines, rules or settings",
        )
    if not _arms(a) & _arms(b) - {BASELINE}:
        raise CaseError("these cases have no FP8 arm in common", hint="run both with the same arms")
    return found[0] if found else None


def asked_alike(a: CaseView, b: CaseView) -> bool:
    """Whether both asked the same items of the same text in the same form: then they are paired."""
    return a.plan.data.sha256 == b.plan.data.sha256 and _items(a) == _items(b)


def other_kl(a: CaseView, b: CaseView) -> str:
    """Why KL in one case is not KL in the other; empty where both count the same tokens."""
    before, after = (view.evidence.conditions.kl_top_k for view in (a, b))
    if before == after:
        return ""
    return (
        f"KL is left out: A counts {_counted(before)}, B {_counted(after)}. The fewer tokens count, the lower is the "
        "bound that it gives, and the two are no measure of one another."
    )


def _counted(kl_top_k: int | None) -> str:
    return "the whole vocabulary" if kl_top_k is None else f"BF16's {kl_top_k} most likely tokens"


def _items(view: CaseView) -> frozenset[tuple[str, str, int, int]]:
    return frozenset(
        (trial.task, trial.item_id, trial.bucket, trial.scored_tokens)
        for trial in view.trials
        if isinstance(trial, ScoreTrial) and trial.arm == BASELINE
    )


def _arms(view: CaseView) -> frozenset[str]:
    return frozenset(arm.name for arm in view.evidence.arms)


def _differences(a: CaseView, b: CaseView) -> Iterator[Difference]:
    if a.plan.model.fingerprint != b.plan.model.fingerprint:
        yield Difference("the model", a.plan.model.source, b.plan.model.source)
    if a.plan.data.sha256 != b.plan.data.sha256:
        yield Difference("the text", a.plan.data.source, b.plan.data.source)
    before, after = a.evidence.conditions, b.evidence.conditions
    changed = [name for name in _ENGINE if getattr(before, name) != getattr(after, name)]
    if changed:
        yield Difference("the engine", _engine(before, changed), _engine(after, changed))
    rules = a.plan.study.rule, b.plan.study.rule
    keys = [key for key in Rule.__struct_fields__ if getattr(rules[0], key) != getattr(rules[1], key)]
    if keys:
        yield Difference("the rule", *(_settings(rule, keys) for rule in rules))
    for key in Study.__struct_fields__:
        values = getattr(a.plan.study, key), getattr(b.plan.study, key)
        if key != "rule" and values[0] != values[1]:
            yield Difference(f"the setting {key}", *map(_plain, values))


def _engine(conditions: Conditions, changed: list[str]) -> str:
    """'embedded, device cpu, threads 2': the engine's name and what else differs."""
    return ", ".join([conditions.engine, *(f"{name} {_plain(getattr(conditions, name))}" for name in changed[:4])])


def _settings(rule: Rule, keys: list[str]) -> str:
    return ", ".join(f"{key} {_plain(getattr(rule, key))}" for key in keys)


def _plain(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
