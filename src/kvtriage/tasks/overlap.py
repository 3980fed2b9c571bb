"""Whether two texts share a run of tokens: disjointness, checked and not hoped for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["RUN_TOKENS", "Runs"]

RUN_TOKENS = 64
"""Length of a run that two texts must not share; all of a text that is shorter."""


@dataclass(frozen=True)
class Runs:
    """The runs of some texts, to hold candidates of one length against."""

    hashes: Mapping[int, frozenset[int]]
    """Hash of every run, by run length. An accidental collision drops a candidate for nothing."""

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]], candidate_tokens: int) -> Runs:
        """`texts` as token ids; a run is no longer than the text or the candidate."""
        found: dict[int, set[int]] = {}
        for text in texts:
            width = min(RUN_TOKENS, len(text), candidate_tokens)
            found.setdefault(width, set()).update(_hashes(text, width))
        return cls({width: frozenset(hashes) for width, hashes in found.items()})

    def shared_until(self, candidate: Sequence[int]) -> int | None:
        """Where the last shared run ends: an index into `candidate`, or None when none is shared."""
        ends = (
            start + width
            for width, hashes in self.hashes.items()
            for start, run in enumerate(_hashes(candidate, width))
            if run in hashes
        )
        return max(ends, default=None)


def _hashes(text: Sequence[int], width: int) -> Iterator[int]:
    tokens = tuple(text)
    return (hash(tokens[start : start + width]) for start in range(len(tokens) - width + 1))
