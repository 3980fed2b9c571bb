"""The engine's own answers, where they lie beside the repository, and what to compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtriage.kvcache.allocator import Reason

__all__ = ["FIGURES", "needs_shared", "reason_of", "shared_cases"]

FOLDER = Path(__file__).parents[5] / "shared" / "capacity"
FIGURES = ("num_blocks", "bytes_per_block", "blocks_per_request", "reported_tokens", "max_concurrency")
WORDS = {
    "page_size_padded >= self": Reason.PADDED_PAGE,
    "new_spec.page_size_bytes": Reason.PAGE_SIZES,
    "Failed to promote": Reason.NOT_PROMOTED,
    "the same window size": Reason.WINDOWS,
    "does not satisfy every supported set": Reason.LAYOUT,
    "To serve at least one request": Reason.REQUEST,
    "No available memory": Reason.MEMORY,
    "explicitly enabled": Reason.HYBRID_MANAGER,
    "Page padding requires": Reason.LAYOUT_PADDING,
    "cannot be split": Reason.SPLIT,
    "must be divisible by tensor parallel size": Reason.HEADS,
    "Input should be 'auto'": Reason.CACHE_DTYPE,
}

needs_shared = pytest.mark.skipif(not FOLDER.is_dir(), reason="../shared/capacity is not there")


def shared_cases(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def reason_of(message: str) -> Reason:
    """The class of a message of the engine; KeyError for a message of no known class."""
    return next(reason for words, reason in WORDS.items() if words in message)
