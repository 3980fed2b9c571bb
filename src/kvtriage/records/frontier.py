"""What the search for a skip set measured, and the front of bytes against damage that it found.

    search.jsonl    one line for each set of layers that was measured, on which texts
    frontier.json   the set that was chosen, the front, and the sets that others would choose

A *set* is the layers that stay in BF16; all others are in FP8 under the record's `scaling`.
"""

from __future__ import annotations

from kvtriage.records.form import Part, Record
from kvtriage.records.trials import ContinuationTrial, ScoreTrial

__all__ = ["Difference", "Frontier", "SearchTrial", "SetRow", "SetTrial", "VerifiedSet"]


class SetTrial(Part, frozen=True, tag="set"):
    """One set under the texts named: mean KL from BF16 of each, nats per token."""

    skip_layers: tuple[int, ...]
    items: tuple[str, ...]
    kl: tuple[float, ...]
    conditions: str


SearchTrial = SetTrial | ScoreTrial | ContinuationTrial
"""A line of search.jsonl. The score trials are those of whole arms, by which a set is verified; what BF16 wrote for
them to read is there once, so that all read the same."""


class Difference(Part, frozen=True):
    """Drift of a set less the chosen set's, paired by text, nats per token."""

    mean: float
    low: float | None
    high: float | None
    """None when one text leaves the interval unbounded."""


class SetRow(Part, frozen=True):
    """One set: what it costs by the allocator, and what it does to texts that had no part in the choice."""

    skip_layers: tuple[int, ...]
    names: tuple[str, ...]
    """'found', or what people call it: 'none', 'first and last two', 'all sliding', 'isolated top 3'."""
    on_front: bool
    """Among the choosing texts: no measured set that holds as few bytes drifts less."""
    held_bytes: float
    """Of one sequence in steady decode, whole blocks, the mean over the workload's lengths."""
    bytes_ratio: float
    """BF16's held bytes over this set's."""
    reported_tokens: int
    """What the engine prints at its start, in the study's memory."""
    flags: tuple[str, ...]
    """What the server has to be started with for it to accept the set at all; () for nothing."""
    choosing_kl: float
    """Mean KL on the texts that chose, nats per token."""
    kl: float
    low: float | None
    high: float | None
    """On the evaluation texts; None when one text leaves the interval unbounded."""
    texts: int
    kl_status: str
    """Whether the KL margin is kept in every bucket of the evaluation texts: 'met', 'unmet' or 'cannot_tell'."""
    beside_found: Difference | None = None
    """None for the chosen set itself, and where none was chosen."""


class VerifiedSet(Part, frozen=True):
    """A set that kept the KL margin and was measured as a whole arm, on the choosing texts and needles."""

    skip_layers: tuple[int, ...]
    status: str
    """Of all quality margins of the rule together: 'met', 'unmet' or 'cannot_tell'."""
    text: str
    """The clauses that are not met, in words; '' when all are."""


class Frontier(Record, frozen=True, kw_only=True):
    """frontier.json. `found` is None when no set that the engine accepts keeps the margins: BF16 stays."""

    scaling: str
    """'per_tensor' or 'per_head': the best that the backend serves."""
    found: tuple[int, ...] | None
    status: str
    """'met': all margins hold on the choosing texts; 'cannot_tell': none was shown to hold, and this one is not shown
    to fail; 'unverified': no server that could show it is to be had, so that KL is all that was looked at;
    'none': there is none."""
    explanation: str
    rows: tuple[SetRow, ...]
    """Cheapest first."""
    verified: tuple[VerifiedSet, ...]
    kl_margin: float
    max_model_len: int
    """Tokens that the server is taken to be started for; `reported_tokens` depends on it."""
    measured_sets: int
    inferred_sets: int
    """Sets that were not measured because a larger one already failed."""
    refused_sets: int
    """Sets that no flag makes the engine accept."""
    choosing_texts: tuple[str, ...]
    claim_texts: tuple[str, ...]
    notes: tuple[str, ...] = ()
    peak_bytes: int = 0

    @property
    def found_row(self) -> SetRow | None:
        """None where nothing was found."""
        return next((row for row in self.rows if row.skip_layers == self.found), None)
