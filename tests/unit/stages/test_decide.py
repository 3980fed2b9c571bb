"""Every branch of the rule, on cases whose right answer is known."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvtriage.cli.summary import render_verdict
from kvtriage.errors import CaseError, EngineError, StudyError
from kvtriage.records.pairing import Trials
from kvtriage.records.rule import Rule
from kvtriage.records.trials import PoolTrial, ScoreTrial
from kvtriage.records.verdict import Reason, RepairChoice, Verdict
from kvtriage.stages.decide import decide
from tests.unit.stages.fake_case import STUDY, FakeCase, hybrid
from tests.unit.stages.verdict_cases import (
    CONDITIONS,
    HOPELESS,
    LAYERS,
    OFFSET,
    OFFSET_AND_UNDERFLOW,
    SPREAD_HEADS,
    UNDERFLOW,
    Case,
    drifting,
    without,
)

SPARE_ARMS = ("fp8_per_tensor", "fp8_per_head", "fp8_unit_skip", "fp8_per_head_skip")
UNIT = RepairChoice(scaling="unit", skip_layers=())


def reason(verdict: Verdict, clause: str, arm: str, cell: str = "all") -> Reason:
    (found,) = [r for r in verdict.reasons if (r.clause, r.arm, r.cell) == (clause, arm, cell)]
    return found


def said(verdict: Verdict) -> str:
    return " ".join((verdict.headline, *verdict.sentences, *verdict.caveats, verdict.next_step))


@pytest.mark.parametrize(
    ("case", "repair", "scaling", "skip", "arm"),
    [
        (Case(), "none", "unit", (), "fp8_unit"),
        (UNDERFLOW, "scales", "per_tensor", (), "fp8_per_tensor"),
        (SPREAD_HEADS, "scales", "per_head", (), "fp8_per_head"),
        (OFFSET, "skip", "unit", (3,), "fp8_unit_skip"),
        (OFFSET_AND_UNDERFLOW, "both", "per_head", (3,), "fp8_per_head_skip"),
        (HOPELESS, "skip", "native", tuple(range(LAYERS)), "bf16"),
    ],
    ids=["none", "per_tensor", "per_head", "skip", "both", "native"],
)
def test_the_cheapest_repair_that_holds(case: Case, repair: str, scaling: str, skip: tuple[int, ...], arm: str) -> None:
    verdict = case.decide()
    assert (verdict.status, verdict.repair, verdict.arm) == ("decided", repair, arm)
    assert verdict.choice == RepairChoice(scaling=scaling, skip_layers=skip)
    assert verdict.items_needed is None
    assert 3 <= len(verdict.sentences) <= 6


def test_the_same_evidence_in_another_order_gives_the_same_verdict() -> None:
    assert OFFSET.decide(OFFSET.trials()[::-1]) == OFFSET.decide()


# --- what is served -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "args", "ratio"),
    [
        (Case(), ("org/model", "--kv-cache-dtype", "fp8"), 2.0),
        (UNDERFLOW, ("case/checkpoint", "--kv-cache-dtype", "fp8"), 2.0),
        (OFFSET, ("org/model", "--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "3"), 12 / 7),
        (HOPELESS, ("org/model", "--kv-cache-dtype", "bfloat16"), 1.0),
    ],
)
def test_flags_and_bytes(case: Case, args: tuple[str, ...], ratio: float) -> None:
    verdict = case.decide()
    assert verdict.vllm_args == args
    assert verdict.ratio_vs_bf16 == pytest.approx(ratio)


def test_sliding_layers_are_priced_by_their_window() -> None:
    """Three of six layers slide over 128 of 1,024 tokens: A = 3456, S = 384."""
    case = replace(OFFSET, kinds=("sliding", "full") * 3, skip=(0, 2, 4))
    verdict = case.decide()
    assert verdict.ratio_vs_bf16 == pytest.approx(2 * 3456 / (3456 + 384))
    assert verdict.vllm_args[-1] == "sliding_window"
    assert "all 3 sliding layers" in verdict.headline


def test_a_native_cache_is_named_by_its_dtype() -> None:
    assert replace(HOPELESS, native_dtype="float16").decide().vllm_args[-1] == "float16"


def test_scales_without_a_checkpoint_name_no_model() -> None:
    verdict = replace(UNDERFLOW, checkpoint=None).decide()
    assert verdict.vllm_args == ("--kv-cache-dtype", "fp8")
    assert "kvtriage calibrate" in verdict.next_step


def test_a_demo_model_is_served_from_its_folder() -> None:
    case = Case()
    plan = msgspec.structs.replace(
        case.plan(), model=msgspec.structs.replace(case.plan().model, source="demo:smollm2-135m")
    )
    verdict = decide(plan, case.scales(), case.sensitivities(), case.evidence(), case.trials(), None, {})
    assert verdict.vllm_args[0] == "/models/model"


# --- what was not measured ----------------------------------------------------------------


def test_bf16_alone_decides_nothing() -> None:
    verdict = without(Case(), *(name for name in Case().kl if name not in ("bf16", "bf16_repeat"))).decide()
    assert (verdict.status, verdict.choice, verdict.vllm_args) == ("cannot_tell", None, ())
    assert verdict.headline == "Cannot tell yet: FP8 in any form was not measured."
    assert verdict.sentences[0] == "Nothing is known of FP8 here: BF16 alone was measured."
    assert verdict.next_step.startswith("Measure FP8 in any form too")


@pytest.mark.parametrize(
    ("left_out", "missing"),
    [
        (SPARE_ARMS, "calibrated scales and layers kept in BF16"),
        (("fp8_unit_skip", "fp8_per_head_skip"), "layers kept in BF16"),
        (("fp8_per_tensor", "fp8_per_head", "fp8_per_head_skip"), "calibrated scales"),
    ],
)
def test_bf16_is_no_choice_where_a_repair_was_not_tried(left_out: tuple[str, ...], missing: str) -> None:
    verdict = without(HOPELESS, *left_out).decide()
    assert (verdict.status, verdict.choice) == ("cannot_tell", None)
    assert f"{missing} were not measured" in verdict.headline
    assert missing in verdict.next_step


def test_what_holds_is_chosen_whatever_else_was_not_tried() -> None:
    assert without(Case(), *SPARE_ARMS).decide().choice == UNIT


@pytest.mark.parametrize(
    ("conditions", "says"),
    [
        ({"rounding": "towards zero", "backend": "CPU_ATTN"}, "CPU_ATTN rounds to E4M3 towards zero"),
        ({"repeat": "batches"}, "the noise floor is that of the batch alone"),
        ({"numerics": "attention", "probe_numerics": "storage"}, "the probes round K and V alone"),
        ({"mixed_backends": True}, "other attention backends than BF16's were allowed"),
    ],
)
def test_conditions_that_bend_the_numbers_are_caveats(conditions: dict[str, str | bool], says: str) -> None:
    assert any(says in caveat for caveat in replace(Case(), conditions=conditions).decide().caveats)
    assert not any(says in caveat for caveat in Case().decide().caveats)


def test_a_generation_of_kernels_is_no_other_backend() -> None:
    own = replace(Case(), conditions={"backend": "FLASH_ATTN, FA3", "engine": "vllm"}).decide()
    assert "own kernels" not in said(own)


# --- guards -------------------------------------------------------------------------------


def test_trials_of_other_conditions_are_refused() -> None:
    first, *rest = Case().trials()
    with pytest.raises(CaseError, match="other conditions"):
        Case().decide([msgspec.structs.replace(first, conditions="0" * 64), *rest])


def test_a_trial_of_an_unknown_arm_is_refused() -> None:
    first, *rest = Case().trials()
    with pytest.raises(CaseError, match="does not name"):
        Case().decide([msgspec.structs.replace(first, arm="fp4"), *rest])


def test_a_servers_pool_belongs_to_the_evidence_and_changes_no_verdict() -> None:
    pool = PoolTrial(
        arm="fp8_unit",
        tokens=1024,
        blocks=65,
        block_size=16,
        max_concurrency=1.0,
        memory_bytes=None,
        conditions=CONDITIONS,
    )
    case = Case()
    assert case.decide([*case.trials(), pool]) == case.decide()
    with pytest.raises(CaseError, match="other conditions"):
        case.decide([*case.trials(), msgspec.structs.replace(pool, conditions="0" * 64)])


def test_an_item_measured_twice_is_refused() -> None:
    trials = Case().trials()
    with pytest.raises(CaseError, match="stands twice under arm 'bf16'"):
        Case().decide([*trials, trials[0]])


def test_no_baseline_no_verdict() -> None:
    trials = [trial for trial in Case().trials() if trial.arm != "bf16"]
    with pytest.raises(CaseError, match="no BF16 trials"):
        Case().decide(trials)


@pytest.mark.parametrize("arm", ["fp8_unit", "fp8_per_head_skip", "bound"])
def test_fp8_without_any_drift_never_engaged(arm: str) -> None:
    with pytest.raises(EngineError, match=f"{arm}.*quantisation never engaged"):
        drifting(**{arm: 0.0}).decide()


def test_arms_that_are_each_other_are_refused() -> None:
    case = replace(Case(), same_as={"fp8_x": "fp8_y", "fp8_y": "fp8_x"})
    arms = {arm.name: arm for arm in case.arms()}
    with pytest.raises(CaseError, match="circle"):
        Trials(arms, {}, {}).scores_of("fp8_x")


def test_an_arm_that_was_asked_something_else_is_refused() -> None:
    first, *rest = (t for t in Case().trials() if isinstance(t, ScoreTrial) and t.arm == "fp8_unit")
    others = [t for t in Case().trials() if not (isinstance(t, ScoreTrial) and t.arm == "fp8_unit")]
    for changed in (
        msgspec.structs.replace(first, item_id="text-256-new"),
        msgspec.structs.replace(first, scored_tokens=32),
        msgspec.structs.replace(first, bucket=1024),
    ):
        with pytest.raises(CaseError, match="and BF16 was not"):
            Case().decide([*others, changed, *rest])


def test_a_bucket_without_items_is_refused() -> None:
    trials = [t for t in Case().trials() if not (isinstance(t, ScoreTrial) and t.bucket == 1024)]
    with pytest.raises(CaseError, match="a bucket of 1,024 tokens, and the evidence no item of that length"):
        Case().decide(trials)


# --- thin evidence ------------------------------------------------------------------------


def test_thin_evidence_cannot_tell_and_says_how_much_would() -> None:
    case = replace(drifting(bound=0.04, fp8_unit=0.048, fp8_per_tensor=0.036, fp8_per_head=0.036), spread=0.4)
    verdict = case.decide()
    assert (verdict.status, verdict.choice, verdict.arm, verdict.vllm_args) == ("cannot_tell", None, None, ())
    assert verdict.ratio_vs_bf16 is None
    undecided = [r for r in verdict.reasons if r.arm == "fp8_unit" and r.status == "cannot_tell" and r.cell != "all"]
    assert undecided
    assert all(r.items_needed is not None and r.items_needed > r.items for r in undecided)
    assert verdict.items_needed == max(r.items_needed or 0 for r in undecided)
    assert f"items_per_bucket = {verdict.items_needed} (now 8)" in verdict.next_step
    assert "Until then FP8 with per-tensor scales is the safe choice" in verdict.next_step
    assert "FP8 with scale 1" in verdict.headline


def test_as_many_items_as_were_asked_for_do_settle_it() -> None:
    """Twice as many, to be exact: the spread of eight items is itself only an estimate."""
    case = replace(without(drifting(bound=0.04, fp8_unit=0.046), *SPARE_ARMS), spread=0.4)
    needed = case.decide().items_needed
    assert needed is not None
    assert needed > case.items
    settled = replace(case, items=2 * needed).decide()
    assert (settled.status, settled.choice) == ("decided", UNIT)


def test_a_doubt_that_cannot_change_the_choice_is_no_doubt() -> None:
    """fp8_unit is undecided on KL, but its range is wrong either way."""
    verdict = replace(drifting(fp8_unit=0.048), spread=0.6).decide()
    assert reason(verdict, "kl", "fp8_unit", "bucket 256").status == "cannot_tell"
    assert reason(verdict, "range", "fp8_unit").status == "unmet"
    assert (verdict.status, verdict.arm) == ("decided", "fp8_per_tensor")


def test_a_doubt_about_a_dearer_arm_is_no_doubt() -> None:
    verdict = replace(drifting(fp8_unit_skip=0.05), spread=0.4).decide()
    assert (verdict.status, verdict.choice) == ("decided", UNIT)


def test_one_item_has_no_interval() -> None:
    verdict = replace(Case(), items=1).decide()
    kl = reason(verdict, "kl", "fp8_unit", "bucket 256")
    assert (kl.items, kl.low, kl.high, kl.status, kl.items_needed) == (1, None, None, "cannot_tell", None)
    assert (verdict.status, verdict.items_needed, verdict.repair) == ("cannot_tell", None, "none")
    assert "at least two items" in verdict.next_step


def test_two_equal_readings_decide_nothing() -> None:
    verdict = replace(Case(), items=2, top1={"fp8_unit": 0.05}).decide()
    top1 = reason(verdict, "top1", "fp8_unit", "bucket 256")
    assert (top1.items, top1.low, top1.high, top1.status, top1.items_needed) == (2, None, None, "cannot_tell", 4)


def test_needles_in_doubt_ask_for_needles() -> None:
    case = replace(Case(), needle={"fp8_unit": 0.249})
    verdict = case.decide()
    assert verdict.status == "cannot_tell"
    assert "needles_per_depth = " in verdict.next_step
    assert "items_per_bucket" not in verdict.next_step


def test_range_in_doubt_asks_for_no_items_of_its_own() -> None:
    """Only quality keeps fp8_unit in doubt; its range would need more items than that."""
    verdict = replace(
        drifting(bound=0.0285, fp8_unit=0.043, fp8_per_tensor=0.029, fp8_per_head=0.029), spread=0.4
    ).decide()
    in_range = reason(verdict, "range", "fp8_unit")
    assert (verdict.status, in_range.status) == ("cannot_tell", "cannot_tell")
    assert in_range.items_needed is not None
    assert verdict.items_needed is not None
    assert verdict.items_needed < in_range.items_needed


def test_range_in_doubt_does_not_block_but_is_said() -> None:
    verdict = replace(drifting(fp8_unit=0.0141), spread=0.6).decide()
    assert reason(verdict, "range", "fp8_unit").status == "cannot_tell"
    assert (verdict.status, verdict.choice) == ("decided", UNIT)
    assert "Whether better scales would win something back from FP8 with scale 1 is open" in said(verdict)


# --- the clauses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "clause"),
    [
        ({"top1": {"fp8_unit": 0.2}}, "top1"),
        ({"needle": {"fp8_unit": 0.5}}, "needle"),
        ({"kl": {**Case().kl, "fp8_unit": 0.06, "bound": 0.045}}, "kl"),
    ],
)
def test_one_unmet_clause_is_enough(changes: dict[str, Any], clause: str) -> None:
    verdict = replace(Case(), **changes).decide()
    assert reason(verdict, clause, "fp8_unit", "bucket 1024").status == "unmet"
    assert verdict.arm == "fp8_per_tensor"


def test_nll_is_paired_item_by_item() -> None:
    """Items differ by 0.3 nats from one another, arms by 0.01: only the pairing can see it."""
    nll = reason(Case().decide(), "nll", "fp8_unit", "bucket 256")
    assert nll.value == pytest.approx(0.0098, abs=0.001)
    assert nll.high is not None
    assert nll.low is not None
    assert nll.high - nll.low < 0.003


def test_range_is_read_against_the_best_of_bound_and_calibrated_arms() -> None:
    healthy, faulty = Case().decide(), UNDERFLOW.decide()
    assert reason(healthy, "range", "fp8_unit").status == "met"
    assert reason(healthy, "range", "fp8_unit").threshold == pytest.approx(0.005)
    wrong = reason(faulty, "range", "fp8_unit")
    assert wrong.status == "unmet"
    assert "of per-head scales, threshold" in wrong.text
    assert wrong.value == pytest.approx(0.0201, abs=0.001)
    offset = reason(OFFSET.decide(), "range", "fp8_per_tensor")
    assert "of the scale-free bound, threshold" in offset.text
    assert offset.status == "unmet"
    assert offset.threshold == pytest.approx(0.5 * 0.0775, rel=0.05)


@pytest.mark.parametrize("inflated", [0.02, 0.04, 0.3])
def test_an_inflated_bound_does_not_hide_range(inflated: float) -> None:
    """The bound's position is chosen by squared error, so an arm may well come out below it."""
    verdict = replace(UNDERFLOW, kl={**UNDERFLOW.kl, "bound": inflated}).decide()
    assert reason(verdict, "range", "fp8_unit").status == "unmet"
    assert (verdict.status, verdict.repair, verdict.arm) == ("decided", "scales", "fp8_per_tensor")
    assert "Mantissa is wrong" not in said(verdict)


