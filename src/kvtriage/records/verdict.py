"""verdict.json: what follows from the evidence, clause by clause."""

from __future__ import annotations

from kvtriage.records.form import Part, Record

__all__ = ["Reason", "RepairChoice", "Verdict"]


class Reason(Part, frozen=True):
    """One clause of the rule, read against one cell of the evidence."""

    clause: str
    """'kl', 'nll', 'top1', 'needle', 'found', 'generated', 'imported', 'range', 'capacity', 'latency', 'served',
    'backend' or 'baseline'."""
    arm: str
    cell: str
    """'all', 'bucket 1024', or 'traffic': over the workload's lengths. Before the bucket may stand a task other than
    `needle`, or the span of generated tokens: 'recall, bucket 1024', 'tokens 33-128, all'. Of what was imported: task
    and metric."""
    value: float | None
    """What was measured; None when nothing could be, as in the 'backend' clause."""
    low: float | None
    high: float | None
    """The interval of `value`; None when it is unbounded: one item has no interval."""
    threshold: float | None
    """What `value` is read against; None in the 'backend' clause."""
    status: str
    """'met', 'unmet' or 'cannot_tell'."""
    items: int
    items_needed: int | None
    """Items that would settle it, `power` of the time, if mean and spread stay; for 'cannot_tell', and for answers
    'found' where so few were asked that no loss could be shown."""
    text: str
    detectable: float | None = None
    """Least distance from the threshold that `items` items tell, `power` of the time."""
    noise: float | None = None
    """What BF16 repeated differs from itself in this cell: a value inside it is no difference."""
    p_beyond: float | None = None
    """One-sided p of `value` lying beyond `threshold`, corrected over the arm's cells."""
    p_harm: float | None = None
    """Two-sided p of `value` being different from BF16's at all, corrected over the arm's cells."""


class RepairChoice(Part, frozen=True):
    scaling: str
    """'native', 'unit', 'per_tensor' or 'per_head'."""
    skip_layers: tuple[int, ...]


class Verdict(Record, frozen=True):
    """verdict.json. `choice` is None exactly when `status` is 'cannot_tell'."""

    choice: RepairChoice | None
    status: str
    """'decided' or 'cannot_tell'."""
    repair: str
    """'none', 'scales', 'skip' or 'both': what FP8 at scale 1 needs."""
    arm: str | None
    reasons: tuple[Reason, ...]
    vllm_args: tuple[str, ...]
    headline: str
    sentences: tuple[str, ...]
    """Diagnosis for people: what is wrong and why, what to do, what it gives up, how sure."""
    caveats: tuple[str, ...]
    """What these numbers cannot tell."""
    ratio_vs_bf16: float | None
    """Cache bytes of BF16 over the choice's, at the largest bucket."""
    items_needed: int | None
    next_step: str
    rule: str = "strict"
    """The name of the rule that was read."""
    server_env: tuple[str, ...] = ()
    """NAME=VALUE that the server's environment has to hold, or it refuses to start with these layers in BF16."""
