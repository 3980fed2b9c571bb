"""What goes wrong with a server that plays, and how often before it goes right again."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["STALL_S", "Faults"]

STALL_S = 2.0
"""How long a stalled stream is silent before it breaks off."""


@dataclass
class Faults:
    """How many requests of a kind fail before the next one is answered; −1 for all of them."""

    status: dict[str, list[int]] = field(default_factory=dict)
    """Path → statuses answered in turn before the right one."""
    short_scores: int = 0
    no_logprobs: int = 0
    other_tokens: int = 0
    nan_logprobs: int = 0
    nan_answers: int = 0
    """As vLLM has it: an answer with NaN in it cannot be written."""
    cut_streams: int = 0
    stalled_streams: int = 0
    short_streams: int = 0
    error_streams: int = 0
    not_json: int = 0
    deaths: int = 0
    """Requests after which the whole server ends without an answer."""
    nonfinite: int = 0
    mixes_up_batches: bool = False
    forgets_prefixes: bool = False
    default_scales: bool = False
    ignores_skip: bool = False
    start: str = ""
    """'oom', 'port', 'dies', 'never' or 'mute': how a program fails before it is ready."""

    def strikes(self, name: str) -> bool:
        left: int = getattr(self, name)
        if left > 0:
            setattr(self, name, left - 1)
        return left != 0
