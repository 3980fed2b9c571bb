"""What the figures say of a case: the answer in words, and the numbers under it."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import geometric_mean

import msgspec
import pytest

from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.price import capacity_tokens
from kvtriage.records.evidence import Stop
from kvtriage.records.pairing import sort_trials
from kvtriage.records.trials import ScoreTrial, TimingTrial
from kvtriage.report.arms import describe_policy, layer_ranges, style_of
from kvtriage.report.charts.svg import to_markup
from kvtriage.report.figures import FIGURES
from kvtriage.report.figures.base import Absent, Figure
from kvtriage.report.quality import METRICS, drift_of
from kvtriage.report.tables import arm_rows, held_bytes, reason_groups
from kvtriage.stages.quality import quality_clauses
from kvtriage.units import format_tokens
from tests.unit.report.cases import (
    DEPTHS,
    Case,
    deep,
    gemma_like,
    large,
    smollm_like,
    view_of,
    without_arms,
    written_by_bf16,
)


def drawn(name: str, case: Case) -> Figure:
    figure = FIGURES[name](view_of(case))
    assert isinstance(figure, Figure)
    return figure


@pytest.mark.parametrize("name", [name for name in FIGURES if name != "frontier"])
def test_every_table_is_as_wide_as_its_heading(name: str) -> None:
    figure = drawn(name, gemma_like())
    assert figure.table.rows
    assert {len(row) for row in figure.table.rows} == {len(figure.table.columns)}
    assert figure.question.endswith("?")
    assert figure.answer.endswith(".")


def test_capacity_has_a_curve_for_each_way_of_storing() -> None:
    case = gemma_like()
    figure = drawn("capacity", case)
    assert [column.name for column in figure.table.columns] == [
        "context, tokens", "BF16", "FP8, every layer ✓", "FP8, 15 skipped",
    ]  # fmt: skip
    memory, spec = case.plan.study.memory_bytes, view_of(case).spec
    expected = format_tokens(capacity_tokens(spec, CachePolicy.native(18), 32_768, memory))
    assert figure.table.rows[-1][:2] == ("32,768", expected)
    assert [row[0] for row in figure.table.rows[:4]] == ["128", "256", "512", "1,024"]


def test_drift_is_paired_with_bf16_on_the_same_item() -> None:
    case = smollm_like()
    scores = {(t.arm, t.item_id): t.metrics["nll"] for t in case.trials if isinstance(t, ScoreTrial)}
    items = [item for arm, item in scores if arm == "fp8_unit" and item.startswith("text-256")]
    gaps = [(scores["fp8_unit", item] or 0) - (scores["bf16", item] or 0) for item in items]
    view = view_of(case)
    arm = next(arm for arm in case.evidence.arms if arm.name == "fp8_unit")
    drift = drift_of(view, METRICS[1], arm, 256)
    assert drift is not None
    assert drift.interval.mean == pytest.approx(sum(gaps) / len(gaps))
    assert drift.interval.n == len(gaps) == 8


def test_an_arm_that_equals_another_speaks_through_it() -> None:
    case = gemma_like()
    view = view_of(case)
    twin = next(arm for arm in case.evidence.arms if arm.name == "fp8_per_head")
    original = next(arm for arm in case.evidence.arms if arm.name == "fp8_per_tensor")
    own, other = drift_of(view, METRICS[0], twin, None), drift_of(view, METRICS[0], original, None)
    assert own is not None
    assert other is not None
    assert own.interval == other.interval
    assert twin not in view.measured


@pytest.mark.parametrize("name", ["quality", "tradeoff"])
def test_the_intervals_of_a_look_are_said_to_be_wide(name: str) -> None:
    case = gemma_like()
    stop = Stop(look=1, looks=3, items=28, of_items=84, why="the choice is clear, FP8")
    stopped = replace(case, evidence=msgspec.structs.replace(case.evidence, stop=stop))
    assert "those of all 3 looks to hold together" in drawn(name, stopped).note
    assert "looks" not in drawn(name, case).note


def test_attention_types_name_the_costly_one() -> None:
    figure = drawn("attention_types", gemma_like())
    assert figure.answer.startswith("The 15 sliding layers alone cost KL 0.0")
    absent = FIGURES["attention_types"](view_of(smollm_like()))
    assert isinstance(absent, Absent)
    unrun = without_arms(gemma_like(), "fp8_sliding_only", "fp8_full_only")
    assert isinstance(FIGURES["attention_types"](view_of(unrun)), Absent)


def test_retrieval_is_laid_out_by_depth_and_length() -> None:
    case = smollm_like()
    figure = drawn("retrieval", case)
    view = view_of(case)
    candidates = [arm for arm in view.products if arm.role == "candidate"]
    buckets = case.plan.study.buckets
    assert len(figure.panels) == len(candidates)
    assert len(figure.table.rows) == len(candidates) * len(DEPTHS) * len(buckets)
    scores = {(t.arm, t.item_id): t for t in case.trials if isinstance(t, ScoreTrial) and t.task == "needle"}
    items = [item for arm, item in scores if arm == "bf16" and f"-{buckets[0]}-" in item and "@0.5#" in item]
    name = candidates[0].name
    gaps = [(scores[name, i].metrics["nll"] or 0) - (scores["bf16", i].metrics["nll"] or 0) for i in items]
    row = next(row for row in figure.table.cells if row[1:3] == (0.5, buckets[0]))
    assert row[3] == pytest.approx(sum(gaps) / len(gaps))
    found, before = (sum(scores[arm, i].metrics["hit"] or 0 for i in items) for arm in (name, "bf16"))
    assert row[4:] == (found, before, 2)
    assert len(items) == 2
    markup = to_markup(figure.panels[0].narrow)
    assert all(word in markup for word in ("10 %", "50 %", "95 %", "nats per token", "in BF16"))
    assert figure.answer.startswith(
        "No place finds fewer answers under the chosen arm than in BF16; their NLL rises most "
    )


def test_where_no_answer_is_less_likely_nothing_is_called_lost() -> None:
    case = smollm_like()
    before = {t.item_id: t for t in case.trials if isinstance(t, ScoreTrial) and (t.arm, t.task) == ("bf16", "needle")}
    trials = tuple(
        msgspec.structs.replace(t, metrics={**t.metrics, "nll": (before[t.item_id].metrics["nll"] or 0.0) - 0.01})
        if isinstance(t, ScoreTrial) and t.task == "needle" and t.arm != "bf16"
        else t
        for t in case.trials
    )
    answer = drawn("retrieval", replace(case, trials=trials)).answer
    assert answer == "No place finds fewer answers under the chosen arm than in BF16; their NLL rises nowhere."


def test_needles_of_no_known_depth_are_laid_out_nowhere() -> None:
    case = smollm_like()
    trials = tuple(
        msgspec.structs.replace(t, item_id=t.item_id.replace("@", "-")) if isinstance(t, ScoreTrial) else t
        for t in case.trials
    )
    assert isinstance(FIGURES["retrieval"](view_of(replace(case, trials=trials))), Absent)


def test_layers_and_heads_find_the_planted_place() -> None:
    case = smollm_like()
    assert drawn("layers", case).answer == (
        "In mantissa no layer stands out; the most sensitive is layer 3. Range is lost above all in layer 11: "
        "KL 0.0635 by itself, where the best scales reach 0.000718."
    )
    assert drawn("heads", case).answer.startswith("The worst is head 1 of layer 11")
    assert "Range adds little anywhere: at most KL 0.000" in drawn("layers", gemma_like()).answer
    assert drawn("layers", large()).answer.startswith("Mantissa is lost above all in layers 1–2, 40.")
    plain = tuple(row for row in case.sensitivities.layer_probes if row.format == "fp8:unit")
    unbound = replace(case, sensitivities=msgspec.structs.replace(case.sensitivities, layer_probes=plain))
    assert drawn("layers", unbound).answer == "Layer 11 is the most sensitive: KL 0.0635 by itself."


def test_a_type_that_stands_in_is_not_called_the_most_sensitive_layers() -> None:
    case = gemma_like()
    probes = msgspec.structs.replace(case.sensitivities, suspects_stand_out=False)
    figure = drawn("layers", replace(case, sensitivities=probes))
    assert figure.answer.startswith(
        "In mantissa no layer stands out; of the attention types the sliding layers together lose most, layers 0–4, "
        "6–10, 12–16. "
    )
    assert " ▸ marks the attention type that together loses most in mantissa, not proven." in figure.note


def test_only_what_bf16_found_can_be_lost() -> None:
    case = smollm_like()
    missed = tuple(
        msgspec.structs.replace(t, metrics=t.metrics | {"hit": 0.0})
        if isinstance(t, ScoreTrial) and t.task == "needle" and t.arm != "bf16"
        else t
        for t in case.trials
    )
    assert drawn("retrieval", replace(case, trials=missed)).answer.startswith("Under the chosen arm most is lost ")


def test_a_layer_says_which_of_its_numbers_are_estimates() -> None:
    case = smollm_like()
    probes = case.sensitivities.layer_probes
    rows = tuple(msgspec.structs.replace(row, exact=row.format != "mantissa") for row in probes)
    screened = replace(case, sensitivities=msgspec.structs.replace(case.sensitivities, layer_probes=rows))
    figure = drawn("layers", screened)
    assert {row[3] for row in figure.table.rows} == {"scale-free bound"}
    markup = to_markup(figure.panels[0].narrow)
    assert "layer 11: FP8, scale 1 0.0635" in markup
    assert "scale-free bound ~" in markup
    assert figure.facts["estimated_layers"] == 0
    assert figure.answer.endswith("KL 0.0635 by itself, where the best scales reach ~0.000718.")


def test_what_the_verdict_shows_to_be_no_fault_is_not_called_lost() -> None:
    for case in (smollm_like(), large()):
        healthy = replace(case, verdict=msgspec.structs.replace(case.verdict, repair="none"))
        told = drawn("layers", healthy).answer
        assert " is largest in layer" in told
        assert "lost" not in told
        assert told.endswith("Neither is shown to be wrong.")
    assert "Neither is" not in drawn("layers", smollm_like()).answer


def test_repairable_is_what_lies_beyond_the_bound() -> None:
    figure = drawn("repairable", gemma_like())
    assert figure.answer.startswith("At most 10.0 % of it: all 18 layers at scale 1 cost KL 0.02")
    assert [row[0] for row in figure.table.rows][::3] == ["all 18 layers", "3 full layers", "15 sliding layers"]
    case = smollm_like()
    bound = tuple(row for row in case.sensitivities.type_probes if row.format == "mantissa")
    alone = replace(case, sensitivities=msgspec.structs.replace(case.sensitivities, type_probes=bound))
    assert drawn("repairable", alone).answer == "Scale 1 was not probed beside other scales or the scale-free bound."


def test_repairable_is_what_calibrated_scales_won_back_where_they_beat_the_bound() -> None:
    case = gemma_like()
    rows = tuple(
        msgspec.structs.replace(row, kl=tuple(kl * 0.6 / 0.93 for kl in row.kl))
        if row.format == "fp8:per_head"
        else row
        for row in case.sensitivities.type_probes
    )
    better = replace(case, sensitivities=msgspec.structs.replace(case.sensitivities, type_probes=rows))
    answer = drawn("repairable", better).answer
    assert answer.startswith("At most 40.0 % of it: all 18 layers at scale 1 cost KL 0.02")
    assert ", FP8 per-head 0.012" in answer


def test_what_no_probe_measured_is_not_called_repairable() -> None:
    case = smollm_like()
    probes = case.sensitivities.type_probes
    rows = tuple(msgspec.structs.replace(row, exact=row.format == "fp8:unit") for row in probes)
    screened = replace(case, sensitivities=msgspec.structs.replace(case.sensitivities, type_probes=rows))
    figure = drawn("repairable", screened)
    assert figure.answer == (
        "Not known: no probe measured both scale 1 and what other scales reach. The next figure has what is predicted."
    )
    assert figure.facts["repairable_share"] is None
    assert {(row[1], row[2]) for row in figure.table.rows} >= {("FP8 scale 1", ""), ("Scale-free bound", "yes")}
    assert "~0." in to_markup(figure.panels[0].narrow)
    assert "~" not in to_markup(drawn("repairable", case).panels[0].narrow)


def test_cells_of_the_reasons_are_lengths() -> None:
    case = gemma_like()
    cells = {row.cell for entry in reason_groups(view_of(case)) for row in entry.rows}
    assert {f"{format_tokens(bucket)} tokens" for bucket in case.plan.study.buckets} <= cells
    assert not any(cell.startswith(("bucket", "context")) for cell in cells)


def test_prices_are_written_so_that_their_ratios_can_be_checked() -> None:
    case = gemma_like()
    for arm in arm_rows(view_of(case)):
        for amount, exactly, _ in arm.prices:
            number, unit = amount.split()
            size = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}[unit]
            count = int(exactly.removesuffix(" B").replace(",", ""))
            assert float(number.replace(",", "")) == math.floor(count / size * 100 + 0.5) / 100
    amounts = {arm.short: [amount for amount, _, _ in arm.prices] for arm in arm_rows(view_of(case))}
    assert amounts["BF16"][0] == "4.5 MiB"
    assert amounts["FP8 scale 1"][0] == "2.25 MiB"
    assert amounts["FP8 per-head + skip"][0] == "4.13 MiB"


def test_an_arm_equal_to_another_names_it_as_the_figures_do() -> None:
    case = gemma_like()
    arms = tuple(
        msgspec.structs.replace(arm, same_as="fp8_per_tensor") if arm.name == "fp8_per_head" else arm
        for arm in case.evidence.arms
    )
    twin = replace(case, evidence=msgspec.structs.replace(case.evidence, arms=arms))
    words = {arm.short: arm.words for arm in arm_rows(view_of(twin))}
    assert words["FP8 per-head"].endswith("equal to FP8 per-tensor to the bit; not run again")


def test_held_out_says_what_saturates() -> None:
    case = smollm_like()
    assert drawn("held_out", case).answer.startswith("Under calibrated scales at most 0.0020 % of a head saturates")
    rows = tuple(msgspec.structs.replace(row, saturated=0.0) for row in case.scales.held_out)
    clean = replace(case, scales=msgspec.structs.replace(case.scales, held_out=rows))
    assert drawn("held_out", clean).answer.startswith("Yes: under calibrated scales nothing saturates")


def test_sweep_sees_a_range_that_still_grows() -> None:
    case = gemma_like()
    assert drawn("sweep", case).answer.startswith("No: within 1,024 tokens")
    first = case.scales.sweep[0]
    grown = msgspec.structs.replace(first, amax=(*first.amax[:-1], first.amax[-1] * 2))
    sweep = (grown, *case.scales.sweep[1:])
    figure = drawn("sweep", replace(case, scales=msgspec.structs.replace(case.scales, sweep=sweep)))
    assert figure.answer.startswith("In 1 of 36 tensors")
    assert f"K of layer {first.layer_idx}" in figure.answer


def test_itl_reports_the_crossing_of_the_lines() -> None:
    figure = drawn("itl", smollm_like())
    assert figure.answer.startswith("On this machine FP8 per-head decodes faster beyond 7")
    row = next(row for row in figure.table.rows if row[0] == "FP8 per-head")
    assert row[6].startswith("faster beyond 7")


def timed(case: Case, baseline: tuple[float, float, float], other: tuple[float, float, float]) -> Case:
    """The case with lines (slope, intercept, noise) in place of its step times: BF16's, and every other arm's."""

    def again(trial: TimingTrial) -> TimingTrial:
        slope, intercept, noise = baseline if trial.arm == "bf16" else other
        step = slope * trial.context_len + intercept + noise * (-1) ** trial.repeat
        return msgspec.structs.replace(trial, token_s=(step,) * len(trial.token_s))

    return replace(case, trials=tuple(again(t) if isinstance(t, TimingTrial) else t for t in case.trials))


@pytest.mark.parametrize(("intercept", "word"), [(0.005, "faster"), (0.05, "slower")])
def test_itl_claims_no_more_than_the_lengths_that_were_timed(intercept: float, word: str) -> None:
    case = timed(smollm_like(), (1e-6, 0.020, 1e-6), (1e-6, intercept, 1e-6))
    contexts = case.plan.study.latency_contexts
    span = f"{format_tokens(min(contexts))} to {format_tokens(max(contexts))} tokens"
    figure = drawn("itl", case)
    said = f"{word} at every measured length, {span}"
    assert figure.answer == f"On this machine FP8 per-head decodes {said}."
    assert said in {row[6] for row in figure.table.rows}


def test_a_slope_is_not_compared_with_one_that_may_be_zero() -> None:
    sloped, flat = (
        {row[5] for row in drawn("itl", timed(smollm_like(), line, (2e-6, 0.02, 1e-7))).table.rows if row[0] != "BF16"}
        for line in ((1e-6, 0.020, 1e-7), (1e-11, 0.020, 1e-3))
    )
    assert sloped == {"200.0 %"}
    assert flat == {"not known"}


def test_itl_needs_two_lengths_and_ttft_three() -> None:
    case = smollm_like()
    few = tuple(t for t in case.trials if not isinstance(t, TimingTrial) or t.context_len == 512)
    figure = drawn("itl", replace(case, trials=few))
    assert figure.answer == "FP8 per-head was not timed at enough lengths for a line."
    assert {row[1] for row in figure.table.rows} == {"one length only"}
    assert {row[1] for row in drawn("ttft", replace(case, trials=few)).table.rows} == {"too few lengths"}


def test_fits_have_bands_and_the_traffic_its_expectations() -> None:
    case = timed(smollm_like(), (4e-5, 0.020, 1e-5), (2e-5, 0.022, 1e-5))
    figure = drawn("itl", case)
    markup = to_markup(figure.panels[0].narrow)
    assert markup.count('class="band"') >= len({row[0] for row in figure.table.rows})
    names = [column.name for column in figure.table.columns]
    rows = {row[0]: dict(zip(names, row, strict=True)) for row in figure.table.rows}
    at = sum(case.plan.study.buckets) / len(case.plan.study.buckets) + case.plan.study.rule.output_tokens / 2
    ratio = (2e-5 * at + 0.022) / (4e-5 * at + 0.020)
    assert rows["FP8 per-head"]["over the traffic: a token"].startswith(f"{ratio:.2f} (")
    assert rows["FP8 per-head"]["request"].startswith("0.")
    assert rows["BF16"]["over the traffic: a token"] == ""
    assert 'class="band"' in to_markup(drawn("ttft", case).panels[0].narrow)


def first_tokens(case: Case, slowdown: float, noise: float) -> Case:
    """Its times to first token on one parabola, FP8's `slowdown` times BF16's, and `noise` of itself off by turns."""

    def again(trial: TimingTrial) -> TimingTrial:
        exact = (2e-7 * trial.context_len + 1e-3) * trial.context_len + 0.1
        share = (1.0 if trial.arm == "bf16" else slowdown) * (1 + noise * (-1) ** trial.repeat)
        return msgspec.structs.replace(trial, ttft_s=exact * share)

    return replace(case, trials=tuple(again(t) if isinstance(t, TimingTrial) else t for t in case.trials))


def test_first_tokens_are_compared_where_their_fits_can_be_told_apart() -> None:
    case = smollm_like()
    longest = format_tokens(max(case.plan.study.latency_contexts))
    apart = drawn("ttft", first_tokens(case, 1.4, 0.001)).answer
    assert apart.startswith(f"By their fits, at {longest} tokens FP8 per-head takes ")
    assert ": 1.40 times as long (1." in apart
    close = drawn("ttft", first_tokens(case, 1.4, 0.6)).answer
    assert close == (
        f"Can't tell: at {longest} tokens the fits of FP8 per-head and BF16 lie too close for their errors on this "
        "machine."
    )
    once = tuple(t for t in case.trials if not isinstance(t, TimingTrial) or t.repeat == 0)
    lengths = sorted({t.context_len for t in once if isinstance(t, TimingTrial) and t.phase == "latency"})[:3]
    single = tuple(t for t in once if not isinstance(t, TimingTrial) or t.context_len in lengths)
    assert drawn("ttft", replace(case, trials=single)).answer.startswith("Can't tell: at ")
    two = tuple(t for t in once if not isinstance(t, TimingTrial) or t.context_len in lengths[:2])
    assert drawn("ttft", replace(case, trials=two)).answer.startswith("Can't tell: FP8 per-head and BF16 were not both")


def test_disturbed_generations_are_counted_and_bend_no_line() -> None:
    case = large()
    slow = next(t for t in case.trials if isinstance(t, TimingTrial) and (t.arm, t.phase) == ("bf16", "latency"))
    wild = msgspec.structs.replace(slow, token_s=tuple(10 * step for step in slow.token_s), ttft_s=300.0)
    disturbed = replace(case, trials=tuple(wild if t is slow else t for t in case.trials))
    for name in ("itl", "ttft"):
        calm, now = (next(r for r in drawn(name, c).table.rows if r[0] == "BF16") for c in (case, disturbed))
        assert int(now[-1]) >= 1
        assert float(now[3]) == pytest.approx(float(calm[3]), rel=0.1)


def test_throughput_counts_the_tokens_of_all_sequences() -> None:
    case = smollm_like()
    timings = [t for t in case.trials if isinstance(t, TimingTrial) and (t.arm, t.phase) == ("bf16", "throughput")]
    mean = geometric_mean(4 * len(t.token_s) / sum(t.token_s) for t in timings)
    row = next(row for row in drawn("throughput", case).table.rows if row[0] == "BF16")
    assert float(row[3]) == pytest.approx(mean, rel=1e-5)


def throughput_of(arm: str, rates: tuple[float, ...]) -> list[TimingTrial]:
    return [
        TimingTrial(arm=arm, phase="throughput", context_len=512, batch=4, repeat=repeat, ttft_s=1.0,
                    token_s=(4 / rate,) * 8, conditions="")
        for repeat, rate in enumerate(rates)
    ]  # fmt: skip


def test_throughput_is_compared_within_each_repeat() -> None:
    """The machine slows down by half between repeats; FP8 is 10 % faster in each."""
    case = smollm_like()
    timings = throughput_of("bf16", (100.0, 51.0, 50.0)) + throughput_of("fp8_per_head", (110.0, 56.2, 55.0))
    figure = drawn("throughput", replace(case, trials=tuple(timings)))
    assert "10.1 % more with FP8" in figure.answer
    row = next(row for row in figure.table.rows if row[0] == "FP8 per-head")
    assert row[6] == "10.1 %"


@pytest.mark.parametrize(
    ("bf16", "fp8"), [((100.0, 90.0, 95.0), (98.0, 93.0, 95.0)), ((100.0,), (120.0,)), ((90.0, 90.0), (99.0, 99.0))]
)
def test_throughput_that_cannot_be_told_says_so(bf16: tuple[float, ...], fp8: tuple[float, ...]) -> None:
    case = smollm_like()
    trials = tuple(throughput_of("bf16", bf16) + throughput_of("fp8_per_head", fp8))
    figure = drawn("throughput", replace(case, trials=trials))
    assert figure.answer.startswith("Can't tell on this machine: in a repeat FP8 per-head gives")
    assert not [cell for row in figure.table.rows for cell in row if "∞" in cell or "inf" in cell]


@pytest.mark.parametrize("fp8", [(60.0, 210.0), (1.0, 100_000.0), (110.0, 111.0)])
def test_no_throughput_falls_by_more_than_all_of_it(fp8: tuple[float, ...]) -> None:
    case = smollm_like()
    trials = tuple(throughput_of("bf16", (100.0, 80.0)) + throughput_of("fp8_per_head", fp8))
    figure = drawn("throughput", replace(case, trials=trials))
    row = next(row for row in figure.table.rows if row[0] == "FP8 per-head")
    low = row[7].partition(" %")[0].replace("\N{MINUS SIGN}", "-")
    assert low == "no interval" or float(low) >= -100
    assert f"{row[6].lstrip(chr(0x2212))} more" in figure.answer
    assert f"({row[7]})" in figure.answer
    assert not [cell for cell in row[4:6] if cell.startswith("\N{MINUS SIGN}")]


def test_every_drift_is_drawn_beside_its_noise() -> None:
    case = smollm_like()
    panels = drawn("quality", case).panels
    drawings = [to_markup(panel.narrow) for panel in panels]
    assert ["noise</text>" in drawing for drawing in drawings] == [True, True, True, True, False]
    assert "BF16 repeated" in drawings[-1]
    still = tuple(
        msgspec.structs.replace(trial, metrics={**trial.metrics, "kl": 0.5})
        if isinstance(trial, ScoreTrial) and trial.arm == "bf16_repeat"
        else trial
        for trial in case.trials
    )
    assert drawn("quality", replace(case, trials=still)).answer.endswith("a noise floor of 0.500, and so inside it.")
    unrepeated = drawn("quality", without_arms(case, "bf16_repeat"))
    assert not any("noise</text>" in to_markup(panel.narrow) for panel in unrepeated.panels)


def test_answers_found_have_wilsons_interval() -> None:
    view = view_of(gemma_like())
    arm = next(arm for arm in view.evidence.arms if arm.name == "fp8_unit_skip")
    drift = drift_of(view, METRICS[4], arm, 256)
    assert drift is not None
    assert (drift.interval.mean, drift.interval.n) == (1.0, 6)
    assert drift.interval.low == pytest.approx(0.6097, abs=1e-4)


def test_what_bf16_wrote_is_read_span_by_span_and_agreement_arm_by_arm() -> None:
    figure = drawn("quality", written_by_bf16(smollm_like()))
    titles = [panel.title for panel in figure.panels]
    first, second = "KL along what BF16 wrote, tokens 1–32", "KL along what BF16 wrote, tokens 33–128"
    agreed = "Written as BF16 writes"
    assert titles[-3:] == [first, second, agreed]
    cells = {(row[0], row[1], row[2]): row[3] for row in figure.table.cells}
    assert cells[first, 256, "FP8 scale 1"] == pytest.approx(0.01)
    assert cells[second, "all", "FP8 scale 1"] == pytest.approx(0.03)
    assert (cells[agreed, 256, "BF16 repeated"], cells[agreed, 256, "FP8 scale 1"]) == (1.0, 0.75)
    assert figure.facts[f"{first}, margin"] == 0.05
    assert not any(agreed in name for name in figure.facts)
    assert all(row[6] is None for row in figure.table.cells if row[0] == agreed)


def test_report_and_verdict_read_the_same_drift() -> None:
    case = smollm_like()
    view = view_of(case)
    trials = sort_trials(case.evidence.arms, case.trials)
    reasons = quality_clauses(trials, ["fp8_unit"], case.plan.study.buckets, case.plan.study.rule)
    arm = next(arm for arm in case.evidence.arms if arm.name == "fp8_unit")
    for clause, metric in zip(("kl", "nll", "top1", "needle"), METRICS, strict=False):
        drift = drift_of(view, metric, arm, 256)
        reason = next(r for r in reasons if (r.clause, r.cell) == (clause, "bucket 256"))
        assert drift is not None
        interval = drift.interval
        assert (reason.value, reason.low, reason.high, reason.items) == (
            interval.mean, interval.low, interval.high, interval.n,
        )  # fmt: skip


def test_bytes_held_are_compared_with_the_worksheet() -> None:
    case = smollm_like()
    held = held_bytes(view_of(case))
    assert held is not None
    assert "in 6 of 6 caches weighed" in held[0]
    assert {row[0] for row in held[1].rows} <= {style_of(arm).short for arm in case.evidence.arms}


def test_reasons_show_what_is_unbounded_or_without_a_value() -> None:
    case = smollm_like()
    reasons = tuple(
        msgspec.structs.replace(reason, low=None, high=None) if reason.clause == "kl" else reason
        for reason in case.verdict.reasons
    )
    view = view_of(replace(case, verdict=msgspec.structs.replace(case.verdict, reasons=reasons)))
    groups = reason_groups(view)
    assert [group.arm for group in groups if group.chosen] == ["FP8 per-head"]
    rows = [row for group in groups for row in group.rows]
    assert len(rows) == len(reasons)
    assert {row.interval for row in rows if row.clause == "KL divergence"} == {"unbounded"}
    backend = next(row for row in rows if row.clause == "backend")
    assert (backend.value, backend.interval, backend.threshold, backend.status) == ("", "", "", "met")


def test_arms_have_distinct_looks_and_an_unknown_one_keeps_its_name() -> None:
    arms = gemma_like().evidence.arms
    looks = [(style_of(arm).css, style_of(arm).shape) for arm in arms]
    assert len(set(looks)) == len(looks)
    stranger = msgspec.structs.replace(arms[0], name="an_arm_with_a_very_long_name")
    assert style_of(stranger).short == "an_arm_with_a_very_…"
    assert style_of(stranger).css == "arm-other"


def test_layers_are_named_in_runs() -> None:
    assert layer_ranges((0, 1, 2, 5, 7, 8)) == "0–2, 5, 7–8"
    assert layer_ranges(()) == ""
    arms = {arm.name: describe_policy(arm) for arm in smollm_like().evidence.arms}
    assert (arms["bf16"], arms["fp8_unit"], arms["fp8_unit_skip"]) == ("BF16", "FP8, every layer", "FP8, 1 skipped")


def test_capacity_says_when_not_one_sequence_fits() -> None:
    assert drawn("capacity", large()).answer == (
        "At the model's limit of 131,072 tokens not one BF16 sequence fits; none in FP8 either."
    )
    case = large()
    study = msgspec.structs.replace(case.plan.study, memory_bytes=32 * 1024**3)
    roomier = replace(case, plan=msgspec.structs.replace(case.plan, study=study))
    assert drawn("capacity", roomier).answer.endswith("fits; FP8, every layer holds 131,072 tokens.")


def test_breakeven_has_a_line_for_each_arm_with_its_interval() -> None:
    figure = drawn("breakeven", smollm_like())
    assert figure.answer.startswith("On this machine FP8 per-head is faster beyond 7")
    assert [row[0] for row in figure.table.rows] == [
        "FP8 scale 1", "FP8 per-tensor", "FP8 per-head", "FP8 per-head + skip", "FP8 scale 1 + skip",
    ]  # fmt: skip
    for row in figure.table.cells:
        value, low, high = (float(cell) for cell in row[2:] if isinstance(cell, float))
        assert low < value < high
    for panel in figure.panels:
        assert panel.wide is not None
        assert "(" in to_markup(panel.narrow)
        assert "faster beyond" in to_markup(panel.wide)


def test_breakeven_beyond_what_was_timed_says_so() -> None:
    case = timed(smollm_like(), (2e-6, 0.020, 1e-7), (1e-6, 0.025, 1e-7))
    assert ", beyond the 1,024 that were timed." in drawn("breakeven", case).answer


@pytest.mark.parametrize(
    ("intercept", "spread", "said"),
    [(0.005, 1e-6, "always faster here"), (0.05, 1e-6, "always slower here"), (0.02, 5e-3, "can't tell")],
)
def test_breakeven_that_is_nowhere_is_told_in_words(intercept: float, spread: float, said: str) -> None:
    case = timed(smollm_like(), (1e-6, 0.020, spread), (1e-6, intercept, spread))
    markup = to_markup(drawn("breakeven", case).panels[0].narrow)
    assert said in markup
    assert ('class="bar"' in markup) is (said == "always faster here")


def test_breakeven_that_may_not_be_is_told_from_where_it_is_certain() -> None:
    """Known among the lengths timed alone, and there from 298.8 tokens on: the bar ends where they do."""
    case = timed(smollm_like(), (1e-6, 0.020, 1e-4), (8e-7, 0.0199, 1e-4))
    figure = drawn("breakeven", case)
    assert figure.answer == "On this machine FP8 per-head is faster beyond 299 tokens at the latest."
    _, said, value, low, high = figure.table.cells[0]
    assert (said, value, low) == ("faster beyond 299 tokens at the latest", None, 128)
    assert high == pytest.approx(298.8, abs=0.1)
    markup = to_markup(figure.panels[0].narrow)
    assert "known from 299 on" in markup
    assert markup.count('class="bar"') == markup.count('class="band"') == len(figure.table.cells)
    assert 'class="mark' not in markup, "no mark where they need not cross"


def test_breakeven_needs_both_lines() -> None:
    case = smollm_like()
    few = tuple(t for t in case.trials if not isinstance(t, TimingTrial) or t.context_len == 512)
    assert isinstance(FIGURES["breakeven"](view_of(replace(case, trials=few))), Absent)


def test_a_deep_model_keeps_its_tables_and_curves_in_bounds() -> None:
    case = deep(600)
    layers = drawn("layers", case)
    assert (len(layers.table.rows), len(layers.table.printed)) == (600, 100)
    assert "A row is 4 neighbouring layers" in layers.note
    sweep = drawn("sweep", case)
    assert to_markup(sweep.panels[0].narrow).count('class="curve"') <= 83
    assert layer_ranges(tuple(range(0, 600, 2))).endswith(" 30 and 284 more")
