"""Evidence that another program measured, as it is kept in imports.jsonl: one line per file, arm and metric.

It is compared within itself alone. BF16's own line stands beside those of the other arms, all
under the same conditions, and no number of it is ever averaged with a trial of the study.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from kvtriage.errors import CaseError
from kvtriage.records.evidence import ArmRecord
from kvtriage.records.pairing import BASELINE

__all__ = ["TIMES", "Imported", "ImportedItem", "check_imported", "series_of"]

TIMES: Mapping[str, str] = MappingProxyType({"itl_s": "a token", "ttft_s": "the first token"})
"""Metrics that are times, in seconds, and what they are the time of."""

_LARGEST = 1e100
"""Of a value, and of one divided by a time: a square of it is still a number."""

_ANEW = "measure all arms in the same way, and import them into a new case folder"


class ImportedItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One item under one arm."""

    item_id: str
    asked: str
    """A digest of what was asked: equal for two arms that were asked the same."""
    value: float | None
    """None is "could not be scored", and never 0."""


class Imported(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One metric of one task, item by item, as one arm did."""

    source: str
    """'lm-eval' or 'vllm-bench'."""
    arm: str
    task: str
    metric: str
    higher_is_better: bool
    conditions: dict[str, str]
    """What must be equal before two arms may be compared."""
    told: dict[str, str]
    """What the file says of itself besides, and may differ between arms."""
    file_sha256: str
    items: tuple[ImportedItem, ...]

    @property
    def series(self) -> tuple[str, str, str]:
        """What two arms have in common when they can be compared at all."""
        return self.source, self.task, self.metric

    @property
    def unscored(self) -> int:
        return sum(item.value is None for item in self.items)


def series_of(imports: Iterable[Imported]) -> dict[tuple[str, str, str], dict[str, Imported]]:
    """By series, then by arm."""
    found: dict[tuple[str, str, str], dict[str, Imported]] = {}
    for entry in imports:
        found.setdefault(entry.series, {})[entry.arm] = entry
    return found


def check_imported(imports: Sequence[Imported], arms: Iterable[ArmRecord]) -> None:
    """Whether imports may be compared at all. Raises CaseError.

    Refused are: a text that is not Unicode, an arm that the evidence does not name, a series that
    stands twice under one arm or has no BF16, a value that nothing can be reckoned with, other
    conditions than BF16's, an item that BF16 was not asked in the same form or that stands twice, and
    fewer than two items. An item that an arm lacks is unscored.
    """
    known, seen = {arm.name for arm in arms}, set()
    for entry in imports:
        _check_text(entry)
        if entry.arm not in known:
            raise CaseError(
                f"there is no arm {entry.arm!r} in this case", hint=f"its arms are {', '.join(sorted(known))}"
            )
        key = (*entry.series, entry.arm)
        if key in seen:
            raise CaseError(f"{_name(entry)} of arm {entry.arm!r} is there already", hint=_ANEW)
        _check_values(entry)
        seen.add(key)
    for by_arm in series_of(imports).values():
        baseline = by_arm.get(BASELINE)
        if baseline is None:
            entry = next(iter(by_arm.values()))
            raise CaseError(
                f"there is no BF16 to compare {_name(entry)} of arm {entry.arm!r} with",
                hint=f"import BF16's own results with it: --arm {BASELINE}=FILE",
            )
        for entry in by_arm.values():
            _check_against(baseline, entry)


def _check_text(entry: Imported) -> None:
    """JSON can name half a character, and no file of ours can hold one."""
    try:
        msgspec.json.encode(entry)
    except UnicodeEncodeError as error:
        raise CaseError(
            f"results of arm {entry.arm!a} hold the text {error.object[:40]!a}, which is not Unicode",
            hint="look for a lone surrogate, such as \\ud800, in the files that are imported",
        ) from error


def _check_values(entry: Imported) -> None:
    is_time = entry.metric in TIMES
    for item in entry.items:
        if item.value is None or (abs(item.value) <= _LARGEST and (not is_time or item.value >= 1 / _LARGEST)):
            continue
        raise CaseError(
            f"{_name(entry)}: item {item.item_id} of arm {entry.arm!r} is {item.value:g}, "
            f"which is no {'time' if is_time else 'score'}",
            hint="look at the file that is imported: a damaged number?",
        )


def _check_against(baseline: Imported, entry: Imported) -> None:
    for key in sorted(baseline.conditions.keys() | entry.conditions.keys()):
        own, other = (side.conditions.get(key, "not stated") for side in (entry, baseline))
        if own != other:
            raise CaseError(
                f"{_name(entry)}: arm {entry.arm!r} was measured with {key} {own}, and BF16 with {other}", hint=_ANEW
            )
    if entry.higher_is_better is not baseline.higher_is_better:
        raise CaseError(f"{_name(entry)}: arm {entry.arm!r} and BF16 do not agree on what is better", hint=_ANEW)
    asked = {item.item_id: item.asked for item in baseline.items}
    ids = {item.item_id for item in entry.items}
    if len(ids) < len(entry.items):
        raise CaseError(f"{_name(entry)}: an item of arm {entry.arm!r} stands twice", hint=_ANEW)
    for item in entry.items:
        if asked.get(item.item_id) != item.asked:
            how = "with other words" if item.item_id in asked else "not at all"
            raise CaseError(
                f"{_name(entry)}: arm {entry.arm!r} was asked item {item.item_id}, and BF16 {how}",
                hint="arms are compared on the same items only",
            )
    if len(entry.items) < 2:
        raise CaseError(
            f"{_name(entry)} of arm {entry.arm!r} has {len(entry.items) or 'no'} item"
            f"{'' if entry.items else 's'}, and a difference needs two to have an interval",
            hint="run it with a larger limit",
        )


def _name(entry: Imported) -> str:
    return f"{entry.metric} of {entry.task}"