def test_an_arm_is_not_its_own_reference_under_another_name() -> None:
    case = replace(without(UNDERFLOW, "fp8_per_head"), same_as={"fp8_per_head": "fp8_per_tensor"})
    assert "of the scale-free bound, threshold" in reason(case.decide(), "range", "fp8_per_tensor").text


def test_the_reference_has_an_error_of_its_own() -> None:
    """The excess alone is certain; half of a reference that swings from item to item is not."""
    case = without(drifting(bound=0.016, fp8_unit=0.0265), *SPARE_ARMS)
    assert reason(case.decide(), "range", "fp8_unit").status == "unmet"
    swinging = []
    for trial in case.trials():
        if isinstance(trial, ScoreTrial) and trial.task == "text" and trial.arm in ("bound", "fp8_unit"):
            swing = 0.012 * (1 if trial.item_id.endswith(("0", "2", "4", "6")) else -1)
            kl = (trial.metrics["kl"] or 0.0) + swing
            trial = msgspec.structs.replace(trial, metrics={**trial.metrics, "kl": kl})
        swinging.append(trial)
    in_range = reason(case.decide(swinging), "range", "fp8_unit")
    assert in_range.status == "cannot_tell"
    assert in_range.low is not None
    assert in_range.high is not None
    assert in_range.threshold is not None
    assert in_range.low <= in_range.threshold < in_range.high
    assert in_range.items_needed is not None
    assert in_range.items_needed > in_range.items


