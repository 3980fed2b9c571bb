"""Attention over a cache, against a float64 reference written from the definition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvtriage.engines.embedded import attention
from kvtriage.engines.embedded.attention import AttentionCall, attend, attention_function
from kvtriage.engines.embedded.linear import ONEDNN, TORCH, product_library
from kvtriage.errors import UnsupportedModel
from kvtriage.fp8 import e4m3


def reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: np.ndarray | None,
    fp8: bool,
) -> np.ndarray:
    """One query, one head, one key at a time. q [H, n, D], k and v [Hkv, S, D]."""
    heads, new, _ = q.shape
    span, group = k.shape[1], heads // k.shape[0]
    output = np.zeros((heads, new, v.shape[2]))
    for h in range(heads):
        for i in range(new):
            position = span - new + i
            first = 0 if window is None else max(0, position - window + 1)
            scores = k[h // group, first : position + 1] @ q[h, i] * scaling
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            top = scores.max() if sinks is None else max(scores.max(), sinks[h])
            weights = np.exp(scores - top)
            total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[h] - top))
            if fp8:
                weights = e4m3.decode(e4m3.encode((weights * 256).astype(np.float32))) / 256
            output[h, i] = weights @ v[h // group, first : position + 1] / total
    return output


@pytest.fixture(params=[ONEDNN, TORCH])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to multiply, whatever this build of torch has and however many threads there are."""
    library: str = request.param
    if library == ONEDNN and product_library(torch.device("cpu")) != ONEDNN:
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(attention, "_by_onednn", lambda _device: library == ONEDNN)
    return library


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("extra", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize(("new", "span", "window"), [
    (6, 6, None), (6, 6, 4), (1, 9, None), (3, 9, None), (3, 9, 4), (5, 8, 100), (140, 140, 7), (140, 150, None),
])  # fmt: skip
def test_attend_is_the_definition(new: int, span: int, window: int | None, extra: str, fp8: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, heads, n, 8, generator=generator) for heads, n in ((4, new), (2, span), (2, span)))
    softcap = 3.0 if extra == "softcap" else None
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if extra == "sinks" else None
    call = AttentionCall(0, q, k, v, 0.4, softcap, sinks, window)
    ours = attend(call, torch.tensor([True, True]) if fp8 else None)
    exact_q, exact_k, exact_v = (x[0].double().numpy() for x in (q, k, v))
    exact_sinks = None if sinks is None else sinks.double().numpy()
    want = reference(exact_q, exact_k, exact_v, 0.4, window, softcap, exact_sinks, fp8)
    # In FP8 a probability that float32 puts across a tie moves by one step of 2^-3 of itself.
    np.testing.assert_allclose(ours[0].numpy(), want, atol=0.02 if fp8 else 2e-6)
    if fp8:
        assert np.abs(ours[0].numpy() - want).mean() < 2e-4


def test_sequences_of_a_batch_do_not_meet(products: str) -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(3, heads, 40, 8, generator=generator) for heads in (4, 2, 2))
    together = attend(AttentionCall(0, q, k, v, 0.4, None, None, 16))
    alone = [
        attend(AttentionCall(0, q[i : i + 1], k[i : i + 1], v[i : i + 1], 0.4, None, None, 16)) for i in range(len(q))
    ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=0 if products == ONEDNN else 2e-6)


@pytest.mark.usefixtures("products")
def test_probabilities_are_quantised_in_the_heads_asked_for() -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, heads, 6, 8, generator=generator) for heads in (4, 2, 2))
    call = AttentionCall(0, q, k, v, 0.4, None, None, None)
    none, both, second = (
        attend(call, heads) for heads in (None, torch.tensor([True, True]), torch.tensor([False, True]))
    )
    torch.testing.assert_close(second[:, :2], none[:, :2])
    torch.testing.assert_close(second[:, 2:], both[:, 2:])
    assert not torch.allclose(second[:, 2:], none[:, 2:], atol=1e-4)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """So many for one test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.usefixtures("threads")
def test_onednn_is_given_no_rows_with_gaps_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model lays K and V out, [B, n, H, D]; oneDNN would go through them element by element."""
    if product_library(torch.device("cpu")) != ONEDNN:
        pytest.skip("this build of torch has no oneDNN")
    seen: list[torch.Tensor] = []

    def spy(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(weight)
        return values @ weight.T

    monkeypatch.setattr(attention, "onednn_linear", spy)
    query, key, value = (torch.randn(1, 150, heads, 8).transpose(1, 2) for heads in (6, 3, 3))
    for window in (None, 7):
        attend(AttentionCall(0, query, key, value, 0.3, None, None, window))
    assert len(seen) == 2 * 2 * 2 * 3
    assert all(weight.is_contiguous() or weight.T.is_contiguous() for weight in seen)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Elements of the largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        for one in given if isinstance(given, tuple) else (given,):
            self.elements = max(self.elements, one.numel() if isinstance(one, torch.Tensor) else 0)
        return given


@pytest.mark.usefixtures("products")
def test_nothing_grows_with_the_square_of_the_length() -> None:
    query, key, value = (torch.randn(1, 1, 2000, 8) for _ in range(3))
    with Largest() as seen:
        attend(AttentionCall(0, query, key, value, 0.3, None, None, None))
    assert 2000 * 8 <= seen.elements <= 128 * 2000


def test_a_model_that_hands_nothing_on_is_refused() -> None:
    values = torch.zeros(1, 1, 1, 4)
    with pytest.raises(UnsupportedModel, match="Identity hands no attention of another's what it was called with"):
        attention_function(torch.nn.Identity(), values, values, values, None)
