"""Cells of quality: correction over cells, the noise floor, harm, answers lost, BF16's own floors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest

from kvtriage.records.pairing import Trials, sort_trials
from kvtriage.records.rule import Rule
from kvtriage.records.study import Study
from kvtriage.records.trials import ScoreTrial
from kvtriage.records.verdict import Reason
from kvtriage.stages.quality import baseline_clauses, quality_clauses
from kvtriage.stats import losses_shown
from tests.unit.stages.verdict_cases import OFFSET, SPREAD_HEADS, UNDERFLOW, Case, drifting


def trials_of(case: Case) -> Trials:
    return sort_trials(case.evidence().arms, case.trials())


def clauses(case: Case, arm: str = "fp8_unit") -> dict[tuple[str, str], Reason]:
    found = quality_clauses(trials_of(case), [arm], (256, 1024), case.rule)
    return {(reason.clause, reason.cell): reason for reason in found}


def with_spread(case: Case, arm: str, kl: Mapping[int, tuple[float, ...]]) -> Case:
    """`arm` drifts by these nats, item by item, in the bucket named."""

    class Spread(Case):
        def trials(self):  # type: ignore[no-untyped-def]
            return tuple(
                msgspec.structs.replace(t, metrics={**t.metrics, "kl": kl[t.bucket][int(t.item_id.rpartition("-")[2])]})
                if isinstance(t, ScoreTrial) and t.arm == arm and t.task == "text" and t.bucket in kl
                else t
                for t in Case.trials(self)
            )

    return Spread(**{name: getattr(case, name) for name in case.__dataclass_fields__})


BARELY = (0.051, 0.056, 0.060, 0.052, 0.063, 0.049, 0.058, 0.053)
"""Beyond 0.05 by itself, with p 0.009, and not among twelve cells."""


def test_one_cell_of_twelve_is_not_called_beyond_by_itself() -> None:
    case = with_spread(Case(), "fp8_unit", {256: BARELY})
    kl = clauses(case)["kl", "bucket 256"]
    assert kl.low is not None
    assert kl.threshold is not None
    assert kl.low > kl.threshold
    assert kl.p_beyond is not None
    assert 0.05 < kl.p_beyond < 0.15
    assert kl.status == "cannot_tell"
    assert "beyond it by itself, and not among this arm's cells (p 0.1" in kl.text
    assert kl.items_needed is not None
    assert kl.items_needed > kl.items
    alone = clauses(replace(case, rule=Rule(correction="none")))["kl", "bucket 256"]
    assert (alone.status, alone.items_needed) == ("unmet", None)


def test_what_is_alike_in_all_buckets_is_found_over_all_lengths() -> None:
    """Neither bucket shows it among twelve cells; both together do."""
    found = clauses(with_spread(Case(), "fp8_unit", {256: BARELY, 1024: BARELY[::-1]}))
    assert {found["kl", f"bucket {bucket}"].status for bucket in (256, 1024)} == {"cannot_tell"}
    assert (found["kl", "all"].status, found["kl", "all"].items) == ("unmet", 16)


def test_one_bucket_is_read_once() -> None:
    trials = [t for t in Case().trials() if not (isinstance(t, ScoreTrial) and t.bucket == 1024)]
    reasons = quality_clauses(sort_trials(Case().arms(), trials), ["fp8_unit"], (256,), Rule())
    assert {r.cell for r in reasons if r.clause != "found"} == {"bucket 256"}


def test_items_for_all_lengths_are_shared_among_the_buckets() -> None:
    thin = drifting(bound=0.04, fp8_unit=0.048, fp8_per_tensor=0.036, fp8_per_head=0.036)
    verdict = replace(thin, spread=0.4).decide()
    doubts = [r for r in verdict.reasons if r.arm == "fp8_unit" and r.status == "cannot_tell" and r.clause != "range"]
    assert any(r.cell == "all" for r in doubts)
    assert verdict.items_needed == max(-(-(r.items_needed or 0) // (2 if r.cell == "all" else 1)) for r in doubts)


def test_what_is_far_beyond_is_so_among_all_cells() -> None:
    assert clauses(OFFSET)["kl", "bucket 1024"].status == "unmet"
    assert (clauses(OFFSET)["kl", "bucket 1024"].p_beyond or 1.0) < 0.001


def test_passing_needs_no_correction() -> None:
    strict, plain = clauses(Case()), clauses(replace(Case(), rule=Rule(correction="none")))
    assert {k: r.status for k, r in strict.items()} == {k: r.status for k, r in plain.items()}


def test_inside_the_noise_nothing_is_unmet() -> None:
    """BF16 repeated moves by 0.09: a drift of 0.08 is beyond the margin and no difference."""
    loud = drifting(fp8_unit=0.08, bf16_repeat=0.09)
    kl = clauses(loud)["kl", "bucket 256"]
    assert kl.status == "cannot_tell"
    assert kl.noise == pytest.approx(0.09, rel=0.1)
    assert kl.items_needed is None
    assert "inside the noise" in kl.text


def test_a_margin_below_the_noise_is_not_settled_by_items() -> None:
    quiet = replace(Case(), kl=dict.fromkeys(Case().kl, 0.08) | {"bf16": 0.0, "bf16_repeat": 0.09})
    verdict = quiet.decide()
    assert (verdict.status, verdict.items_needed) == ("cannot_tell", None)
    assert verdict.next_step.startswith("A drift lies inside the noise of BF16 repeated")


def test_every_doubt_says_what_could_have_been_told() -> None:
    doubtful = replace(drifting(fp8_unit=0.048), spread=0.4)
    for reason in clauses(doubtful).values():
        if reason.status == "cannot_tell":
            assert reason.detectable is not None
            assert "items only" in reason.text
            assert "off the margin would show" in reason.text
            assert reason.items_needed is None or "would settle it" in reason.text


def test_harm_is_two_sided_and_only_where_a_reading_may_go_either_way() -> None:
    found = clauses(UNDERFLOW)
    assert {clause for (clause, _), r in found.items() if r.p_harm is not None} == {"nll", "needle", "found"}
    assert "harm is shown (p" in found["nll", "bucket 256"].text
    better = clauses(drifting(fp8_unit=-0.01))
    assert "a gain is shown" in better["nll", "bucket 256"].text
    assert better["nll", "bucket 256"].status == "met"


def test_more_arms_make_a_larger_family() -> None:
    def lowest(arms: list[str]) -> float:
        reasons = quality_clauses(trials_of(Case()), arms, (256, 1024), Rule())
        return min(r.p_harm for r in reasons if r.arm == "fp8_unit" and r.p_harm is not None)

    assert lowest(["fp8_unit", "fp8_per_tensor", "fp8_per_head"]) > lowest(["fp8_unit"])


@pytest.mark.parametrize(
    ("kept", "status", "said"),
    [
        (
            6,
            "met",
            "0 that BF16 found are lost and 0 are won: no loss is shown (p 1); 9 lost and none won would show one",
        ),
        (3, "met", "6 that BF16 found are lost"),
        (1, "unmet", "10 that BF16 found are lost and 0 are won: a loss is shown (p 0.00"),
    ],
)
def test_lost_answers(kept: int, status: str, said: str) -> None:
    """Six needles in each of two buckets, and seven tests in the family."""
    found = clauses(replace(Case(), hits={"fp8_unit": kept}, needle={"fp8_unit": 0.0}))["found", "all"]
    assert found.status == status
    assert said in found.text


def test_so_few_needles_that_no_loss_could_be_shown_forbid_nothing_and_are_said_to() -> None:
    """Six needles in one bucket, four of them lost: with the three tests of the family seven would have to be."""
    trials = [
        trial
        for trial in replace(Case(), hits={"fp8_unit": 2}).trials()
        if not (isinstance(trial, ScoreTrial) and trial.bucket == 1024)
    ]
    reasons = quality_clauses(sort_trials(Case().arms(), trials), ["fp8_unit"], (256,), Rule())
    (found,) = [reason for reason in reasons if reason.clause == "found"]
    assert found.status == "met"
    assert found.items_needed == 7
    assert "6 items cannot settle this clause alone, at least 7 are needed, so it forbids nothing" in found.text


def test_the_default_study_asks_enough_needles_to_show_a_loss() -> None:
    """As many tests as candidates and attention types have: NLL and retrieval in two buckets and over both, found."""
    study = Study()
    asked = len(study.buckets) * len(study.needle_depths) * study.needles_per_depth
    for families in (1, 2):
        assert losses_shown((1 - study.rule.confidence) / (7 * families)) <= asked


def test_a_lost_answer_forbids_an_arm() -> None:
    verdict = replace(Case(), hits={"fp8_unit": 0}).decide()
    assert verdict.arm == "fp8_per_tensor"


# --- BF16 itself --------------------------------------------------------------------------


def test_bf16_is_held_to_floors_of_its_own() -> None:
    sane, broken = (trials_of(replace(Case(), nll=nll)) for nll in (2.4, 14.0))
    assert {r.status for r in baseline_clauses(sane, (256, 1024), Rule())} == {"met"}
    assert {r.status for r in baseline_clauses(broken, (256, 1024), Rule())} == {"unmet"}


@pytest.mark.parametrize(("hits", "status"), [(6, "met"), (3, "cannot_tell"), (0, "unmet")])
def test_bf16_may_have_to_find_needles(hits: int, status: str) -> None:
    case = replace(Case(), hits={"bf16": hits})
    reasons = baseline_clauses(trials_of(case), (256, 1024), Rule(baseline_found_floor=0.6))
    (found,) = [reason for reason in reasons if reason.cell == "all"]
    assert found.status == status
    assert f"BF16 finds {2 * hits}/12 needles" in found.text


def test_a_broken_baseline_gives_no_verdict() -> None:
    verdict = replace(Case(), nll=14.0).decide()
    assert (verdict.status, verdict.choice, verdict.items_needed) == ("cannot_tell", None, None)
    assert verdict.headline == "Cannot tell: BF16 itself falls short here, and FP8 is judged by what it changes."
    assert any("makes no sense of this text" in caveat for caveat in verdict.caveats)
    assert verdict.next_step.startswith("Mend BF16 first")
    assert [r.status for r in verdict.reasons if r.clause == "baseline"] == ["unmet", "unmet"]
    barred = replace(SPREAD_HEADS, nll=14.0, backend="triton_attn").decide()
    assert "would be the choice" not in " ".join(barred.sentences)
