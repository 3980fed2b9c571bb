"""Replies of several ranks, put together into one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from kvtriage.engines.vllm.client import Client
from kvtriage.engines.vllm.failures import Overdue, Refused
from kvtriage.engines.vllm.observer import Observer
from kvtriage.errors import EngineError, NonFinite
from kvtriage.fp8.scales import LayerScales, ScaleSet
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec

SPEC = CacheSpec("test", tuple(LayerSpec(i, LayerKind.FULL, 4, 2, 8, 8) for i in range(2)), 64)
TOKENS = 10


class Ranks:
    """A client that answers for the extension, one reply per rank."""

    def __init__(self, replies: Sequence[object]) -> None:
        self.replies = list(replies)
        self.asked: list[Mapping[str, Any]] = []

    def post_json(self, path: str, body: Mapping[str, Any]) -> object:
        self.asked.append(body)
        return {"results": self.replies}


class Late(Ranks):
    """The extension is at work for longer than an answer may take."""

    def post_json(self, path: str, body: Mapping[str, Any]) -> object:
        raise Overdue("the time is up", hint="--answer-timeout")


def observer(*replies: object) -> Observer:
    return Observer(cast(Client, Ranks(replies)))


def tensor(heads: Sequence[int], *, mantissa: bool = True, nonfinite: int = 0) -> dict[str, Any]:
    """Head h reaches to h + 1, twice as far in the second position bucket."""
    return {
        "amax": [[h + 1.0, 2 * h + 2.0] for h in heads],
        "mantissa_sse": [[float(h)] * 8 for h in heads] if mantissa else [],
        "nonfinite": [nonfinite] * len(heads),
    }


def rank(
    heads: Sequence[int], queries: Sequence[int], *, tokens: int = TOKENS, layers: int = 2, nonfinite: int = 0
) -> dict[str, Any]:
    counts = {"elements": [80] * len(heads), "saturated": list(heads), "below_normal": [8] * len(heads)}
    layer = {
        "heads": list(heads),
        "query_heads": list(queries),
        "tokens": tokens,
        "q": tensor(queries, mantissa=False),
        "k": tensor(heads, nonfinite=nonfinite),
        "v": tensor(heads),
        "held_out": {"k": [counts], "v": [counts]},
    }
    return {str(layer_idx): layer for layer_idx in range(layers)}


SPLITS = {
    "one rank": [rank((0, 1), (0, 1, 2, 3))],
    "two ranks": [rank((0,), (0, 1)), rank((1,), (2, 3))],
    "two ranks, in any order": [rank((1,), (2, 3)), rank((0,), (0, 1))],
    "four ranks of two KV heads": [rank((0,), (0,)), rank((), (1,)), rank((1,), (2,)), rank((), (3,))],
}


@pytest.mark.parametrize("replies", SPLITS.values(), ids=SPLITS)
def test_heads_come_back_in_global_order(replies: list[object]) -> None:
    found = observer(*replies).ranges(SPEC, (0, 16), TOKENS)
    assert found.tokens == TOKENS
    for layer_idx in range(2):
        assert found.tensors[layer_idx, "k"].amax.tolist() == [2.0, 4.0]
        assert found.tensors[layer_idx, "q"].amax.tolist() == [2.0, 4.0, 6.0, 8.0]
        assert found.tensors[layer_idx, "v"].amax_by_position.tolist() == [[1.0, 2.0], [2.0, 4.0]]
        assert found.tensors[layer_idx, "k"].mantissa_sse.shape == (2, 8)
        assert found.tensors[layer_idx, "q"].mantissa_sse.shape == (4, 0)
        assert found.tensors[layer_idx, "k"].mantissa_sse[:, 0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("replies", SPLITS.values(), ids=SPLITS)
def test_shares_are_of_each_head(replies: list[object]) -> None:
    (found,) = observer(*replies).held_out(SPEC, 1, TOKENS)
    shares = [s for s in found.shares if (s.layer_idx, s.tensor) == (1, "v")]
    assert [(s.head, s.saturated, s.below_normal, s.amax) for s in shares] == [
        (0, 0.0, 0.1, 2.0),
        (1, 1 / 80, 0.1, 4.0),
    ]


@pytest.mark.parametrize(
    ("replies", "error", "says"),
    [
        ([rank((0, 1), (0, 1, 2, 3), tokens=9)], EngineError, "showed 9 of the 10 tokens"),
        ([rank((0,), (0, 1))], EngineError, "the heads"),
        ([rank((0, 1), (0, 1, 2, 3), layers=1)], EngineError, "the layers that config.json describes"),
        ([rank((0, 1), (0, 1, 2, 3), nonfinite=1)], NonFinite, "K of layer 0"),
        ([{"0": {"heads": "?"}}], Refused, "cannot be read"),
        ([], Refused, "no answer"),
    ],
)
def test_what_is_not_whole_is_refused(replies: list[object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        observer(*replies).ranges(SPEC, (0, 16), TOKENS)


def test_what_is_asked_is_plain() -> None:
    ranks = Ranks([None])
    watch = Observer(cast(Client, ranks))
    watch.start(
        (0, 16), [ScaleSet(Scaling.PER_TENSOR, tuple(LayerScales(i, (1.0,), (2.0,), (3.0,)) for i in range(2)))]
    )
    watch.probe({1: {"format": "fp8", "heads": (0,), "k": (1.0,), "v": (1.0,)}})
    assert ranks.asked[0] == {
        "method": "kvtriage_observe",
        "args": [True, [0, 16], [{"0": {"k": (2.0,), "v": (3.0,)}, "1": {"k": (2.0,), "v": (3.0,)}}]],
    }
    assert ranks.asked[1]["args"] == [{"1": {"format": "fp8", "heads": (0,), "k": (1.0,), "v": (1.0,)}}]


def test_non_finite_elements_add_up_over_ranks() -> None:
    assert observer({"0": 1, "1": 0}, {"0": 2, "1": 0}).nonfinite() == {0: 3, 1: 0}


def test_work_whose_time_is_up_is_told_apart_from_work_that_failed() -> None:
    """It is not asked for again, and the hint names the option."""
    with pytest.raises(Overdue, match="the time is up"):
        Observer(cast(Client, Late([]))).ranges(SPEC, (0, 16), TOKENS)
