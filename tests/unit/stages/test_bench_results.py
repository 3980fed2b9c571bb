from __future__ import annotations

import json
import math

import pytest

from kvtriage.errors import DataError
from kvtriage.records.imported import Imported
from kvtriage.stages.bench_results import read_bench
from tests.unit.stages.imported_cases import bench

TIMES = [(128, 0.5, (0.01, 0.03)), (256, 0.7, (0.02,))]


def read(**changes: object) -> tuple[Imported, Imported]:
    ttft, itl = read_bench(json.dumps(bench(TIMES, **changes)).encode(), "bf16", "there", "0" * 64, {})
    return ttft, itl


def test_requests_are_items() -> None:
    ttft, itl = read()
    assert (ttft.metric, itl.metric) == ("ttft_s", "itl_s")
    assert [item.value for item in ttft.items] == [0.5, 0.7]
    assert [item.value for item in itl.items] == pytest.approx([0.02, 0.02])
    assert not ttft.higher_is_better
    assert ttft.items[0].asked != ttft.items[1].asked


def test_traffic_and_version_are_conditions_and_the_checkpoint_is_told() -> None:
    ttft, _ = read(vllm_version="0.32.0")
    assert ttft.conditions["request_rate"] == "inf"
    assert ttft.conditions["max_concurrency"] == "1"
    assert ttft.conditions["engine_version"] == "0.32.0"
    assert ttft.told["model_id"] == "m"
    assert "engine_version" not in read()[0].conditions


def test_a_request_that_failed_is_unscored() -> None:
    ttft, itl = read(errors=["", "timed out"])
    assert (ttft.unscored, itl.unscored) == (1, 1)
    assert read(ttfts=[0.0, 0.7])[0].items[0].value is None
    assert read(ttfts=[math.nan, 0.7])[0].items[0].value is None
    assert read(itls=[[], [0.02]])[1].items[0].value is None
    assert read(itls=[[0.01, math.nan], [0.02]])[1].items[0].value is None


def test_without_the_details_nothing_can_be_paired() -> None:
    plain = {key: value for key, value in bench(TIMES).items() if key not in ("ttfts", "itls", "input_lens")}
    with pytest.raises(DataError, match="has no times of single requests") as caught:
        read_bench(json.dumps(plain).encode(), "bf16", "there", "", {})
    assert "--save-detailed" in caught.value.hint


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "there is not one result of vllm bench serve"),
        (b"[]", "there is not one result of vllm bench serve"),
        (json.dumps(bench(TIMES)).encode() * 2, "there is not one result of vllm bench serve"),
        (json.dumps(bench(TIMES, ttfts=[0.1])).encode(), "times and lengths of different numbers of requests"),
    ],
)
def test_what_is_no_single_result_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_bench(data, "bf16", "there", "", {})
