"""Every case that the engine itself has answered comes out the same, to the token and to the refusal."""

from __future__ import annotations

from typing import Any

import pytest

from kvtriage.kvcache.allocator import Capacity, allocate
from kvtriage.kvcache.allocator.group import Group
from kvtriage.kvcache.cases import answer_case, read_question
from tests.unit.kvcache.allocator.shared_cases import FIGURES, needs_shared, reason_of, shared_cases


def expected(case: dict[str, Any]) -> dict[str, Any]:
    figures = case["result"] or {}
    error = case["error"]
    return {
        "id": case.get("id") or case["input"]["id"],
        "ok": case["ok"],
        **{name: figures.get(name) for name in FIGURES},
        "error": error and (error["error_type"], reason_of(error["message"])),
    }


def answered(case: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = answer_case(case)
    error = answer["error"]
    return answer | {"error": error and (error["error_type"], error["reason"].partition(":")[0])}


@needs_shared
@pytest.mark.parametrize("name", ["golden.jsonl", "fuzz.jsonl"])
def test_every_answer_is_the_engines(name: str) -> None:
    cases = shared_cases(name)
    assert [answered(case) for case in cases] == [expected(case) for case in cases]


def capacities(name: str) -> list[tuple[dict[str, Any], Capacity]]:
    """The cases that came with layers and started."""
    found = []
    for case in shared_cases(name):
        if case["ok"] and case["result"].get("groups"):
            asked = read_question(case)
            capacity = allocate(asked.stack, asked.settings, asked.limits)
            assert isinstance(capacity, Capacity)
            found.append((case, capacity))
    return found


def shape_of(group: Group, length: int) -> tuple[int, int]:
    return group.num_layers, group.pages[0].block_size or length


@needs_shared
def test_groups_are_the_engines() -> None:
    for name in ("golden.jsonl", "fuzz.jsonl"):
        for case, capacity in capacities(name):
            groups = [
                (group[0], group[1]) if isinstance(group, list) else (group["num_layers"], group["block_size"])
                for group in case["result"]["groups"]
            ]
            made = [
                shape_of(group, capacity.max_model_len) for group in capacity.pool.groups for _ in range(group.copies)
            ]
            assert sorted(made) == sorted(groups), case.get("id") or case["input"]["id"]


@needs_shared
def test_block_sizes_and_padding_are_the_engines() -> None:
    for case, capacity in capacities("golden.jsonl"):
        rules, resolved = capacity.pool.rules, case["resolved"]
        assert rules.block_size == resolved["primary_block_size"], case["id"]
        assert rules.skip_page_bytes == resolved["skip_page_size_padded"], case["id"]


@needs_shared
def test_what_config_json_says_gives_the_layers_of_the_case() -> None:
    cases = [case for case in shared_cases("golden.jsonl") if case["config"] is not None]
    for case in cases:
        from_config = answer_case({"id": case["id"], "input": case["input"], "config": case["config"]})
        assert from_config == answer_case(case)
    assert len(cases) > 300