def test_an_excess_below_the_least_that_matters_is_right_whatever_its_ratio() -> None:
    in_range = reason(drifting(bound=0.002, fp8_unit=0.006, fp8_per_tensor=0.002, fp8_per_head=0.002).decide(),
                      "range", "fp8_unit")  # fmt: skip
    assert in_range.status == "met"
    assert in_range.threshold == 0.005


def test_range_inside_the_noise_is_not_wrong() -> None:
    case = replace(UNDERFLOW, kl={**UNDERFLOW.kl, "bf16_repeat": 0.03})
    in_range = reason(case.decide(), "range", "fp8_unit")
    assert in_range.status == "met"
    assert "inside the noise of BF16 repeated" in in_range.text


def test_gemma_as_measured_needs_nothing() -> None:
    verdict = drifting(bound=0.0207, fp8_unit=0.0229, fp8_per_tensor=0.0207, fp8_per_head=0.0207).decide()
    assert verdict.choice == UNIT


def test_a_skip_arm_is_read_against_the_same_skip_with_other_scales() -> None:
    verdict = OFFSET_AND_UNDERFLOW.decide()
    wrong = reason(verdict, "range", "fp8_unit_skip")
    assert "of per-head scales, threshold" in wrong.text
    assert wrong.status == "unmet"
    right = reason(verdict, "range", "fp8_per_head_skip")
    assert "of scale 1, threshold" in right.text
    assert right.status == "met"


