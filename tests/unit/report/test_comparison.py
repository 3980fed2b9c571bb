"""Which cases may stand side by side, and what the page says of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from kvtriage.errors import CaseError
from kvtriage.records.evidence import Conditions, Stop
from kvtriage.records.trials import ScoreTrial
from kvtriage.report import render_comparison
from kvtriage.report.comparison import asked_alike, differences, only_difference
from tests.unit.report.cases import Case, gemma_like, smollm_like, undecided, view_of, with_hostile_text
from tests.unit.report.test_page import POISON, walk

Change = Callable[[Case], Case]


def other_text(case: Case) -> Case:
    data = msgspec.structs.replace(case.plan.data, source="evening.jsonl", sha256="e5" * 32)
    return replace(case, plan=msgspec.structs.replace(case.plan, data=data))


def other_model(case: Case) -> Case:
    model = msgspec.structs.replace(case.plan.model, source="models/fine-tune", fingerprint="77" * 32)
    return replace(case, plan=msgspec.structs.replace(case.plan, model=model))


def other_engine(case: Case) -> Case:
    conditions = msgspec.structs.replace(
        case.evidence.conditions, engine="vllm", engine_version="0.32.0", device="cuda"
    )
    return replace(case, evidence=msgspec.structs.replace(case.evidence, conditions=conditions))


def other_scoring(case: Case) -> Case:
    conditions = msgspec.structs.replace(case.evidence.conditions, scoring="prompt_logprobs")
    return replace(case, evidence=msgspec.structs.replace(case.evidence, conditions=conditions))


def other_rule(case: Case) -> Case:
    rule = msgspec.structs.replace(case.plan.study.rule, name="fanout", kl_margin=0.1)
    study = msgspec.structs.replace(case.plan.study, rule=rule)
    return replace(case, plan=msgspec.structs.replace(case.plan, study=study))


def other_setting(case: Case) -> Case:
    study = msgspec.structs.replace(case.plan.study, numerics="attention")
    return replace(case, plan=msgspec.structs.replace(case.plan, study=study))


def drifting_more(case: Case) -> Case:
    """The same items, and every arm's KL up by 0.01."""
    trials = tuple(
        msgspec.structs.replace(trial, metrics={**trial.metrics, "kl": (trial.metrics["kl"] or 0.0) + 0.01})
        if isinstance(trial, ScoreTrial)
        else trial
        for trial in case.trials
    )
    return replace(case, trials=trials)


@pytest.mark.parametrize(
    ("change", "what", "after"),
    [
        (other_text, "the text", "evening.jsonl"),
        (other_model, "the model", "models/fine-tune"),
        (other_engine, "the engine", "vllm, engine vllm, engine_version 0.32.0, device cuda"),
        (other_scoring, "the engine", "embedded, scoring prompt_logprobs"),
        (other_rule, "the rule", "name fanout, kl_margin 0.1"),
        (other_setting, "the setting numerics", "attention"),
    ],
)
def test_one_thing_may_differ(change: Change, what: str, after: str) -> None:
    a, b = view_of(smollm_like()), view_of(change(smollm_like()))
    found = only_difference(a, b)
    assert found is not None
    assert (found.what, found.after) == (what, after)
    said = walk(render_comparison(a, b, ("one", "other")).html).said()
    assert f"Only {what} differs" in said
    assert after in said


def test_a_repetition_is_paired_item_by_item() -> None:
    a, b = view_of(smollm_like()), view_of(drifting_more(smollm_like()))
    assert only_difference(a, b) is None
    assert asked_alike(a, b)
    report = render_comparison(a, b, ("one", "other"))
    assert "Nothing differs between the two" in walk(report.html).said()
    rows = json.loads(report.beside)["figures"]["drift"]["rows"]
    row = next(row for row in rows if row[:2] == ["KL divergence from BF16", "FP8 per-head"])
    assert row[8:11] == pytest.approx([0.01, 0.01, 0.01])


def test_the_increase_of_nll_is_a_difference_of_differences() -> None:
    """BF16's own NLL moves by 1 in both arms alike: the increase does not."""
    case = smollm_like()
    trials = tuple(
        msgspec.structs.replace(trial, metrics={**trial.metrics, "nll": (trial.metrics["nll"] or 0.0) + 1.0})
        if isinstance(trial, ScoreTrial)
        else trial
        for trial in case.trials
    )
    report = render_comparison(view_of(case), view_of(replace(case, trials=trials)), ("one", "other"))
    rows = json.loads(report.beside)["figures"]["drift"]["rows"]
    assert [row[8] for row in rows if row[0] == "Increase of NLL"] == pytest.approx([0.0] * (len(rows) // 3))


def test_other_items_are_compared_by_their_intervals() -> None:
    a, b = view_of(smollm_like()), view_of(undecided())
    assert not asked_alike(a, b)
    said = walk(render_comparison(a, b, ("one", "other")).html).said()
    assert "no difference can be taken item by item" in said
    assert "the intervals of its KL in A and B overlap" in said
    assert "one of the two decides" in said


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (other_rule(other_text(smollm_like())), "differ in the text and the rule"),
        (other_engine(other_rule(other_text(smollm_like()))), "differ in the text, the engine and the rule"),
        (gemma_like(), "other layers"),
    ],
)
def test_others_may_not_and_the_sentence_says_why(other: Case, said: str) -> None:
    with pytest.raises(CaseError, match=said) as refused:
        only_difference(view_of(smollm_like()), view_of(other))
    assert refused.value.exit_code == 2
    assert refused.value.hint


