"""Against the definition, query by query in float64."""

from __future__ import annotations

import math

import pytest
import torch
from kvtriage_vllm_cpu.attention import Shape, attend
from torch import Tensor

HEADS, DIM = 6, 8


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def definition(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    heads, new, _ = query.shape
    span = key.shape[1]
    output = torch.zeros(heads, new, value.shape[2], dtype=torch.float64)
    for head in range(heads):
        of = head * key.shape[0] // heads
        for i in range(new):
            last = span - new + i
            first = 0 if shape.window_tokens is None else max(0, last - shape.window_tokens + 1)
            scores = key[of, first : last + 1].double() @ query[head, i].double() * shape.scaling
            if shape.softcap is not None:
                scores = torch.tanh(scores / shape.softcap) * shape.softcap
            weights = scores.exp()
            total = weights.sum() + (0.0 if shape.sinks is None else math.exp(shape.sinks[head]))
            output[head, i] = weights @ value[of, first : last + 1].double() / total
    return output


@pytest.mark.parametrize("kv_heads", [6, 3, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("window_tokens", [None, 5, 300])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("new", "span"), [(7, 7), (3, 20), (1, 20)])
def test_attention_is_its_definition(
    kv_heads: int, window_tokens: int | None, softcap: float | None, has_sinks: bool, new: int, span: int
) -> None:
    query, key, value = numbers(HEADS, new, DIM), numbers(kv_heads, span, DIM, seed=1), numbers(kv_heads, span, DIM)
    first = 0 if window_tokens is None else max(0, span - new - window_tokens + 1)
    shape = Shape(0.4, window_tokens, softcap, numbers(HEADS, seed=2) if has_sinks else None)
    found = attend(query, key[:, first:], value[:, first:], shape)
    torch.testing.assert_close(found.double(), definition(query, key, value, shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window_tokens", [None, 100])
def test_a_long_text_is_attended_to_in_pieces(window_tokens: int | None) -> None:
    query, key, value = numbers(2, 600, DIM), numbers(1, 600, DIM, seed=1), numbers(1, 600, DIM, seed=2)
    shape = Shape(0.4, window_tokens)
    found = attend(query, key, value, shape)
    for at in (0, 255, 256, 599):
        alone = attend(query[:, at : at + 1], key[:, : at + 1], value[:, : at + 1], Shape(0.4))
        windowed = max(0, at + 1 - (window_tokens or 600))
        if windowed:
            window = slice(windowed, at + 1)
            alone = attend(query[:, at : at + 1], key[:, window], value[:, window], Shape(0.4))
        torch.testing.assert_close(found[:, at : at + 1], alone, rtol=1e-5, atol=1e-5)