def test_a_skip_without_another_of_its_kind_has_nothing_to_be_read_against() -> None:
    verdict = without(OFFSET, "fp8_per_head_skip").decide()
    assert not [r for r in verdict.reasons if r.clause == "range" and r.arm == "fp8_unit_skip"]


def test_without_the_bound_range_is_read_against_other_arms() -> None:
    verdict = without(UNDERFLOW, "bound").decide()
    assert reason(verdict, "range", "fp8_unit").status == "unmet"
    assert "scale-free bound was not measured" in said(verdict)
    alone = without(UNDERFLOW, "bound", *SPARE_ARMS).decide()
    assert not [r for r in alone.reasons if r.clause == "range"]


def test_range_that_nothing_repairs_is_still_better_than_bf16() -> None:
    """Range wrong at every granularity, margins kept: the least harmful arm of equal bytes."""
    case = drifting(fp8_unit=0.040, fp8_per_tensor=0.034, fp8_per_head=0.036)
    verdict = without(case, "fp8_unit_skip", "fp8_per_head_skip").decide()
    assert verdict.arm == "fp8_per_tensor"
    assert "although its range is off" in said(verdict)


def test_what_was_not_scored_is_counted_and_not_averaged() -> None:
    whole, holed = Case().decide(), replace(Case(), unscored={"fp8_unit": 2}).decide()
    before, after = (reason(v, "kl", "fp8_unit", "bucket 256") for v in (whole, holed))
    assert (before.items, after.items) == (8, 6)
    assert "2 of 8 items could not be scored" in after.text
    assert "4 items could not be scored under FP8 with scale 1 or BF16" in said(holed)
    assert after.value == pytest.approx(0.0098, rel=0.1)


