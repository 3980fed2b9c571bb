from __future__ import annotations

import math
from typing import Any

import pytest

from kvtriage.errors import DataError
from kvtriage.records.imported import Imported
from kvtriage.stages.lm_eval_samples import decode_samples, read_samples
from tests.unit.stages.imported_cases import RESULTS, sample, samples_file


def read(samples: list[dict[str, Any]], **results: Any) -> tuple[Imported, ...]:
    return read_samples(samples, {**RESULTS, **results}, "arc", "bf16", "there", "0" * 64, {"engine": "e"})


def test_documents_are_items_and_true_is_1() -> None:
    (entry,) = read([sample(1, True), sample(0, 0.0)])
    assert (entry.source, entry.arm, entry.series) == ("lm-eval", "bf16", ("lm-eval", "arc", "acc"))
    assert [(item.item_id, item.value) for item in entry.items] == [("0", 0.0), ("1", 1.0)]
    assert entry.higher_is_better


def test_conditions_are_what_must_be_equal_and_addresses_are_only_told() -> None:
    (entry,) = read([sample(0, 1.0)])
    assert entry.conditions["task_version"] == "1.0"
    assert entry.conditions["num_fewshot"] == "5"
    assert entry.conditions["fewshot_seed"] == "1234"
    assert entry.conditions["lm_eval_version"] == "0.4.13"
    assert entry.conditions["engine"] == "e"
    assert "base_url" in entry.told["model_args"]
    assert not entry.told.keys() & entry.conditions.keys()


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "no", [1.0, 2], 10**400])
def test_what_is_no_number_is_unscored_and_not_zero(value: object) -> None:
    (entry,) = read([sample(0, 1.0), sample(1, value)])
    assert [item.value for item in entry.items] == [1.0, None]
    assert entry.unscored == 1


def test_each_filter_is_a_metric_of_its_own() -> None:
    found = read([sample(0, 1.0, under="strict"), sample(0, 0.0, under="flexible"), sample(0, 3.0, metric="ppl")])
    assert {entry.metric: entry.higher_is_better for entry in found} == {
        "acc,strict": True,
        "acc,flexible": True,
        "ppl": False,
    }


def test_other_words_under_the_same_number_are_another_item() -> None:
    (one,), (other,) = read([sample(0, 1.0)]), read([sample(0, 1.0, prompt_hash="other")])
    assert one.items[0].asked != other.items[0].asked


def test_a_metric_of_the_whole_corpus_cannot_be_paired() -> None:
    with pytest.raises(DataError, match="no metric of there is a number for each document"):
        read([sample(0, [-5.0, 3], metric="word_perplexity")])


@pytest.mark.parametrize("key", ["doc_id", "doc_hash", "prompt_hash", "target_hash", "metrics"])
def test_a_sample_that_lacks_something_is_refused_by_name(key: str) -> None:
    broken = {name: value for name, value in sample(0, 1.0).items() if name != key}
    with pytest.raises(DataError, match=f"sample 1 of there has no '{key}'"):
        read([broken])


def test_metrics_that_are_no_list_are_refused() -> None:
    with pytest.raises(DataError, match="'metrics' of sample 1 of there is not a list"):
        read([{**sample(0, 1.0), "metrics": "acc"}])


@pytest.mark.parametrize("results", [{"versions": {}}, {"versions": None}, {"versions": {"hellaswag": 1}}])
def test_results_of_another_task_do_not_say_the_conditions(results: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="do not say under which conditions 'arc' was run"):
        read([sample(0, 1.0)], **results)


def test_lines_are_read_as_python_writes_them() -> None:
    assert len(decode_samples(samples_file([1.0, math.nan]) + b"\n", "there")) == 2


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{}\nnot json\n", "line 2 of there is not JSON"),
        (b"[1]\n", "line 1 of there is no sample of lm-eval"),
        (b"[" * 100_000, "line 1 of there is not JSON"),
        (b"\n", "there holds no samples"),
        (b"\xff\n", "line 1 of there is not JSON"),
    ],
)
def test_lines_that_are_no_samples_are_refused_by_number(data: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said):
        decode_samples(data, "there")
