from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.kvcache.observed.log_values import read_pairs, read_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("None", None),
        ("True", True),
        ("-1", -1),
        ("0.92", 0.92),
        ("'a, b'", "a, b"),
        ('"it\'s"', "it's"),
        ("[]", ()),
        ("['sliding_window', '3']", ("sliding_window", "3")),
        ("{'method': 'mtp', 'n': 2}", {"method": "mtp", "n": 2}),
        ("SpeculativeConfig(method='mtp', num_spec_tokens=2)", {"method": "mtp", "num_spec_tokens": 2}),
        ("<Mode.NONE: 0>", "<Mode.NONE: 0>"),
        ("torch.bfloat16", "torch.bfloat16"),
        ("9" * 30, "9" * 30),
    ],
)
def test_values(text: str, value: object) -> None:
    assert read_value(text) == value


def test_pairs_in_each_of_their_forms() -> None:
    assert read_pairs("{'a': 1, 'b': {'c': [1, 2]}}") == {"a": 1, "b": {"c": (1, 2)}}
    assert read_pairs("Namespace(a=None, b='x=1, y=2')") == {"a": None, "b": "x=1, y=2"}
    assert read_pairs("model='m', config=Config(a=1, b=2), n=3") == {"model": "m", "config": {"a": 1, "b": 2}, "n": 3}


def test_what_is_cut_off_leaves_what_stands_before() -> None:
    assert read_pairs("{'a': 1, 'b': 'tex")["a"] == 1


@given(st.text())
def test_any_text_has_a_value(text: str) -> None:
    read_value(text)
    read_pairs(text)