def test_nothing_scored_is_not_zero() -> None:
    verdict = replace(Case(), unscored={"fp8_unit": 8}).decide()
    kl = reason(verdict, "kl", "fp8_unit", "bucket 256")
    assert (kl.value, kl.items, kl.status) == (None, 0, "cannot_tell")
    assert verdict.status == "cannot_tell"


def test_an_item_that_an_arm_never_ran_is_counted_too() -> None:
    trials = [
        trial
        for trial in Case().trials()
        if not (isinstance(trial, ScoreTrial) and trial.arm == "fp8_unit" and trial.item_id == "text-256-0")
    ]
    assert "1 of 8 items" in reason(Case().decide(trials), "nll", "fp8_unit", "bucket 256").text


def test_an_arm_that_is_another_answers_with_its_trials() -> None:
    case = replace(without(UNDERFLOW, "fp8_per_head"), same_as={"fp8_per_head": "fp8_per_tensor"})
    verdict = case.decide()
    tensor, head = (reason(verdict, "kl", arm, "bucket 1024") for arm in ("fp8_per_tensor", "fp8_per_head"))
    assert (tensor.value, tensor.low, tensor.items) == (head.value, head.low, head.items)
    assert "equal to the bit" in said(verdict)


def test_needle_hits_are_told() -> None:
    verdict = replace(Case(), hits={"fp8_unit": 5}).decide()
    assert (
        "6/6 answers found in BF16, 5/6 here (43.6 % to 97.0 %)"
        in reason(verdict, "needle", "fp8_unit", "bucket 256").text
    )
    assert "answers found 12/12 → 10/12" in said(verdict)


