"""What `kvtriage selftest` asks of torch: is its E4M3 conversion the one we count on?"""

from __future__ import annotations

import numpy as np
import torch

from kvtriage.engines.embedded.codec import to_e4m3
from kvtriage.fp8.e4m3 import encode

__all__ = ["count_e4m3_differences"]


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
