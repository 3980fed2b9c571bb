"""What a verdict says: it names what moved, and calls nothing different that is noise."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import pytest

from kvtriage.records.evidence import Stop
from kvtriage.records.rule import Rule
from kvtriage.records.trials import ScoreTrial
from kvtriage.records.verdict import Verdict
from kvtriage.stages.decide import decide
from kvtriage.stages.findings import heads_off_range
from kvtriage.stages.wording import (
    format_against,
    format_interval,
    format_nats,
    format_share,
    join_words,
    name_clause,
    name_layers,
)
from tests.unit.stages.verdict_cases import (
    HOPELESS,
    LAYERS,
    OFFSET,
    OFFSET_AND_UNDERFLOW,
    SPREAD_HEADS,
    UNDERFLOW,
    Case,
    without,
)


def said(verdict: Verdict) -> str:
    return " ".join((verdict.headline, *verdict.sentences, *verdict.caveats, verdict.next_step))


def test_headlines() -> None:
    assert Case().decide().headline == "FP8 needs no repair: serve it at scale 1, every layer quantised."
    assert UNDERFLOW.decide().headline.startswith("FP8 needs calibrated per-tensor scales: range is the problem")
    assert SPREAD_HEADS.decide().headline.startswith("FP8 needs calibrated per-head scales: range is the problem")
    assert OFFSET.decide().headline == "FP8 needs layer 3 in BF16; no scale wins back what is lost there."
    assert OFFSET_AND_UNDERFLOW.decide().headline == "FP8 needs calibrated per-head scales, and layer 3 in BF16."
    assert HOPELESS.decide().headline.startswith("Stay with BF16")
    assert replace(Case(), items=1).decide().headline.startswith("Cannot tell yet")


def test_range_is_not_blamed_when_it_is_not_shown() -> None:
    verdict = replace(Case(), top1={"fp8_unit": 0.2}).decide()
    assert verdict.arm == "fp8_per_tensor"
    assert "range" not in verdict.headline
    assert "FP8 at scale 1 does not keep the margins (top-1 at 256 tokens: most likely token changed 20.0 %" in said(
        verdict
    )


def test_range_and_mantissa_are_told_apart() -> None:
    assert "Range is wrong: at scale 1 FP8 drifts 0.0287" in said(UNDERFLOW.decide())
    assert "Mantissa is wrong" not in said(UNDERFLOW.decide())
    offset = said(OFFSET.decide())
    assert "Mantissa is wrong: the best that scales reach is 0.0775 nats per token (the scale-free bound)" in offset
    assert "Range is wrong" not in offset
    both = said(OFFSET_AND_UNDERFLOW.decide())
    assert "Mantissa is wrong" in both
    assert "Range is wrong in the layers that stay in FP8" in both


def test_the_best_that_scales_reach_is_not_told_as_if_it_were_better() -> None:
    assert re.search(
        r"drifts 0\.0098 nats per token, where the best that scales reach is 0\.008", said(Case().decide())
    )
    kl = {name: value if name in ("bf16", "bf16_repeat") else 0.0120 for name, value in Case().kl.items()}
    least = said(replace(Case(), kl={**kl, "fp8_unit": 0.0050}).decide())
    assert re.search(r"drifts 0\.0050 nats per token, no more than the best other: 0\.0\d+ nats per token \(", least)
    assert "where the best that scales reach" not in least


def test_heads_out_of_range_are_named() -> None:
    verdict = replace(UNDERFLOW, per_head={(3, 1): 2e-6, (2, 0): 9.0}).decide()
    assert "V of layer 3, head 1 reaches 0.000896 and underflows" in said(verdict)
    assert "V of layer 2, head 0 reaches 4.03e+03 and saturates" in said(verdict)


def test_heads_that_share_a_scale_are_read_against_it() -> None:
    scales = replace(Case(), per_head={(3, 1): 2e-6, (4, 0): 9.0, (4, 1): 9.0, (4, 2): 9.0}).scales()
    assert [(off.layer_idx, off.head, off.saturates) for off in heads_off_range(scales, "unit")] == [
        (3, 1, False),
        (4, 0, True),
        (4, 1, True),
        (4, 2, True),
    ]
    assert [(off.layer_idx, off.head) for off in heads_off_range(scales, "per_tensor")] == [(3, 1)]


def test_one_axis_at_a_time() -> None:
    text = said(UNDERFLOW.decide())
    assert "calibration (scale 1 → per-tensor scales) -0.0195 (" in text
    assert "granularity (per-tensor scales → per-head scales)" in text
    assert "both moved" not in text


def test_without_the_per_tensor_arm_both_axes_moved() -> None:
    text = said(without(SPREAD_HEADS, "fp8_per_tensor").decide())
    assert "calibration and granularity, which both moved, so that neither can be credited alone" in text
    assert "No calibrated per-tensor arm was run" in text


def test_what_is_inside_the_noise_is_not_called_different() -> None:
    kl = {**Case().kl, "bf16_repeat": 0.002}
    assert "granularity (per-tensor scales → per-head scales) no difference" in said(replace(Case(), kl=kl).decide())
    quiet = replace(Case(), kl={**kl, "bf16_repeat": 0.0120}).decide()
    assert "drifts 0.0098 nats per token, inside the noise of BF16 repeated" in said(quiet)


def test_every_metric_has_a_noise_floor_in_every_cell() -> None:
    """BF16 repeated changes 6 % of the likeliest tokens here, and the needles' likelihood by 0.03."""
    noisy = replace(
        Case(), kl={**Case().kl, "bf16_repeat": 0.012}, top1={"bf16_repeat": 0.06}, needle={"bf16_repeat": 0.03}
    )
    for case, expected in ((noisy, True), (Case(), False)):
        told = {
            r.clause: "inside the noise" in r.text
            for r in case.decide().reasons
            if r.arm == "fp8_unit" and r.items and r.clause != "found"
        }
        assert told == dict.fromkeys(("kl", "nll", "top1", "needle", "range"), expected)