# --- capacity and latency -----------------------------------------------------------------


def test_a_capacity_floor_can_leave_no_choice() -> None:
    verdict = replace(OFFSET, rule=Rule(capacity_floor_ratio=1.9)).decide()
    assert (verdict.status, verdict.choice, verdict.items_needed, verdict.repair) == ("cannot_tell", None, None, "skip")
    assert reason(verdict, "capacity", "fp8_unit_skip").status == "unmet"
    assert reason(verdict, "capacity", "fp8_unit").status == "met"
    assert verdict.headline == (
        "No choice: the capacity floor of 1.90 times BF16 excludes BF16 and every arm that keeps the margins and can "
        "be served, and more items will not help."
    )
    assert "capacity_floor_ratio" in verdict.next_step
    assert "new case folder" in verdict.next_step
    assert "certain and not thin evidence" in said(verdict)


def test_a_capacity_floor_that_nothing_meets_is_certain() -> None:
    verdict = replace(Case(), rule=Rule(capacity_floor_ratio=2.5)).decide()
    assert (verdict.status, verdict.choice, verdict.items_needed, verdict.repair) == ("cannot_tell", None, None, "none")
    assert "excludes everything, FP8 in every layer included" in verdict.headline
    assert "more items will not help" in verdict.next_step


def test_a_capacity_floor_that_the_choice_keeps_is_no_matter() -> None:
    assert replace(OFFSET, rule=Rule(capacity_floor_ratio=1.7)).decide().arm == "fp8_unit_skip"


def test_what_fp8_needs_does_not_depend_on_the_floor() -> None:
    verdict = replace(OFFSET_AND_UNDERFLOW, rule=Rule(capacity_floor_ratio=1.9)).decide()
    assert (verdict.choice, verdict.repair) == (None, "both")


def test_latency_without_weight_is_only_told() -> None:
    verdict = replace(Case(), itl={"fp8_unit": (1e-5, 0.030)}).decide()
    assert verdict.choice == UNIT
    assert not [r for r in verdict.reasons if r.clause == "latency"]
    assert "slower at every measured length, 128 to 2,048 tokens; this rule gives latency no weight" in said(verdict)


def test_latency_with_weight_can_forbid() -> None:
    """One doubling is worth 10 % here, and FP8 costs 117 %: at 704 tokens of context 37 against 17 ms."""
    slow = dict.fromkeys((name for name in Case().kl if name.startswith("fp8")), (1e-5, 0.030))
    case = replace(Case(), itl=slow, rule=Rule(latency_weight=0.1))
    verdict = case.decide()
    clause = reason(verdict, "latency", "fp8_unit", "traffic")
    assert clause.status == "unmet"
    assert clause.threshold == pytest.approx(0.1)
    assert clause.value == pytest.approx(0.03704 / 0.01704 - 1, abs=0.01)
    assert (verdict.arm, verdict.repair) == ("bf16", "none")
    assert verdict.headline.startswith(
        "Stay with BF16: FP8 with scale 1 keeps the margins, but measured here, over the traffic"
    )
    assert replace(case, rule=Rule(latency_weight=2.0)).decide().choice == UNIT


