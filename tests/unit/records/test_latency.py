from __future__ import annotations

import pytest

from kvtriage.records.evidence import ArmRecord
from kvtriage.records.latency import Crossing, crossing_of, expected_times, itl_line, longest_timed, traffic, ttft_curve
from kvtriage.records.pairing import Trials, sort_trials
from kvtriage.records.rule import Rule
from kvtriage.records.study import Study
from kvtriage.records.trials import TimingTrial
from kvtriage.stats import BreakEven

STUDY = Study(buckets=(200, 800), rule=Rule(output_tokens=100, context_weights=(3.0, 1.0)))


def timed(arms: dict[str, tuple[float, float]], lengths: tuple[int, ...] = (100, 200, 400, 800)) -> Trials:
    """(slope, intercept) by arm; every second repeat is 0.1 ms slower."""
    trials = [
        TimingTrial(
            arm=arm,
            phase="latency",
            context_len=n,
            batch=1,
            repeat=repeat,
            ttft_s=1e-7 * n * n + 1e-4 * n + 0.05 + 1e-4 * repeat,
            token_s=(slope * n + intercept + 1e-4 * repeat,) * 3,
            conditions="c",
        )
        for arm, (slope, intercept) in arms.items()
        for n in lengths
        for repeat in range(2)
    ]
    records = [
        ArmRecord(name=name, label=name, policy=("x",), scaling="unit", skip_layers=(), role="candidate")
        for name in arms
    ]
    return sort_trials(records, trials)


def test_traffic_is_the_buckets_by_their_weights() -> None:
    workload = traffic(STUDY)
    assert (workload.shares, workload.mean_prompt, workload.mean_decoded_at) == ((0.75, 0.25), 350, 400)
    assert traffic(Study()).shares == (0.5, 0.5)


def test_times_over_the_traffic() -> None:
    times = expected_times(timed({"bf16": (1e-5, 0.01)}), "bf16", traffic(STUDY))
    assert times is not None
    assert times.ttft is not None
    assert times.request is not None
    assert times.itl.value == pytest.approx(1e-5 * 400 + 0.01 + 5e-5)
    ttft = 1e-7 * (0.75 * 200**2 + 0.25 * 800**2) + 1e-4 * 350 + 0.05 + 5e-5
    assert times.ttft.value == pytest.approx(ttft)
    assert times.request.value == pytest.approx(ttft + 99 * times.itl.value)


def test_too_few_lengths() -> None:
    two, one = timed({"bf16": (1e-5, 0.01)}, (100, 200)), timed({"bf16": (1e-5, 0.01)}, (100,))
    assert (itl_line(one, "bf16"), ttft_curve(two, "bf16"), longest_timed(one, "bf16")) == (None, None, 100)
    assert (expected_times(one, "bf16", traffic(STUDY)), longest_timed(one, "fp8")) == (None, 0)
    times = expected_times(two, "bf16", traffic(STUDY))
    assert times is not None
    assert (times.ttft, times.request) == (None, None)
    assert crossing_of(one, "bf16", "bf16", STUDY, 4096) is None


@pytest.mark.parametrize(
    ("fp8", "words"),
    [
        ((1e-5, 0.010), "break-even not known"),
        ((1e-5, 0.012), "slower at every measured length, 100 to 800 tokens"),
        ((1e-5, 0.008), "faster at every measured length, 100 to 800 tokens"),
        ((4e-6, 0.0125), "faster beyond 4"),
    ],
)
def test_crossings_in_words(fp8: tuple[float, float], words: str) -> None:
    """Parallel lines are known at the lengths timed and nowhere else."""
    found = crossing_of(timed({"bf16": (1e-5, 0.010), "fp8": fp8}), "bf16", "fp8", STUDY, 1_000_000)
    assert found is not None
    assert found.in_words().startswith(words)


def test_a_crossing_at_the_lengths_timed_is_told_where_the_rest_is_open() -> None:
    met = Crossing(BreakEven("cannot_tell"), BreakEven("at", 300.0, 250.0, 350.0), (100, 800))
    assert met.in_words() == "faster beyond 300 tokens (250 to 350)"
    assert met.met is met.measured