def test_contrast_arms_read_as_a_sentence() -> None:
    case = Case()
    arms = (*case.evidence().arms, msgspec.structs.replace(
        case.evidence().arms[-1], name="fp8_sliding_only", label="FP8 in the sliding layers only", role="contrast",
        skip_layers=(1, 3, 5),
    ))  # fmt: skip
    trials = [msgspec.structs.replace(t, arm="fp8_sliding_only") for t in case.trials() if t.arm == "fp8_unit"]
    evidence = msgspec.structs.replace(case.evidence(), arms=arms)
    verdict = decide(case.plan(), case.scales(), case.sensitivities(), evidence, (*case.trials(), *trials), None, {})
    assert (
        "Drift by attention type: 0.0098 with FP8 in the sliding layers only (harm is shown for NLL at 256 tokens, "
        "NLL at 1,024 tokens, NLL over all lengths, retrieval at 256 tokens, retrieval at 1,024 tokens and retrieval "
        "over all lengths)."
    ) in said(verdict)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_latencies_are_never_the_servers(device: str) -> None:
    case = Case()
    conditions = msgspec.structs.replace(case.evidence().conditions, device=device)
    evidence = msgspec.structs.replace(case.evidence(), conditions=conditions)
    verdict = decide(case.plan(), case.scales(), case.sensitivities(), evidence, case.trials(), None, {})
    (caveat,) = [line for line in verdict.caveats if line.startswith("Latencies")]
    assert f"on {device}: they say nothing about the speed of flash_attn's kernels" in caveat
    assert ("GPU" in caveat) is (device == "cpu")


def test_a_suspicion_is_not_a_proof() -> None:
    text = said(replace(OFFSET, suspects_stand_out=False).decide())
    assert "no layer stands out in the probes" in text
    assert "only the most sensitive one found" in text


def test_native_says_what_came_closest() -> None:
    text = said(HOPELESS.decide())
    assert "keeping layer 3 in BF16 is not enough" in text
    assert "The closest to holding is FP8 with per-head scales and layer 3 in BF16" in text