@pytest.mark.parametrize(
    ("faulty", "repair"), [(UNDERFLOW, "scales"), (OFFSET, "skip"), (OFFSET_AND_UNDERFLOW, "both")]
)
def test_what_fp8_needs_does_not_depend_on_latency(faulty: Case, repair: str) -> None:
    slow = dict.fromkeys((name for name in Case().kl if name.startswith("fp8")), (1e-5, 0.030))
    verdict = replace(faulty, itl=slow, rule=Rule(latency_weight=0.1)).decide()
    assert (verdict.arm, verdict.repair) == ("bf16", repair)


def test_latency_with_weight_but_without_times_cannot_tell() -> None:
    case = replace(Case(), rule=Rule(latency_weight=0.1))
    verdict = case.decide([trial for trial in case.trials() if isinstance(trial, ScoreTrial)])
    assert verdict.status == "cannot_tell"
    assert "latency_repeats" in verdict.next_step


H100 = {"bf16": (8.94e-06, 4.03), "all": (7.14e-06, 4.07), "skip": (6.34e-06, 4.05)}
"""gpt-oss-20b, ms: skipping the sliding layers is faster than quantising them."""

HYBRID = replace(Case(), kinds=("sliding", "full") * 3, skip=(0, 2, 4))
"""Three of six layers slide over 128 tokens: skipping them leaves 1.80 of 2 times the tokens at 1,024."""


def hybrid_times(everything: tuple[float, float], skip: tuple[float, float]) -> dict[str, tuple[float, float]]:
    """In seconds; the synthetic repeats of these cases scatter by 10 µs."""
    times = {name: skip if name.endswith("_skip") else everything for name in Case().kl if name.startswith("fp8")}
    return {"bf16": H100["bf16"], **times}


def test_a_larger_arm_may_be_chosen_for_its_speed() -> None:
    """Sliding layers in BF16 cost a tenth of the capacity and win more than it is worth in time."""
    times = hybrid_times((7.14e-06, 4.07), (6.34e-06, 3.60))
    case = replace(HYBRID, itl=times, rule=Rule(latency_weight=0.5))
    verdict = case.decide()
    assert (verdict.arm, verdict.repair) == ("fp8_unit_skip", "none")
    assert verdict.headline == (
        "Serve FP8 with scale 1 and all 3 sliding layers in BF16: FP8 with scale 1 holds too, and is slower."
    )
    assert "11.11 % more tokens in the same memory, and a token of this choice takes 0.88 (" in said(verdict)
    assert replace(case, rule=Rule(latency_weight=0.0)).decide().arm == "fp8_unit"
    assert replace(case, rule=Rule(latency_weight=2.0)).decide().arm == "fp8_unit"


def test_a_larger_arm_that_only_looks_faster_is_not_chosen() -> None:
    """As published the skip is 0.5 % faster at these lengths, and gives up a tenth of the capacity."""
    case = replace(HYBRID, itl=hybrid_times(H100["all"], H100["skip"]), rule=Rule(latency_weight=0.5))
    assert case.decide().arm == "fp8_unit"


def test_windows_are_quantised_after_all_where_that_is_faster() -> None:
    case = replace(HYBRID, itl=hybrid_times((3.60e-05, 4.0), (4.2e-05, 4.0)), rule=Rule(latency_weight=0.5))
    assert case.decide().arm == "fp8_unit"


def test_a_rule_may_leave_range_alone() -> None:
    verdict = replace(UNDERFLOW, rule=Rule(range_forbids=False)).decide()
    assert reason(verdict, "range", "fp8_unit").status == "unmet"
    assert (verdict.arm, verdict.repair) == ("fp8_unit", "none")


