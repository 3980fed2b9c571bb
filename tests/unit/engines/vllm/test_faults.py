"""The fault table: what a server may do, and that every trial is kept or redone, none lost or doubled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from kvtriage.engines.base import Arm
from kvtriage.engines.vllm.failures import Refused
from kvtriage.errors import EngineError, KvtriageError, NonFinite, PolicyNotApplied
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.records.evidence import Evidence
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.trials import LoadTrial, PoolTrial, ScoreTrial, TimingTrial, Trial
from kvtriage.stages.ablate import ablate
from tests.unit.engines.vllm.fleets import Stable
from tests.unit.engines.vllm.misbehaving_server import STALL_S, Faults
from tests.unit.stages.fake_case import STUDY, FakeCase, silent

COMPLETIONS = "/v1/completions"
SMALL = msgspec.structs.replace(
    STUDY, items_per_bucket=2, latency_contexts=(32,), latency_repeats=1, request_rates=(200.0,), requests_per_rate=3
)


@dataclass
class Study:
    """One ablation over fake servers, with records that were made before."""

    folder: Path
    faults: Faults = field(default_factory=Faults)
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.case = FakeCase(study=SMALL)
        self.scales: ScaleRecord = self.case.calibrate()
        self.sensitivities: Sensitivities = self.case.diagnose()
        self.stable = Stable(self.case.spec, self.folder, self.faults)

    def run(self, done: list[Trial] | None = None, sink: Callable[[Trial], None] | None = None) -> Evidence:
        self.trials = list(done or [])
        with self.stable.engine() as engine:
            return ablate(
                self.case.plan,
                self.scales,
                self.sensitivities,
                self.case.items,
                self.case.split,
                engine,
                list(self.trials),
                sink or self.trials.append,
                silent,
                {},
            )


def keys(trials: list[Trial]) -> Counter[tuple[object, ...]]:
    """What was measured, how often."""
    found: Counter[tuple[object, ...]] = Counter()
    for trial in trials:
        match trial:
            case ScoreTrial():
                found["score", trial.arm, trial.task, trial.item_id] += 1
            case TimingTrial():
                found["timing", trial.arm, trial.phase, trial.context_len, trial.batch, trial.repeat] += 1
            case LoadTrial():
                found["load", trial.arm, trial.request_rate, len(trial.ttft_s)] += 1
            case _:
                found[type(trial).__name__, trial.arm] += 1
    return found


def scores(trials: list[Trial]) -> dict[tuple[str, str], dict[str, float | None]]:
    return {(t.arm, t.item_id): t.metrics for t in trials if isinstance(t, ScoreTrial)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Study:
    study = Study(tmp_path_factory.mktemp("undisturbed"))
    study.run()
    assert set(keys(study.trials).values()) == {1}
    return study


PASSING: dict[str, Faults] = {
    "500 once": Faults(status={COMPLETIONS: [500]}),
    "503 three times": Faults(status={COMPLETIONS: [503, 503, 503]}),
    "429": Faults(status={COMPLETIONS: [429]}),
    "500 of the list of models": Faults(status={"/v1/models": [500]}),
    "500 of the extension": Faults(status={"/collective_rpc": [500, 500]}),
    "500 of the metrics": Faults(status={"/metrics": [500, 503]}),
    "500 of the version": Faults(status={"/version": [500]}),
    "the server dies": Faults(deaths=1),
    "the server dies twice": Faults(deaths=2),
    "positions are missing": Faults(short_scores=2),
    "an answer is not JSON": Faults(not_json=2),
    "a stream is cut off": Faults(cut_streams=2),
    "a stream stalls": Faults(stalled_streams=1),
    "a stream ends early": Faults(short_streams=2),
    "a stream ends with an error": Faults(error_streams=1),
}
"""Faults that pass: the study ends as if they had never been."""


@pytest.mark.parametrize("faults", PASSING.values(), ids=PASSING)
def test_a_fault_that_passes_leaves_no_trace(faults: Faults, undisturbed: Study, tmp_path: Path) -> None:
    study = Study(tmp_path, faults)
    study.stable.stall_s = STALL_S / 2 if faults.stalled_streams else 60.0
    evidence = study.run()
    assert keys(study.trials) == keys(undisturbed.trials)
    assert scores(study.trials) == scores(undisturbed.trials)
    assert evidence.trials == len(study.trials)
    assert any("asking again" in line for line in study.stable.said)


@dataclass(frozen=True)
class Stop:
    faults: Faults
    error: type[KvtriageError]
    says: str


STOPPING: dict[str, Stop] = {
    "500 for ever": Stop(Faults(status={COMPLETIONS: [500] * 99}), EngineError, "answered 500: a planted fault"),
    "400": Stop(Faults(status={COMPLETIONS: [400]}), Refused, "answered 400: a planted fault"),
    "no prompt logprobs": Stop(Faults(no_logprobs=-1), Refused, "gives no prompt logprobs"),
    "positions always missing": Stop(Faults(short_scores=-1), EngineError, "scored 4 of the 5 tokens"),
    "other tokens": Stop(Faults(other_tokens=-1), Refused, "another token than"),
    "NaN in the logits": Stop(Faults(nan_logprobs=-1), NonFinite, "not a number"),
    "NaN that cannot be written": Stop(Faults(nan_answers=-1), NonFinite, "NaN or infinite"),
    "NaN in the cache": Stop(Faults(nonfinite=3), NonFinite, "3 elements of Q, K or V of layer 0"),
    "sequences mixed up": Stop(Faults(mixes_up_batches=True), EngineError, "in a ragged batch"),
    "prefixes not kept": Stop(Faults(forgets_prefixes=True), EngineError, "once its prefix is in the cache"),
    "default scales": Stop(Faults(default_scales=True), PolicyNotApplied, "'fp8_per_tensor': layer 0 runs on default"),
    "skip list ignored": Stop(Faults(ignores_skip=True), PolicyNotApplied, "layer 0 is stored as float8_e4m3fn"),
}
"""Faults that stay: the study ends with a sentence, and what was measured before is whole."""


@pytest.mark.parametrize("stop", STOPPING.values(), ids=STOPPING)
def test_a_fault_that_stays_ends_the_study_and_a_later_run_goes_on(
    stop: Stop, undisturbed: Study, tmp_path: Path
) -> None:
    study = Study(tmp_path, stop.faults)
    with pytest.raises(stop.error) as caught:
        study.run()
    assert stop.says in caught.value.message
    assert caught.value.hint
    kept = study.trials
    assert set(keys(kept).values()) <= {1}
    healed = Study(tmp_path)
    healed.run(kept)
    assert keys(healed.trials) == keys(undisturbed.trials)
    assert scores(healed.trials) == scores(undisturbed.trials)


def test_a_server_that_came_back_is_warmed_up_before_it_is_timed(tmp_path: Path) -> None:
    study = Study(tmp_path)
    arm, prompts = Arm("bf16", CachePolicy.native(study.case.spec.num_layers)), [tuple(range(40))]
    with study.stable.engine() as engine, engine.open(arm) as session:
        session.generate(prompts, 8)
        study.faults.deaths = 1
        session.generate(prompts, 8)
        session.generate(prompts, 8)
    first, second = (
        [body["max_tokens"] for body in player.bodies if body.get("stream") and body["prompt"] == [*prompts[0]]]
        for player in study.stable.started
    )
    assert first == [8, 8], "the second was not answered"
    assert second == [2, 8, 8]


@pytest.mark.parametrize("after", [0, 3, 10, 25, 40])
def test_killed_anywhere_it_goes_on(after: int, undisturbed: Study, tmp_path: Path) -> None:
    kept: list[Trial] = []

    def sink(trial: Trial) -> None:
        if len(kept) == after:
            raise KeyboardInterrupt
        kept.append(trial)

    study = Study(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        study.run(sink=sink)
    resumed = Study(tmp_path)
    resumed.run(kept)
    assert keys(resumed.trials) == keys(undisturbed.trials)
    assert scores(resumed.trials) == scores(undisturbed.trials)


def test_each_recipe_is_started_once(undisturbed: Study) -> None:
    """bf16 with its bound, chunked, unit, per tensor, per head, that with layers skipped, and one type alone twice."""
    started = [(Path(p.model).name, p.cache_dtype, p.skip, p.chunk) for p in undisturbed.stable.started]
    assert len(started) == len(set(started)) == 8
    assert started[0] == ("model", "bfloat16", (), None)


def test_what_was_read_back_is_said(undisturbed: Study) -> None:
    said = undisturbed.stable.said
    assert "bf16: 6 of 6 layers are BF16 as planned" in said
    assert "fp8_per_head: 6 of 6 layers carry the scales of the file" in said
    assert "fp8_per_head_skip: 2 of 6 layers carry the scales of the file, 4 are BF16 as planned" in said
    assert "bound: 6 of 6 layers are rounded as a probe" in said


def test_capacities_are_those_the_server_reports(undisturbed: Study) -> None:
    pools = [trial for trial in undisturbed.trials if type(trial).__name__ == "PoolTrial"]
    assert len(pools) == len({trial.arm for trial in pools}) == 9
    assert {trial.backend for trial in pools if isinstance(trial, PoolTrial)} == {"FAKE_ATTN"}


def test_the_conditions_say_how_kl_was_counted(undisturbed: Study, tmp_path: Path) -> None:
    evidence = Study(tmp_path).run(list(undisturbed.trials))
    assert evidence.conditions.kl_top_k == 20
    assert evidence.conditions.readback == "live"
    assert (evidence.conditions.engine, evidence.conditions.backend) == ("vllm", "FAKE_ATTN")
    assert evidence.conditions.engine_version == "0.32.0"
