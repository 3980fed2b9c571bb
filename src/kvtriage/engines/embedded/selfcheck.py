"""What `kvtriage selftest` asks: is torch's E4M3 conversion the one we count on, and the kernel's attention torch's?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kvtriage.engines.embedded.attention import AttentionCall, attend
from kvtriage.engines.embedded.codec import E4M3Codec, to_e4m3
from kvtriage.engines.embedded.kernel.kernel import NoKernel, open_decode
from kvtriage.fp8.e4m3 import encode

__all__ = ["DecodeCheck", "check_decode", "count_e4m3_differences"]


@dataclass(frozen=True)
class DecodeCheck:
    """Who computes decode steps here, and how far the kernel is from torch; None where torch does it."""

    name: str
    error: float | None


def check_decode() -> DecodeCheck:
    """The kernel on 2,000 random positions in FP8, against torch on the same bytes: the largest
    difference, as a share of the largest output.
    """
    with open_decode(1, "storage", torch.device("cpu")) as decode:
        match decode:
            case NoKernel():
                return DecodeCheck(decode.name, None)
            case _:
                generator = torch.Generator().manual_seed(0)
                key, value = (torch.randn(1, 2, 2000, 64, generator=generator) for _ in range(2))
                query = torch.randn(1, 8, 1, 64, generator=generator)
                codec = E4M3Codec(torch.tensor([0.5, 2.0]))
                k, v = codec.encode(key), codec.encode(value)
                call = AttentionCall(0, query, key[:, :, :1], value[:, :, :1], 0.125, None, None, None)
                scales = np.array(codec.scales, np.float32)
                found = decode.attend(call, k, v, np.array([[0, 2000]], np.int64), scales, scales)
                expected = attend(replace(call, key=codec.decode(k), value=codec.decode(v)))
                return DecodeCheck(decode.name, float((found - expected).abs().max() / expected.abs().max()))


def count_e4m3_differences() -> tuple[int, int]:
    """(differing bytes, values tried): torch against the reference in numpy.

    Tried: every float32 with 8 exponent and 7 mantissa bits that is finite, which holds every
    E4M3 value and every tie between two of them.
    """
    bits = np.arange(2**16, dtype=np.uint32) << 16
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    stored = to_e4m3(torch.from_numpy(values)).view(torch.uint8).numpy()
    return int(np.count_nonzero(stored != encode(values))), values.size