def test_a_kl_of_fewer_tokens_is_not_set_against_the_whole() -> None:
    case = smollm_like()
    conditions = msgspec.structs.replace(case.evidence.conditions, engine="vllm", kl_top_k=20)
    served = replace(drifting_more(case), evidence=msgspec.structs.replace(case.evidence, conditions=conditions))
    figure = json.loads(render_comparison(view_of(case), view_of(served), ("one", "two")).beside)["figures"]["drift"]
    assert figure["answer"].startswith("KL is left out: A counts the whole vocabulary, B BF16's 20 most likely tokens.")
    assert {row[0] for row in figure["rows"]} == {"Increase of NLL", "Most likely token changed"}


def test_every_difference_is_named() -> None:
    a, b = smollm_like(), other_setting(other_rule(other_engine(other_model(other_text(smollm_like())))))
    whats = [one.what for one in differences(view_of(a), view_of(b))]
    assert whats == ["the model", "the text", "the engine", "the rule", "the setting numerics"]


def test_hostile_names_stay_text() -> None:
    poisoned = with_hostile_text(smollm_like(), POISON)
    found = walk(render_comparison(view_of(poisoned), view_of(poisoned), (POISON, POISON)).html)
    assert found.scripts == []
    assert "script" not in {tag for tag, _ in found.tags}
    assert "<script>alert(1)</script>" in found.said()


FOLLOW = {"model", "data", "study", "numerics", "memory_bytes", "scales"}
"""Conditions that model, text and study decide."""


@pytest.mark.parametrize("field", sorted(set(Conditions.__struct_fields__) - FOLLOW))
def test_whatever_else_is_a_condition_is_the_engines(field: str) -> None:
    case = smollm_like()
    conditions = msgspec.structs.replace(case.evidence.conditions, **{field: "another"})
    other = replace(case, evidence=msgspec.structs.replace(case.evidence, conditions=conditions))
    assert [found.what for found in differences(view_of(case), view_of(other))] == ["the engine"]


def test_an_item_that_bf16_could_not_score_is_in_no_difference() -> None:
    """As if it had not been asked; its NLL is not taken to be 0."""

    def without_native_nll(case: Case) -> Case:
        first = next(t for t in case.trials if isinstance(t, ScoreTrial) and (t.arm, t.task) == ("bf16", "text"))
        unscored = msgspec.structs.replace(first, metrics={**first.metrics, "nll": None})
        return replace(case, trials=tuple(unscored if trial is first else trial for trial in case.trials))

    a, b = smollm_like(), other_rule(without_native_nll(smollm_like()))
    rows = json.loads(render_comparison(view_of(a), view_of(b), ("one", "two")).beside)["figures"]["drift"]["rows"]
    changes = [row[8] for row in rows if row[0] == "Increase of NLL"]
    assert changes
    assert all(change == pytest.approx(0.0, abs=1e-12) for change in changes)


def test_a_difference_is_as_sure_as_the_surer_of_the_two() -> None:
    """A study that stopped at its first look says less by the same items than one that was read once."""
    case = smollm_like()
    noisy = replace(
        case,
        trials=tuple(
            msgspec.structs.replace(t, metrics={**t.metrics, "kl": (t.metrics["kl"] or 0.0) * (1 + number % 3)})
            if isinstance(t, ScoreTrial)
            else t
            for number, t in enumerate(case.trials)
        ),
    )
    stop = Stop(look=1, looks=3, items=28, of_items=84, why="the choice is clear, FP8")
    stopped = replace(noisy, evidence=msgspec.structs.replace(noisy.evidence, stop=stop))
    lows = []
    for one in (noisy, stopped):
        rows = json.loads(render_comparison(view_of(case), view_of(one), ("one", "other")).beside)["figures"]["drift"]
        row = next(row for row in rows["rows"] if row[:2] == ["KL divergence from BF16", "FP8 per-head"])
        lows.append(row[9])
    assert lows[1] < lows[0]
