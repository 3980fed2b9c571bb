"""A diagnose that is killed and gone on with: the same record, and nothing measured twice."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvtriage.errors import CaseError
from kvtriage.records.probes import ProbeLine, ProbeTrial, ScreenTrial
from tests.unit.stages.fake_case import STUDY, FakeCase, hybrid, uniform

EXACT = msgspec.structs.replace(STUDY, probes="exact")
DAMAGE = {"mantissa": {4: 0.08}, "range_": {1: 0.5}}
CASES: dict[str, Callable[[], FakeCase]] = {
    "screened": lambda: FakeCase(spec=uniform(), **DAMAGE),  # type: ignore[arg-type]
    "exact": lambda: FakeCase(spec=hybrid(), study=EXACT, **DAMAGE),
}


class Killed(Exception):
    """Stands for a signal between two lines."""


def through_disk(line: ProbeLine) -> ProbeLine:
    return msgspec.json.decode(msgspec.json.encode(line), type=ProbeLine)


def stopped(case: FakeCase, done: list[ProbeLine], after: int) -> list[ProbeLine]:
    """The lines of `done`, and `after` more."""
    new: list[ProbeLine] = []

    def sink(line: ProbeLine) -> None:
        new.append(through_disk(line))
        if len(new) == after:
            raise Killed

    with pytest.raises(Killed):
        case.diagnose(done, sink)
    return done + new


def lines(case: FakeCase) -> list[ProbeLine]:
    found: list[ProbeLine] = []
    case.diagnose((), found.append)
    return found


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("stops", [(1,), (2, 1), (3, 4)])
def test_killed_and_gone_on_with(kind: str, stops: tuple[int, ...]) -> None:
    whole: list[ProbeLine] = []
    record = CASES[kind]().diagnose((), whole.append)
    pieces: list[ProbeLine] = []
    for stop in stops:
        pieces = stopped(CASES[kind](), pieces, stop)
    rest: list[ProbeLine] = []
    assert msgspec.json.encode(CASES[kind]().diagnose(pieces, rest.append)) == msgspec.json.encode(record)
    key = msgspec.json.encode
    assert sorted(map(key, pieces + rest)) == sorted(map(key, whole))


@pytest.mark.parametrize("kind", CASES)
def test_what_is_whole_is_not_asked_again(kind: str) -> None:
    case = CASES[kind]()
    done = lines(case)
    asked: list[ProbeLine] = []
    case.diagnose(done, asked.append)
    assert asked == []


def test_a_line_for_each_item_and_each_exact_probe_of_it() -> None:
    case = CASES["screened"]()
    found = lines(case)
    screens = [line for line in found if isinstance(line, ScreenTrial)]
    assert [line.item_id for line in screens] == [item.item_id for item in case.split.probe]
    cost = case.diagnose().cost
    assert cost is not None
    assert len(found) - len(screens) == cost.exact * len(case.split.probe)


def changed(line: ProbeLine, **fields: object) -> ProbeLine:
    return msgspec.structs.replace(line, **fields)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda found: [changed(found[0], conditions="other"), *found[1:]], "under other conditions"),
        (lambda found: [found[0], changed(found[1], item_id="probe-9"), *found[2:]], "line 2 .* item 'probe-9'"),
        (lambda found: [*found[:-1], changed(found[-1], layers=(17,))], r"layers \(17,\), which is not probed"),
        (lambda found: [*found, found[-1]], "repeats a probe"),
        (lambda found: [found[0], found[0]], "line 2 .* repeats a screen"),
        (lambda found: [changed(found[0], kl=(0.5,))], "estimates 1 probes"),
        (lambda found: [changed(found[0], anatomy=changed(found[0].anatomy, layers=()))], "takes another model apart"),
        (lambda found: [changed(found[0], anatomy=cut(found[0]))], "line 1 .* is damaged"),
    ],
    ids=["conditions", "item", "probe", "twice", "screened twice", "estimates", "model", "damaged"],
)
def test_foreign_lines_are_refused(spoil: Callable[[list[ProbeLine]], list[ProbeLine]], said: str) -> None:
    case = CASES["screened"]()
    found = lines(case)
    assert isinstance(found[-1], ProbeTrial)
    with pytest.raises(CaseError, match=said):
        case.diagnose(spoil(found))


def cut(line: ScreenTrial) -> object:
    """Its anatomy, one array of which lost its end."""
    layer = line.anatomy.layers[0]
    short = msgspec.structs.replace(layer.output_signal, deflated=layer.output_signal.deflated[:-6])
    layers = (msgspec.structs.replace(layer, output_signal=short), *line.anatomy.layers[1:])
    return msgspec.structs.replace(line.anatomy, layers=layers)