def test_a_baseline_that_makes_no_sense_is_said() -> None:
    text = said(replace(Case(), nll=11.0, hits=dict.fromkeys(Case().kl, 0)).decide())
    assert "BF16 itself makes no sense of this text" in text
    assert "BF16 finds none of the 12 needles" in text
    assert "makes no sense" not in said(Case().decide())


def test_the_engine_and_its_limits_are_said() -> None:
    text = said(Case().decide())
    for part in (
        "embedded engine on cpu (storage numerics",
        "1,024 of the model's 8,192",
        "135 million",
        "say nothing about the speed of flash_attn's kernels, nor about a GPU",
    ):
        assert part in text


def test_break_even_is_told_with_its_interval() -> None:
    itl = dict.fromkeys(Case().kl, (2e-5, 0.030)) | {"bf16": (4e-5, 0.010)}
    text = said(replace(Case(), itl=itl, rule=Rule(latency_weight=1.0)).decide())
    assert "and a request of 128 tokens 1.15 (" in text
    assert re.search(r"\): faster beyond (1,0|99)", text)
    assert "no weight" not in text


@pytest.mark.parametrize("case", [Case(), UNDERFLOW, SPREAD_HEADS, OFFSET, OFFSET_AND_UNDERFLOW, HOPELESS])
def test_arms_and_cells_go_by_words(case: Case) -> None:
    for verdict in (case.decide(), replace(case, items=1).decide(), replace(case, backend="triton_attn").decide()):
        text = " ".join((said(verdict), *(reason.text for reason in verdict.reasons)))
        assert "fp8_" not in text
        assert "bucket " not in text


def test_what_lies_below_is_said_to_lie_below() -> None:
    assert format_against(0.0105, 0.008, 0.013, format_nats, "BF16's") == "0.0105 (0.0080 to 0.0130) above BF16's"
    assert format_against(-0.0046, -0.009, 0.001, format_nats, "BF16's") == "0.0046 (-0.0010 to 0.0090) below BF16's"
    assert format_against(-0.0046, None, None, format_nats, "BF16's") == "0.0046 (no interval) below BF16's"
    assert any(r.text.startswith("NLL is 0.") and " BF16's, margin" in r.text for r in Case().decide().reasons)


def test_clauses_in_words() -> None:
    cells = (("nll", "bucket 1024"), ("kl", "all"), ("latency", "traffic"), ("range", "all"))
    told = ["NLL at 1,024 tokens", "KL over all lengths", "latency", "range"]
    assert [name_clause(*cell) for cell in cells] == told


def test_scales_that_would_help_a_little_are_called_optional() -> None:
    kl = {**Case().kl, "fp8_per_tensor": 0.0078, "bound": 0.0085}
    verdict = replace(Case(), kl=kl).decide()
    assert verdict.arm == "fp8_unit"
    (told,) = [line for line in verdict.sentences if "optional" in line]
    assert "Calibrated per-tensor scales would lower drift by 0.0021 (0.0016 to 0.0026), 21 %, " in told
    assert "at no cost in cache bytes: less than the rule's range threshold" in told
    noisy = replace(Case(), kl={**kl, "bf16_repeat": 0.0022}).decide()
    assert noisy.arm == "fp8_unit"
    assert "optional" not in said(noisy)
    assert "optional" not in said(UNDERFLOW.decide())


