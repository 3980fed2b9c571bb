"""A study on the real engine, killed and gone on with: the scores are those of a run never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtriage.engines.embedded.engine import open_engine
from kvtriage.records.evidence import Evidence
from kvtriage.records.trials import ScoreTrial, TimingTrial, Trial
from kvtriage.stages.ablate import ablate
from kvtriage.stages.calibrate import calibrate
from kvtriage.stages.diagnose import diagnose
from kvtriage.tasks import TASKS
from kvtriage.tasks.split import Item, Split
from tests.unit.engines import tiny
from tests.unit.stages.fake_case import FakeCase, silent


class Killed(Exception):
    """Stands for a signal between two trials."""


def items(role: str, count: int, tokens: int, seed: int) -> tuple[Item, ...]:
    return tuple(
        Item(f"{role}-{tokens}-{i}", tiny.prompt(tokens, seed=seed + i), tokens, f"{role}{i}") for i in range(count)
    )


SPLIT = Split(
    calibration=items("calibration", 2, 64, 10),
    holdout=items("holdout", 1, 64, 20),
    probe=items("probe", 2, 64, 30),
    evaluation=items("evaluation", 2, 64, 40) + items("evaluation", 2, 128, 50),
)


def study(folder: Path, done: list[Trial], stop_after: int | None, threads: int) -> tuple[Evidence | None, list[Trial]]:
    """One process' worth of work: all stages, until `stop_after` new trials."""
    spec = tiny.save(tiny.gemma3(num_key_value_heads=2), folder)
    plan = FakeCase(spec=spec).plan
    new: list[Trial] = []

    def sink(trial: Trial) -> None:
        new.append(trial)
        if len(new) == stop_after:
            raise Killed

    with open_engine(folder, spec, numerics="storage", device="cpu", threads=threads) as engine:
        scales = calibrate(plan, SPLIT, engine, silent, {})
        suspects = diagnose(plan, scales, SPLIT, engine, (), lambda line: None, silent, {})
        asked = TASKS["text"].items(SPLIT, plan.study, engine.tokenizer)
        try:
            return ablate(plan, scales, suspects, asked, SPLIT, engine, done, sink, silent, {}), new
        except Killed:
            return None, new


def comparable(trials: list[Trial]) -> tuple[list[ScoreTrial], list[tuple[str, str, int, int]]]:
    """Scores to the last bit; of times, which there are."""
    scores = [trial for trial in trials if isinstance(trial, ScoreTrial)]
    times = [(t.arm, t.phase, t.context_len, t.repeat) for t in trials if isinstance(t, TimingTrial)]
    return sorted(scores, key=lambda t: (t.item_id, t.arm)), sorted(times)


def scored(trials: list[Trial]) -> list[tuple[str, str]]:
    """Which scores there are, in their order."""
    return [(trial.item_id, trial.arm) for trial in trials if isinstance(trial, ScoreTrial)]


@pytest.mark.parametrize(("threads", "stops"), [(1, (1,)), (3, (5, 9)), (3, (30, 20))])
def test_killed_and_gone_on_with(tmp_path: Path, threads: int, stops: tuple[int, ...]) -> None:
    """On several threads as many texts are under way, and trials come in the same order."""
    evidence, whole = study(tmp_path, [], None, threads)
    pieces: list[Trial] = []
    for stop in stops:
        ended, new = study(tmp_path, pieces, stop, threads)
        assert ended is None
        assert len(new) == stop
        pieces = pieces + new
    resumed, rest = study(tmp_path, pieces, None, threads)
    assert comparable(pieces + rest) == comparable(whole)
    assert scored(pieces + rest) == scored(whole)
    assert resumed == evidence
