"""evidence.json: the arms that were tried, and the conditions that all had in common."""

from __future__ import annotations

from kvtriage.records.form import Part, Record

__all__ = ["ArmRecord", "Conditions", "Evidence", "Stop"]


class Conditions(Part, frozen=True):
    """Everything that must be equal before two trials may be compared."""

    model: str
    data: str
    study: str
    engine: str
    engine_version: str
    device: str
    backend: str
    numerics: str
    compute_dtype: str
    native_dtype: str
    threads: int
    memory_bytes: int
    scales: str
    kl_top_k: int | None = None
    """None where kl counts the whole vocabulary; else it is `kl_top_k`: the reference's k most likely tokens, and
    all others as one. That is a lower bound of the divergence."""
    readback: str = "live"
    """'live': dtypes and scales were read back layer by layer; 'config': dtypes as the server was configured, scales
    could not be read back; 'none': neither could."""
    scoring: str = "full"
    """'full': likelihoods are of the whole vocabulary; 'prompt_logprobs', 'echo', 'echo_text': of the most likely
    tokens, as a server gives them of a prompt; 'generated': none, items were continued and nothing else."""
    server: tuple[str, ...] = ()
    """Arguments that all arms' servers share; those of an arm follow from its policy."""
    repeat: str = "chunks"
    """How BF16 is repeated: 'chunks' of a prefill, or in other 'batches' where a server's steps are its own affair."""
    rounding: str = "nearest"
    """To E4M3: 'nearest' or 'towards zero'."""
    probe_numerics: str | None = None
    """What probes and the scale-free bound round, where that is not what `numerics` says of the arms."""
    mixed_backends: bool = False
    """Whether arms may run on another attention backend than BF16, because the user allowed it."""


class ArmRecord(Part, frozen=True):
    """One arm, with the policy the engine said it applied."""

    name: str
    label: str
    policy: tuple[str, ...]
    scaling: str
    """'native', 'unit', 'per_tensor', 'per_head' or 'mantissa'."""
    skip_layers: tuple[int, ...]
    role: str
    """'baseline', 'noise', 'candidate', 'bound' or 'contrast'."""
    same_as: str | None = None
    """Another arm whose policy and scales are equal to the bit; its trials serve for both."""


class Stop(Part, frozen=True):
    """Where a study of several looks ended: it says how much of the error rate was spent."""

    look: int
    looks: int
    items: int
    """That every arm was asked."""
    of_items: int
    """That it would have been asked by the last look."""
    why: str | None
    """Why more items would not have helped; None where the last look came first."""

    def __post_init__(self) -> None:
        """Raises ValueError for a look that no study has."""
        if not 1 <= self.look <= self.looks <= self.of_items:
            raise ValueError(f"there is no look {self.look} of {self.looks} at {self.of_items} items")


class Evidence(Record, frozen=True):
    """evidence.json: the arms and conditions of trials.jsonl, written when all are in."""

    arms: tuple[ArmRecord, ...]
    conditions: Conditions
    conditions_hash: str
    trials: int
    noise_floor_kl: float
    """Mean KL of BF16 against BF16 repeated with a chunked prefill, nats per token."""
    peak_bytes: int
    stop: Stop | None = None
    """None for a study that is read once, when all items are in."""