def test_differences_between_arms_are_drawn_as_wide_as_their_look_asks() -> None:
    """The same numbers at the second of three looks: what calibration changed and would win is less sure."""
    case = replace(Case(), kl={**Case().kl, "fp8_per_tensor": 0.0075, "bound": 0.0085})
    trials, plan = case.trials(), case.plan()
    items = sum(isinstance(trial, ScoreTrial) and trial.arm == "bf16" for trial in trials)
    stop = Stop(look=2, looks=3, items=items, of_items=3 * items // 2, why="the choice is clear, FP8 at scale 1")
    widths = []
    for looks, ended in ((1, None), (3, stop)):
        asked = msgspec.structs.replace(plan, study=msgspec.structs.replace(plan.study, looks=looks))
        evidence = msgspec.structs.replace(case.evidence(), stop=ended)
        told = said(decide(asked, case.scales(), case.sensitivities(), evidence, trials, None, {}))
        for change in (r"calibration \([^)]*\) -\S+", r"lower drift by \S+"):
            found = re.search(rf"{change} \((\S+) to (\S+)\)", told)
            assert found is not None, told
            widths.append(float(found[2]) - float(found[1]))
    assert widths[2] > widths[0]
    assert widths[3] > widths[1]


def test_numbers_in_words() -> None:
    assert [format_nats(x) for x in (0.02862, 3e-7, 0.0)] == ["0.0286", "3.0e-07", "0.0000"]
    assert format_share(0.0573) == "5.7 %"
    assert format_interval(0.01, None, None, format_nats) == "0.0100 (no interval)"
    assert [join_words(w) for w in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]


def test_layers_in_words() -> None:
    geometry = replace(Case(), kinds=("sliding", "full") * (LAYERS // 2)).plan().layers
    assert name_layers((3,), geometry) == "layer 3"
    assert name_layers((5, 0, 1), geometry) == "layers 0, 1 and 5"
    assert name_layers((0, 2, 4), geometry) == "all 3 sliding layers"
    assert name_layers(range(LAYERS), geometry) == "all 6 layers"


@pytest.mark.parametrize(
    ("changes", "said", "not_said"),
    [
        ({"kl_top_k": 20}, "BF16's 20 most likely tokens", "could not be read back"),
        ({"readback": "config"}, "Scales could not be read back", "lower bounds"),
        ({"engine": "vllm", "backend": "FLASH_ATTN"}, "Quality comes from the vllm engine", "not from flash_attn's"),
        ({}, "not from flash_attn's own kernels", "lower bounds"),
    ],
)
def test_what_a_server_cannot_show_is_a_caveat(changes: dict[str, object], said: str, not_said: str) -> None:
    case = Case()
    conditions = msgspec.structs.replace(case.evidence().conditions, **changes)
    evidence = msgspec.structs.replace(case.evidence(), conditions=conditions)
    verdict = decide(case.plan(), case.scales(), case.sensitivities(), evidence, case.trials(), None, {})
    caveats = " ".join(verdict.caveats)
    assert said in caveats
    assert not_said not in caveats


def test_where_no_harm_is_shown_it_says_which_would_have_been() -> None:
    """NLL goes up for one text and down for the next, and answers are as likely as before."""
    case = replace(Case(), items=16, needle=dict.fromkeys(Case().kl, 0.0))
    trials = []
    for trial in case.trials():
        if isinstance(trial, ScoreTrial) and trial.task == "text" and trial.arm.startswith("fp8"):
            nll, kl = trial.metrics["nll"], trial.metrics["kl"]
            assert nll is not None
            assert kl is not None
            up = 1 if int(trial.item_id.rpartition("-")[2]) % 2 else -1
            trial = msgspec.structs.replace(trial, metrics={**trial.metrics, "nll": nll - kl + 0.01 * up})
        trials.append(trial)
    assert "Within the margins harm is shown for NLL" in said(case.decide())
    assert re.search(
        r"No harm is shown; an increase of NLL by 0\.0\d+ would be, 80 % of the time", said(case.decide(trials))
    )


def test_what_servers_do_otherwise_stands_in_the_caveats() -> None:
    conditions: dict[str, str | bool] = {
        "scoring": "echo_text",
        "rounding": "towards zero",
        "mixed_backends": True,
        "readback": "config",
    }
    told = said(replace(Case(), conditions=conditions).decide())
    for sentence in (
        "tokens that read alike were not told apart",
        "rounds to E4M3 towards zero, and GPUs round to nearest",
        "Arms on other attention backends than BF16's were allowed",
        "Scales could not be read back",
    ):
        assert sentence in told
        assert sentence not in said(Case().decide())


def test_without_likelihoods_no_number_of_items_is_asked_for() -> None:
    few = replace(Case(), items=2)
    assert "Set items_per_bucket" in few.decide().next_step
    told = replace(few, conditions={"scoring": "generated"}).decide().next_step
    assert told.startswith("Measure the arms on servers that give the likelihoods of a prompt")
