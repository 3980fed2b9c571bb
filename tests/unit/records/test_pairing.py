"""Trials sorted by arm and item: pairing, what is left out, and the noise of BF16 repeated."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvtriage.records.evidence import ArmRecord
from kvtriage.records.pairing import KL, NEEDLE_HIT, NEEDLE_NLL, NLL, TOP1, Trials, kind_of, sort_trials
from kvtriage.records.trials import ScoreTrial, TimingTrial, Trial


def arm(name: str, role: str = "candidate", same_as: str | None = None) -> ArmRecord:
    return ArmRecord(
        name=name, label=name, policy=("native",), scaling="native", skip_layers=(), role=role, same_as=same_as
    )


def score(name: str, item: str, bucket: int, **metrics: float | None) -> ScoreTrial:
    return ScoreTrial(arm=name, task="t", item_id=item, bucket=bucket, scored_tokens=8, metrics=metrics, conditions="c")


ARMS = (arm("bf16", "baseline"), arm("bf16_repeat", "noise"), arm("fp8"), arm("twin", same_as="fp8"))


def sorted_from(readings: Mapping[str, list[dict[str, float | None]]]) -> Trials:
    trials: list[Trial] = [
        score(name, f"i{i}", 256, **row) for name, rows in readings.items() for i, row in enumerate(rows)
    ]
    return sort_trials(ARMS, trials)


def test_likelihoods_are_paired_with_bf16_and_other_metrics_are_drifts_already() -> None:
    trials = sorted_from({
        "bf16": [{"nll": 2.0, "kl": 0.0}, {"nll": 5.0, "kl": 0.0}],
        "fp8": [{"nll": 2.5, "kl": 0.1}, {"nll": 5.25, "kl": 0.2}],
    })  # fmt: skip
    assert trials.drift(NLL, "fp8").values == (0.5, 0.25)
    assert trials.drift(KL, "fp8").values == (0.1, 0.2)
    assert trials.drift(NLL, "twin") == trials.drift(NLL, "fp8")


def test_needles_are_told_from_text_and_buckets_from_each_other() -> None:
    rows = [
        score("bf16", "a", 256, nll=1.0),
        score("bf16", "b", 512, nll=2.0),
        score("bf16", "n", 512, nll=3.0, hit=1.0),
    ]
    trials = sort_trials(ARMS, rows)
    assert [kind_of(row) for row in rows] == ["text", "text", "retrieval"]
    assert trials.drift(NLL, "bf16", 512).values == (0.0,)
    assert len(trials.drift(NLL, "bf16").values) == 2
    assert trials.drift(NEEDLE_HIT, "bf16").values == (1.0,)
    assert trials.drift(NEEDLE_NLL, "bf16", 256).values == ()


@pytest.mark.parametrize("lost", [None, float("nan"), float("inf")])
def test_what_was_not_scored_is_counted_and_left_out(lost: float | None) -> None:
    trials = sorted_from({"bf16": [{"kl": 0.0}] * 3, "fp8": [{"kl": 0.1}, {"kl": lost}]})
    drift = trials.drift(KL, "fp8")
    assert (drift.values, drift.unscored) == ((0.1,), 2)


def test_a_contrast_may_weigh_its_reference() -> None:
    trials = sorted_from({"bf16": [{"kl": 0.3}], "fp8": [{"kl": 0.4}]})
    assert trials.paired("kl", "fp8", "bf16", KL.keeps(None), 1.5).values == pytest.approx((-0.05,))


def test_noise_is_a_mean_of_sizes_and_may_be_unknown() -> None:
    readings: dict[str, list[dict[str, float | None]]] = {
        "bf16": [{"nll": 2.0, "kl": 0.0}, {"nll": 3.0, "kl": 0.0}],
        "bf16_repeat": [{"nll": 2.1, "kl": 0.01}, {"nll": 2.9, "kl": 0.03}],
    }
    trials = sorted_from(readings)
    assert trials.noise(NLL) == pytest.approx(0.1)
    assert trials.noise(KL, 256) == pytest.approx(0.02)
    assert trials.noise(KL, 512) is None
    assert trials.noise(TOP1) is None
    assert Trials({"bf16": ARMS[0]}, trials.scores, {}).noise(KL) is None


def test_generations_are_single_sequences_with_steps() -> None:
    def timing(phase: str, steps: tuple[float, ...]) -> TimingTrial:
        return TimingTrial(
            arm="fp8", phase=phase, context_len=8, batch=1, repeat=0, ttft_s=1.0, token_s=steps, conditions="c"
        )

    trials = sort_trials(ARMS, [timing("latency", (0.1,)), timing("latency", ()), timing("throughput", (0.1,))])
    assert [trial.phase for trial in trials.generations_of("twin")] == ["latency"]
    assert len(trials.timings_of("fp8")) == 3
