"""kvtriage search on the command line: between diagnose and ablate, killed and gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from kvtriage.cli.main import main
from kvtriage.cli.wiring import Wiring
from kvtriage.engines.base import Arm, Engine, ProbeSink, Progress, ScoreRequest, keep_nothing
from kvtriage.engines.fake import FakeEngine, FakeTokenizer
from kvtriage.kvcache.spec import CacheSpec

TOGETHER = {frozenset({0, 2}): 0.3, frozenset({1, 2}): 0.3}
"""No layer does harm alone; layer 2 in BF16 is the cheapest that undoes both."""


class Stopping:
    """A fake engine that is interrupted at its `after`-th call of probe."""

    def __init__(self, engine: FakeEngine, after: int | None) -> None:
        self._engine, self._left = engine, after

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def probe(
        self,
        requests: Sequence[ScoreRequest],
        arms: Sequence[Arm],
        progress: Progress,
        sink: ProbeSink = keep_nothing,
    ) -> list[list[float]]:
        if self._left == 0:
            raise KeyboardInterrupt
        if self._left is not None:
            self._left -= 1
        return self._engine.probe(requests, arms, progress, sink)


def wiring(after: int | None = None, together: Mapping[frozenset[int], float] = TOGETHER) -> Callable[[], Wiring]:
    @contextmanager
    def open_engine(folder: Path, spec: CacheSpec, **how: object) -> Iterator[Engine]:
        yield cast(Engine, Stopping(FakeEngine(spec, together=together), after))

    return lambda: Wiring(lambda folder, trust: FakeTokenizer(), open_engine)


def reads_nothing() -> Wiring:
    raise AssertionError("model and text are read for nothing")


@pytest.fixture
def lenient(study_file: Path, tmp_path: Path) -> Path:
    """A study whose answers are not counted: the fake engine forgets as it likes."""
    file = tmp_path / "study.toml"
    file.write_text(
        study_file.read_text().replace("items_per_bucket = 2", "items_per_bucket = 5").replace("[0.1, 0.5, 0.9]", "[]")
        + "\n[rule]\ntop1_margin = 0.9\n"
    )
    return file


@pytest.fixture
def begun(tiny_model: Path, traffic: Path, lenient: Path, tmp_path: Path) -> list[str]:
    """The command line of a run of this case, to be said on with."""
    case = tmp_path / "case"
    return ["run", str(tiny_model), "--data", str(traffic), "--study", str(lenient), "--out", str(case)]


def test_the_found_set_is_what_the_ablation_measures(
    begun: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = tmp_path / "case"
    assert main([*begun, "--search"], wiring()) == 0
    frontier = json.loads((case / "frontier.json").read_text())
    assert (frontier["found"], frontier["status"]) == ([2], "met")
    verdict = json.loads((case / "verdict.json").read_text())
    assert verdict["choice"] == {"scaling": "unit", "skip_layers": [2]}
    assert "the search found that layer 2 together" in " ".join(verdict["sentences"])
    assert "frontier.json" in verdict["inputs"]
    assert "Which layers have to stay in BF16 together?" in (case / "report.html").read_text()
    assert "skip-layers 2" in capsys.readouterr().out


def test_the_verb_alone_prints_the_table(begun: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = str(tmp_path / "case")
    assert main([*begun, "--until", "diagnose"], wiring()) == 0
    capsys.readouterr()
    assert main(["search", case, "--dry-run", "--speed", "1000,10"], wiring()) == 0
    assert "choose on up to 28 sets" in capsys.readouterr().out
    assert not (tmp_path / "case" / "frontier.json").exists()
    assert main(["search", case], wiring()) == 0
    out = capsys.readouterr().out
    assert "found    with layer 2 in BF16 the model keeps all margins jointly" in out
    assert "isolated top" in out
    assert "*: on the front" in out
    assert main(["search", case, "--json"], wiring()) == 0
    assert json.loads(capsys.readouterr().out)["found"] == [2]


def test_a_dry_run_counts_the_search_when_it_is_asked_for(begun: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*begun, "--dry-run", "--search", "--speed", "1000,10"], wiring()) == 0
    assert "sets of layers in BF16, at most" in capsys.readouterr().out
    assert main([*begun, "--dry-run", "--speed", "1000,10"], wiring()) == 0
    assert "sets of layers in BF16, at most" not in capsys.readouterr().out


def test_a_stopped_search_goes_on(begun: list[str], tmp_path: Path) -> None:
    case = tmp_path / "case"
    assert main([*begun, "--until", "diagnose"], wiring()) == 0
    assert main(["search", str(case)], wiring(after=2)) == 130
    kept = (case / "search.jsonl").read_bytes()
    assert kept.count(b"\n") >= 2
    (case / "search.jsonl").write_bytes(kept + b'{"type": "set", "skip')
    assert main(["search", str(case)], wiring()) == 0
    assert (case / "search.jsonl").read_bytes().startswith(kept)
    assert json.loads((case / "frontier.json").read_text())["found"] == [2]


def test_after_the_ablation_it_is_too_late(
    begun: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = tmp_path / "case"
    assert main([*begun, "--until", "ablate"], wiring(together={})) == 0
    for words in ([], ["--dry-run", "--speed", "1000,10"]):
        capsys.readouterr()
        assert main(["search", str(case), *words], reads_nothing) == 2
        told = capsys.readouterr()
        assert "the ablation of this case has begun" in told.err
        assert told.out == ""


def test_a_frontier_that_came_after_the_evidence_is_refused(
    begun: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = tmp_path / "case"
    assert main([*begun, "--until", "ablate"], wiring(together={})) == 0
    (case / "frontier.json").write_text("{}")
    assert main(["decide", str(case)]) == 2
    assert "frontier.json" in capsys.readouterr().err
