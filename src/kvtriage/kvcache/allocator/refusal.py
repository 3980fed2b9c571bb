"""What the engine says when it does not start."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvtriage.errors import UnsupportedModel

__all__ = ["EngineRefused", "Reason", "Refusal", "not_modelled"]


class Reason(enum.StrEnum):
    """Why vLLM 0.32 ends before it serves; where it does so: docs/reference/capacity.md."""

    BLOCK_SIZE = "block_size_has_no_backend"
    CACHE_DTYPE = "cache_dtype_unknown"
    CONTEXT_PARALLEL = "context_parallel_not_supported"
    HEADS = "heads_do_not_divide"
    HYBRID_MANAGER = "hybrid_manager_not_supported"
    LAYOUT = "layout_not_supported"
    LAYOUT_PADDING = "layout_cannot_pad"
    LENGTH = "no_length_fits"
    MAMBA = "mamba_flags_not_supported"
    MEMORY = "no_memory"
    NOT_PROMOTED = "no_unified_type"
    PADDED_PAGE = "padded_page_too_small"
    PAGE_SIZES = "pages_not_unified"
    REQUEST = "request_does_not_fit"
    SPLIT = "padded_page_cannot_be_split"
    STAGES = "stage_without_cache"
    WINDOWS = "window_sizes_differ"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The exception the engine raises (`error_type`), why, and what that means here."""

    error_type: str
    reason: Reason
    detail: str

    @property
    def text(self) -> str:
        """'request_does_not_fit: one request of 32,768 tokens needs ...'"""
        return f"{self.reason}: {self.detail}"


class EngineRefused(Exception):
    """The engine would not start. `allocate` returns the Refusal in place of raising."""

    def __init__(self, error_type: str, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.refusal = Refusal(error_type, reason, detail)


def not_modelled(what: str) -> UnsupportedModel:
    """An error of kvtriage's own, not the engine's: the figures would be guesses."""
    return UnsupportedModel(
        f"kvtriage does not model {what}",
        hint="docs/reference/capacity.md lists what is modelled; the worksheet needs none of it",
    )
