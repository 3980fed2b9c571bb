"""The same bits for any number of threads, where torch alone would give others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvtriage.engines.embedded.engine import engine_threads
from kvtriage.engines.embedded.log_probs import LogProbs, normalise
from kvtriage.engines.embedded.observing import RangeObserver
from kvtriage.engines.embedded.sums import row_sums
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec

VOCABULARY = 262_208
"""Gemma 3's from 4B on: each position is a piece of its own."""


def of(threads: int, result: Callable[[], object]) -> object:
    with engine_threads(threads):
        return result()


def drawn(*shape: int) -> Tensor:
    """Numbers of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


def test_rows_are_summed_whole() -> None:
    values = drawn(3, 700, 50)
    assert torch.allclose(row_sums(values), values.double().sum(dim=(1, 2)), rtol=1e-12, atol=1e-9)
    assert row_sums(values).dtype is torch.float64


@pytest.mark.parametrize("threads", [2, 3])
def test_a_position_of_a_large_vocabulary(threads: int) -> None:
    logits, other = drawn(5, VOCABULARY), drawn(5, VOCABULARY) * 1.01

    def divergence() -> tuple[float, ...]:
        return LogProbs(normalise(other.clone())).kl_from(LogProbs(normalise(logits.clone())))

    assert of(threads, divergence) == of(1, divergence)
    assert torch.equal(normalise(logits.clone()).exp().double().sum(dim=1).round(decimals=5), torch.ones(5).double())


@pytest.mark.parametrize("threads", [2, 3])
def test_the_only_kv_head_of_a_layer(threads: int) -> None:
    spec = CacheSpec("test", (LayerSpec(0, LayerKind.FULL, 4, 1, 256, 256),), 1_024)
    texts = [drawn(1, 1, 512, 256) * scale for scale in (1.0, 0.3, 0.07)]

    def errors() -> bytes:
        observer = RangeObserver(spec, (0,))
        for text in texts:
            observer.look(0, "k", text)
        return observer.stats(1).tensors[0, "k"].mantissa_sse.tobytes()

    assert of(threads, errors) == of(1, errors)