def test_traffic_weighs_the_lengths() -> None:
    """At 256 tokens FP8 is slower, at 1,024 faster: the clause goes with the traffic."""
    itl = dict.fromkeys(Case().kl, (2e-5, 0.020)) | {"bf16": (4e-5, 0.008)}

    def value(weights: tuple[float, ...]) -> float:
        rule = Rule(latency_weight=0.1, context_weights=weights)
        found = reason(replace(Case(), itl=itl, rule=rule).decide(), "latency", "fp8_unit", "traffic")
        assert found.value is not None
        return found.value

    assert value((1.0, 0.0)) > value(()) > value((0.0, 1.0))
    assert value(()) == pytest.approx((2e-5 * 704 + 0.020) / (4e-5 * 704 + 0.008) - 1, abs=0.01)


# --- the backend --------------------------------------------------------------------------


def test_a_backend_without_per_head_scales_changes_the_advice() -> None:
    verdict = replace(SPREAD_HEADS, backend="triton_attn").decide()
    assert (verdict.status, verdict.repair, verdict.arm) == ("decided", "skip", "fp8_unit_skip")
    assert reason(verdict, "backend", "fp8_per_head").status == "unmet"
    assert (
        "FP8 with per-head scales would be the choice, but triton_attn does not take one scale per KV head; flash_attn"
        in said(verdict)
    )
    assert "no scale wins back" not in verdict.headline


def test_a_backend_without_per_head_scales_and_no_way_round() -> None:
    case = without(replace(SPREAD_HEADS, kl={**SPREAD_HEADS.kl, "fp8_unit_skip": 0.0880}), "fp8_per_head_skip")
    verdict = replace(case, backend="triton_attn").decide()
    assert (verdict.arm, verdict.repair) == ("bf16", "scales")
    assert (
        "FP8 with per-head scales keeps the margins, but triton_attn does not take one scale per KV head"
        in verdict.headline
    )


def test_without_per_head_scales_both_faults_ask_for_both_repairs() -> None:
    case = replace(without(OFFSET_AND_UNDERFLOW, "fp8_per_head", "fp8_per_head_skip"), backend="triton_attn")
    verdict = replace(case, kl={**case.kl, "fp8_per_tensor_skip": 0.0084}).decide()
    assert "of per-tensor scales, threshold" in reason(verdict, "range", "fp8_unit_skip").text
    assert (verdict.repair, verdict.arm) == ("both", "fp8_per_tensor_skip")
    undecided = replace(case, items=1, kl={**case.kl, "fp8_per_tensor_skip": 0.0084}).decide()
    assert (undecided.status, undecided.repair) == ("cannot_tell", "both")


def test_the_backend_does_not_matter_where_per_tensor_is_enough() -> None:
    verdict = replace(UNDERFLOW, backend="cpu_attn").decide()
    assert verdict.arm == "fp8_per_tensor"
    assert "would be the choice" not in said(verdict)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(StudyError, match="backend"):
        replace(Case(), backend="telepathy").decide()


def test_one_kv_head_needs_no_per_head_scales() -> None:
    """Per-head scales of one head are per-tensor scales: any backend takes them."""
    verdict = replace(OFFSET_AND_UNDERFLOW, backend="triton_attn", kv_heads=1).decide()
    assert (verdict.arm, verdict.repair) == ("fp8_per_head_skip", "both")
    assert verdict.choice == RepairChoice(scaling="per_tensor", skip_layers=(3,))


def test_a_set_that_the_engine_takes_with_a_flag_brings_it() -> None:
    """vLLM refuses a full layer in BF16 beside sliding ones in FP8 as it starts by default."""
    case = FakeCase(
        spec=hybrid(),
        study=msgspec.structs.replace(STUDY, rule=Rule(top1_margin=0.9)),
        mantissa={2: 0.4},
    )
    evidence, trials = case.ablate()
    verdict = decide(case.plan, case.calibrate(), case.diagnose(), evidence, trials, None, {})
    assert verdict.choice == RepairChoice(scaling="unit", skip_layers=(2,))
    assert verdict.vllm_args[-3:] == ("--kv-cache-dtype-skip-layers", "2", "--disable-hybrid-kv-cache-manager")
    assert verdict.server_env == ()
    both = replace(case, mantissa={0: 0.001, 2: 0.3, 5: 0.3})
    evidence, trials = both.ablate()
    verdict = decide(both.plan, both.calibrate(), both.diagnose(), evidence, trials, None, {})
    assert verdict.choice == RepairChoice(scaling="unit", skip_layers=(2, 5))
    assert verdict.server_env == ("VLLM_KV_CACHE_LAYOUT=BLHNC",)
    assert shlex.join([*verdict.server_env, "vllm", "serve"]) in render_verdict(verdict, both.plan)
