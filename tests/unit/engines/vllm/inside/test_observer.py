"""The extension's methods, on a worker that behaves as vLLM's does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from kvtriage_rounding import round_e4m3
from torch import Tensor

from tests.unit.engines.vllm.inside.worker import DIM, Worker

UNIT: dict[str, Any] = {"format": "fp8", "heads": None, "k": [1.0], "v": [1.0]}


def qkv(tokens: int, queries: int = 4, heads: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, queries, DIM, generator=generator),
        torch.randn(tokens, heads, DIM, generator=generator),
        torch.randn(tokens, heads, DIM, generator=generator),
    )


def test_nothing_is_hooked_before_the_first_call() -> None:
    worker = Worker()
    assert "forward" not in vars(worker.attention(0).impl)
    worker.kvtriage_layers()
    worker.kvtriage_layers()
    assert worker.attention(0).impl.forward.__name__ == "forward"
    worker.step(0, *qkv(3))
    assert len(worker.attention(0).impl.attended) == 1


def test_only_real_tokens_of_observed_steps_are_seen() -> None:
    worker = Worker(layers=(None,))
    q, k, v = qkv(6)
    worker.step(0, 100 * q, 100 * k, 100 * v)
    worker.kvtriage_observe(True, [0, 4])
    worker.profile(0, 100 * q)
    k[5], v[5] = 1e6, float("nan")
    worker.step(0, q, k, v, first=1, padding=1)
    worker.kvtriage_observe(False)
    worker.step(0, 100 * q, 100 * k, 100 * v)
    reply = worker.kvtriage_ranges()["0"]
    assert reply["tokens"] == 5
    assert reply["k"]["amax"] == [
        [float(k[:3, head].abs().max()), float(k[3:5, head].abs().max())] for head in range(2)
    ]
    assert reply["v"]["nonfinite"] == [0, 0]
    assert reply["q"]["nonfinite"] == [0, 0, 0, 0]
    assert reply["q"]["mantissa_sse"] == [[], [], [], []]
    assert json.loads(json.dumps(reply, allow_nan=False)) == reply


def test_observing_anew_forgets() -> None:
    worker = Worker(layers=(None,))
    for _ in range(2):
        worker.kvtriage_observe(True)
        worker.step(0, *qkv(3))
    assert worker.kvtriage_ranges()["0"]["tokens"] == 3


def test_candidates_are_held_against_what_passes() -> None:
    worker = Worker(layers=(None,))
    worker.kvtriage_observe(True, [0], [{"0": {"k": [1e-9, 1.0], "v": [1.0]}}, {"0": {"k": [1e9], "v": [1.0]}}])
    worker.step(0, *qkv(3))
    first, second = worker.kvtriage_ranges()["0"]["held_out"]["k"]
    assert first["saturated"] == [3 * DIM, 0]
    assert second["below_normal"] == [3 * DIM, 3 * DIM]


@pytest.mark.parametrize("scales", [{}, {"0": {"k": [1.0]}}, {"0": {"k": [1.0] * 3, "v": [1.0]}}])
def test_a_candidate_that_does_not_fit_changes_nothing(scales: dict[str, Any]) -> None:
    worker = Worker(layers=(None,))
    worker.kvtriage_observe(True)
    worker.step(0, *qkv(3))
    with pytest.raises(ValueError, match="scales"):
        worker.kvtriage_observe(True, [0], [scales])
    assert worker.kvtriage_ranges()["0"]["tokens"] == 3


@pytest.mark.parametrize("edges", [[], [1], [0, 5, 5], [0, 5, 3]])
def test_edges_ascend_from_0(edges: list[int]) -> None:
    with pytest.raises(ValueError, match="ascend from 0"):
        Worker().kvtriage_observe(True, edges)


def test_asking_before_observing_is_refused() -> None:
    with pytest.raises(RuntimeError, match="kvtriage_observe first"):
        Worker().kvtriage_ranges()


def test_a_sharing_layer_replies_with_the_k_and_v_it_reads() -> None:
    worker = Worker(layers=(None, 0))
    worker.kvtriage_observe(True)
    q, k, v = qkv(4)
    worker.step(0, q, k, v)
    worker.step(1, 2 * q, 50 * k, 50 * v)
    own, sharing = worker.kvtriage_ranges().values()
    assert sharing["k"] == own["k"]
    assert sharing["v"] == own["v"]
    assert sharing["q"]["amax"] != own["q"]["amax"]
    with pytest.raises(ValueError, match="probe layer 0"):
        worker.kvtriage_probe({"1": UNIT})


def test_a_quantised_cache_is_neither_observed_nor_probed() -> None:
    worker = Worker()
    worker.attention(1).kv_cache_dtype = "fp8"
    with pytest.raises(RuntimeError, match="not quantised"):
        worker.kvtriage_observe(True)
    with pytest.raises(RuntimeError, match=r"model\.layers\.1\.attn stores its cache as fp8"):
        worker.kvtriage_probe({"1": UNIT})
    worker.kvtriage_probe({"0": UNIT})


def test_a_probe_rounds_what_is_stored_in_its_layers_alone() -> None:
    worker = Worker()
    worker.kvtriage_probe({"1": {"format": "fp8", "heads": [1], "k": [0.1], "v": [0.2]}})
    q, k, v = qkv(5)
    for index in (0, 1):
        worker.step(index, q, k, v)
    (untouched,), ((stored_k, stored_v),) = (worker.attention(index).impl.stored for index in (0, 1))
    assert torch.equal(untouched[0], k)
    assert torch.equal(stored_k[:, 0], k[:, 0])
    assert torch.equal(stored_k[:, 1], round_e4m3(k[:, 1], torch.tensor(0.1)))
    assert torch.equal(stored_v[:, 1], round_e4m3(v[:, 1], torch.tensor(0.2)))
    worker.kvtriage_probe({})
    worker.step(1, q, k, v)
    assert torch.equal(worker.attention(1).impl.stored[-1][0], k)


def test_a_probe_that_cannot_be_made_leaves_the_last_one() -> None:
    worker = Worker()
    worker.kvtriage_probe({"0": UNIT})
    for bad in ({"0": {**UNIT, "k": []}}, {"1": UNIT, "9": UNIT}):
        with pytest.raises(ValueError, match=r"model\.layers\.0\.attn: k of a probe|\[9\]"):
            worker.kvtriage_probe(bad)
    _, k, v = qkv(2)
    for index in (0, 1):
        worker.step(index, k.repeat(1, 2, 1), k, v)
    assert not torch.equal(worker.attention(0).impl.stored[0][0], k)
    assert torch.equal(worker.attention(1).impl.stored[0][0], k)


def test_nan_is_counted_by_layer_while_watching() -> None:
    """A server that was asked for its layers and no more is not slowed down."""
    worker = Worker()
    worker.kvtriage_layers()
    q, k, v = qkv(3)
    k[0, 0, :2] = float("inf")
    worker.step(1, q, k, v)
    assert worker.kvtriage_nonfinite() == {"0": 0, "1": 0}
    worker.kvtriage_watch(True)
    worker.step(1, q, k, v)
    assert worker.kvtriage_nonfinite() == {"0": 0, "1": 2}
    worker.kvtriage_watch(False)
    worker.step(1, q, k, v)
    assert worker.kvtriage_nonfinite() == {"0": 0, "1": 2}
