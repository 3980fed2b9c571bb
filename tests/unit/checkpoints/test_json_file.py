"""JSON from a stranger: what is read, and what contradicts itself."""

from __future__ import annotations

import math

import pytest

from kvtriage.checkpoints.json_file import parse_object
from kvtriage.errors import ModelError


def parse(text: str) -> dict[str, object]:
    return parse_object(text.encode(), "config.json", "a hint")


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": 1, "a": true}', '{"b": {"a": [1], "a": [2]}}'])
def test_two_values_under_one_key_are_refused(text: str) -> None:
    with pytest.raises(ModelError, match="it states 'a' twice"):
        parse(text)


def test_one_value_written_twice_is_one_value() -> None:
    assert parse('{"a": {"b": 1, "c": 2}, "a": {"c": 2, "b": 1}}') == {"a": {"b": 1, "c": 2}}


def test_a_number_that_is_none_contradicts_nothing() -> None:
    value = parse('{"a": NaN}')["a"]
    assert isinstance(value, float)
    assert math.isnan(value)
