"""The five sentences: what each says of a case that is decided, open, excluded or back in BF16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from kvtriage.records.verdict import Reason, RepairChoice
from kvtriage.report.brief import LEADS, describe_choice, tell_in_brief
from kvtriage.report.numbers import Shown, say
from tests.unit.report.cases import Case, gemma_like, smollm_like, undecided, view_of, without_arms


def told(case: Case) -> dict[str, str]:
    return {one.lead: one.sentence.text for one in tell_in_brief(view_of(case))}


def with_verdict(case: Case, **fields: Any) -> Case:
    return replace(case, verdict=msgspec.structs.replace(case.verdict, **fields))


def test_a_decided_case() -> None:
    said = told(gemma_like())
    assert tuple(said) == LEADS
    assert said["Do"] == "Serve FP8 at scale 1, all 18 layers, with the command below."
    assert said["Why"] == gemma_like().verdict.sentences[0]
    assert said["Gives up"] == (
        "For 2.00× the tokens of BF16 at 1,024 of context, KL 0.0239 nats per token (0.0208 to 0.0270); 6.9 % of the "
        "most likely tokens change."
    )
    assert said["How sure"] == (
        "All 9 of its clauses are met by 95 % intervals, with 8 items in a cell; BF16 repeated differs from itself by "
        "KL 6.3 × 10⁻⁸."
    )
    assert said["What would change it"].startswith("A margin for top-1 changed at 256 tokens below 8.2 %, now 12 %; or")


def test_cells_of_unequal_size_are_counted_from_least_to_most() -> None:
    case = gemma_like()
    first = next(i for i, r in enumerate(case.verdict.reasons) if r.arm == "fp8_unit" and r.items and r.cell != "all")
    fewer = msgspec.structs.replace(case.verdict.reasons[first], items=5)
    reasons = (*case.verdict.reasons[:first], fewer, *case.verdict.reasons[first + 1 :])
    assert ", with 5 to 8 items in a cell; " in told(with_verdict(case, reasons=reasons))["How sure"]


def test_a_clause_that_no_items_could_break_is_not_counted_as_kept() -> None:
    case = gemma_like()
    empty = Reason(
        clause="found", arm="fp8_unit", cell="all", value=0.0, low=None, high=None, threshold=0.0, status="met",
        items=4, items_needed=6, text="",
    )  # fmt: skip
    sure = told(with_verdict(case, reasons=(*case.verdict.reasons, empty)))["How sure"]
    counted = "All 9 of its clauses that could be settled are met by 95 % intervals, with 8 items in a cell;"
    assert sure.startswith(counted)
    assert "; answers lost could not be settled, with 4 items where at least 6 are needed; BF16 repeated" in sure


def test_a_skip_gives_up_capacity_too() -> None:
    case = gemma_like()
    skip = next(arm.skip_layers for arm in case.evidence.arms if arm.name == "fp8_unit_skip")
    choice = RepairChoice(scaling="unit", skip_layers=skip)
    said = told(with_verdict(case, choice=choice, arm="fp8_unit_skip", repair="skip"))
    assert said["Do"].startswith("Serve FP8 at scale 1, layers 0–4, 6–10, 12–16 in BF16")
    assert said["Gives up"].startswith("For 1.17× the tokens of BF16")
    assert said["Gives up"].endswith("; FP8 in every layer would hold 2.00×.")


def test_bf16_gives_up_capacity_and_says_what_kept_fp8_out() -> None:
    case = smollm_like()
    reasons = tuple(
        msgspec.structs.replace(reason, status="unmet") if reason.clause == "kl" else reason
        for reason in case.verdict.reasons
    )
    choice = RepairChoice(scaling="native", skip_layers=())
    said = told(with_verdict(case, choice=choice, arm="bf16", reasons=reasons, vllm_args=("m",)))
    assert said["Do"] == "Keep the cache in BF16."
    assert said["Gives up"] == "Capacity: FP8 in every layer would hold 2.00× the tokens, at 1,024 of context."
    assert said["How sure"] == "5 FP8 arms break a clause of the rule for certain, by 95 % intervals."
    assert said["What would change it"] == (
        "A wider margin: FP8 per-head + skip comes closest, with KL divergence at 256 tokens at 0.00870 against 0.05."
    )
    assert told(with_verdict(case, choice=choice, arm="bf16", reasons=()))["What would change it"].startswith(
        "An arm that keeps"
    )


def test_an_open_case_says_what_would_settle_it() -> None:
    said = told(undecided())
    assert said["Do"] == "Run it again with --items 41."
    assert (
        said["How sure"] == "Not yet: 6 of 9 clauses of FP8 scale 1 can't be told at 95 %, with 2 to 8 items in a cell."
    )
    assert said["What would change it"].startswith("41 items in each cell would settle it")
    assert told(with_verdict(undecided(), items_needed=None))["What would change it"].startswith("Another margin")


def test_a_floor_that_excludes_everything_is_no_doubt() -> None:
    case = undecided()
    reasons = tuple(
        msgspec.structs.replace(reason, status="unmet") if reason.clause == "capacity" else reason
        for reason in case.verdict.reasons
    )
    said = told(with_verdict(case, reasons=reasons, items_needed=None))
    assert said["How sure"].startswith("As sure as 95 % intervals are")
    assert said["What would change it"].startswith("A capacity floor below 1.00×, or wider margins")


def test_what_was_not_measured_is_left_out() -> None:
    case = without_arms(gemma_like(), "bf16_repeat")
    bare = replace(case, trials=())
    said = told(with_verdict(bare, reasons=(), sentences=()))
    assert said["Why"] == case.verdict.headline
    assert said["Gives up"] == "For 2.00× the tokens of BF16 at 1,024 of context."
    assert said["What would change it"].startswith("Contexts beyond 1,024 tokens")


def test_a_clause_without_a_number_names_what_is_in_the_way() -> None:
    case = smollm_like()
    backend = Reason(
        clause="backend", arm="fp8_per_head", cell="all", value=None, low=None, high=None, threshold=None,
        status="unmet", items=0, items_needed=None, text="triton_attn does not take one scale per KV head",
    )  # fmt: skip
    choice = RepairChoice(scaling="native", skip_layers=())
    said = told(with_verdict(without_arms(case, "fp8_per_head_skip"), choice=choice, arm="bf16", reasons=(backend,)))
    assert said["What would change it"] == (
        "FP8 per-head on a server that can take it: triton_attn does not take one scale per KV head."
    )


def test_choices_are_named_with_their_layers() -> None:
    assert describe_choice(None, 4) == "No choice yet"
    assert describe_choice(RepairChoice(scaling="native", skip_layers=(0, 1)), 2) == "BF16 cache"
    assert describe_choice(RepairChoice(scaling="per_tensor", skip_layers=(3,)), 4) == (
        "FP8 with per-tensor scales, layer 3 in BF16"
    )


def test_a_sentence_keeps_the_numbers_that_it_says() -> None:
    said = say("{kl} nats on {name}", kl=Shown(0.02291, "0.0229"), name="{x}", unsaid=Shown(1.0, "1"))
    assert (said.text, said.numbers) == ("0.0229 nats on {x}", {"kl": 0.02291})
