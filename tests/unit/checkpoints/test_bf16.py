from __future__ import annotations

import numpy as np
import torch

from kvtriage.checkpoints.bf16 import narrow, widen


def test_every_pattern_survives() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    again = narrow(widen(bits))
    numbers = ~np.isnan(widen(bits))
    assert np.array_equal(again[numbers], bits[numbers])
    assert np.isnan(widen(again[~numbers])).all()


def test_rounding_is_torchs() -> None:
    random = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    ties = (np.arange(2**16, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    values = np.concatenate([random, ties])
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(narrow(values), expected)
