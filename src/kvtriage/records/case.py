"""The records of a case, one per verb, each chained to those before it by SHA-256.

    plan.json → scales.json → sensitivities.json → trials.jsonl + evidence.json → verdict.json

A record's `inputs` maps the file names it was made from to their SHA-256. No record is ever
edited; a verb whose inputs have changed refuses to go on.
"""

from __future__ import annotations

import msgspec

from kvtriage.records.study import Study

__all__ = [
    "SCHEMA",
    "ArmRecord",
    "CapacityTrial",
    "Conditions",
    "ContinuationTrial",
    "DataRef",
    "Evidence",
    "HeldOutRow",
    "LayerGeometry",
    "LayerScalesRecord",
    "LoadTrial",
    "ModelRef",
    "OperandRow",
    "Plan",
    "PoolTrial",
    "ProbeCost",
    "ProbeRow",
    "Reason",
    "RepairChoice",
    "RepairRow",
    "ScaleRecord",
    "ScoreTrial",
    "Sensitivities",
    "Stop",
    "SweepRow",
    "TimingTrial",
    "Trial",
    "Verdict",
]

SCHEMA = 1
"""Version of every record's form. A case of another version is refused by name."""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    schema: int = SCHEMA
    kvtriage_version: str
    inputs: dict[str, str] = {}


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


# --- plan -------------------------------------------------------------------------------


class ModelRef(_Part, frozen=True):
    """Which model: `source` as the user named it, `path` the folder, and a fingerprint.

    The fingerprint is the SHA-256 over config.json and the safetensors headers and sizes.
    """

    source: str
    path: str
    architecture: str
    fingerprint: str
    parameters: int


class DataRef(_Part, frozen=True):
    source: str
    sha256: str
    documents: int
    characters: int


class LayerGeometry(_Part, frozen=True):
    layer_idx: int
    kind: str
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    window_tokens: int | None


class Plan(_Record, frozen=True):
    """plan.json: the model's geometry, the study and the data it will use."""

    model: ModelRef
    data: DataRef
    study: Study
    model_type: str
    max_model_len: int
    layers: tuple[LayerGeometry, ...]
    assumed: tuple[str, ...]
    warnings: tuple[str, ...]


# --- calibrate --------------------------------------------------------------------------


class LayerScalesRecord(_Part, frozen=True):
    """Scales of one layer: real = stored × scale, float32. q [H], k and v [Hkv], or [1]."""

    layer_idx: int
    q: tuple[float, ...]
    k: tuple[float, ...]
    v: tuple[float, ...]


class HeldOutRow(_Part, frozen=True):
    """Shares of the held-out K or V elements of one head, under one scaling."""

    scaling: str
    layer_idx: int
    tensor: str
    head: int
    saturated: float
    below_normal: float
    amax: float


class SweepRow(_Part, frozen=True):
    """Largest |K| or |V| of one layer by position: edges[i] ≤ position < edges[i+1]."""

    layer_idx: int
    tensor: str
    amax: tuple[float, ...]


class ScaleRecord(_Record, frozen=True):
    """scales.json: both scale sets, what was seen, and how they do on text not calibrated on."""

    per_tensor: tuple[LayerScalesRecord, ...]
    per_head: tuple[LayerScalesRecord, ...]
    sub_octave_k: tuple[tuple[float, ...], ...]
    """Best sub-octave position of each KV head for the scale-free bound: [L][Hkv]."""
    sub_octave_v: tuple[tuple[float, ...], ...]
    calibration_items: tuple[str, ...]
    calibration_tokens: int
    held_out: tuple[HeldOutRow, ...]
    position_edges: tuple[int, ...]
    sweep: tuple[SweepRow, ...]
    peak_bytes: int
    warnings: tuple[str, ...]


# --- diagnose ---------------------------------------------------------------------------


class ProbeRow(_Part, frozen=True):
    """Damage of one probe alone: `layers` (and `head`) in `format`, all else native."""

    format: str
    layers: tuple[int, ...]
    head: int | None
    kl: tuple[float, ...]
    """Mean KL from native of each probe item, nats per token."""
    exact: bool = True
    """False where it was screened: estimated at the scored positions, and corrected by what exact probes showed."""


class OperandRow(_Part, frozen=True):
    """One operand of one layer quantised alone; n heads of the operand, H query heads.

    Squared errors are relative: of the cache to the operand's sum of squares, of the output to the output's.
    """

    layer_idx: int
    operand: str
    """'q', 'k', 'v', or 'p': the probabilities, which no scale reaches."""
    treatment: str
    """'unit', 'per_tensor', 'per_head', or 'mantissa': the scale-free bound, of k and v only."""
    sqnr_db: tuple[float | None, ...]
    """Signal over quantisation noise, decibels: [n]; None without noise or without signal."""
    saturated: tuple[float, ...]
    """Squared error of elements above E4M3's end: [n]. This and the next three add up to all of it."""
    flushed: tuple[float, ...]
    subnormal: tuple[float, ...]
    mantissa: tuple[float, ...]
    output: tuple[float, ...]
    """Squared error of the attention output at the scored positions: [H]."""
    output_saturated: tuple[float, ...]
    """The same when only the elements err that saturate: [H]. This and the next two need not add up to `output`."""
    output_underflow: tuple[float, ...]
    output_mantissa: tuple[float, ...]


class RepairRow(_Part, frozen=True):
    """What one way of choosing scales is predicted to leave of the damage, and what a probe measured."""

    layer_idx: int | None
    """None: every layer in FP8 at once."""
    repair: str
    """'unit', 'per_tensor', 'per_head', 'per_head_percentile', 'per_head_least_error' or 'mantissa'."""
    predicted_kl: float
    """Nats per token."""
    measured_kl: float | None
    """None where this repair was not probed."""


class ProbeCost(_Part, frozen=True):
    """What the probes cost, in layers times tokens; at most, since probes that begin alike share their beginning."""

    evaluated: int
    naive: int
    """One whole pass for BF16 and for each probe."""
    screened: int
    """Probes that were estimated only."""
    exact: int


class Sensitivities(_Record, frozen=True):
    """sensitivities.json: where FP8 hurts, why, and the group suspected of it."""

    layer_probes: tuple[ProbeRow, ...]
    head_probes: tuple[ProbeRow, ...]
    type_probes: tuple[ProbeRow, ...]
    """`layers` is every layer of one attention type, or all of them."""
    suspects: tuple[int, ...]
    """The layers that the fourth arm keeps in BF16; never empty."""
    suspects_stand_out: bool
    """False when no layer stands out: the group is then only the most sensitive one."""
    explanation: str
    probe_items: tuple[str, ...]
    peak_bytes: int
    anatomy: tuple[OperandRow, ...] = ()
    """Empty from an engine that shows no attention outputs."""
    repairs: tuple[RepairRow, ...] = ()
    findings: tuple[str, ...] = ()
    """What scales can and cannot repair, in sentences."""
    cost: ProbeCost | None = None


# --- ablate -----------------------------------------------------------------------------


class Conditions(_Part, frozen=True):
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


class ArmRecord(_Part, frozen=True):
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


class ScoreTrial(_Part, frozen=True, tag="score"):
    """One item under one arm. `metrics` is None for what could not be scored, never 0.

    nll, kl (nats per token, means over the scored positions), top1_changed (share),
    hit (1.0 when greedy decoding would have given exactly the answer), first_divergence (tokens
    generated before the first other one), and the same over spans: kl@128 ends with the 128th token.
    """

    arm: str
    task: str
    item_id: str
    bucket: int
    scored_tokens: int
    metrics: dict[str, float | None]
    conditions: str


class TimingTrial(_Part, frozen=True, tag="timing"):
    """Raw times of one generation after warm-up, seconds."""

    arm: str
    phase: str
    """'latency' (one sequence) or 'throughput' (a fixed batch)."""
    context_len: int
    batch: int
    repeat: int
    ttft_s: float
    token_s: tuple[float, ...]
    conditions: str


class CapacityTrial(_Part, frozen=True, tag="capacity"):
    """Bytes that the cache really held, against the worksheet, and tokens that fit."""

    arm: str
    context_len: int
    batch: int
    held_bytes: int
    worksheet_bytes: int
    capacity_tokens: int
    conditions: str


class PoolTrial(_Part, frozen=True, tag="pool"):
    """The cache memory that an arm's server reserved, as it reports it at its start."""

    arm: str
    tokens: int
    """That fit, at the longest context it serves."""
    blocks: int
    block_size: int
    max_concurrency: float
    memory_bytes: int | None
    conditions: str
    backend: str | None = None
    """The attention backend that reads it; None where the server does not show it."""


class LoadTrial(_Part, frozen=True, tag="load"):
    """Requests of one open loop after warm-up, each sent when it was due whatever the others did; raw seconds."""

    arm: str
    request_rate: float
    """Asked for, requests a second on average."""
    context_len: int
    due_s: tuple[float, ...]
    """When each was due, from the start of the loop."""
    ttft_s: tuple[float, ...]
    """Of each, from when it was due: a server that falls behind is not flattered."""
    token_s: tuple[tuple[float, ...], ...]
    conditions: str

    @property
    def achieved_rate(self) -> float:
        """Requests answered to their end a second, from the start of the loop to the last token."""
        whole = zip(self.due_s, self.ttft_s, self.token_s, strict=True)
        return len(self.due_s) / max(due + first + sum(steps) for due, first, steps in whole)


class ContinuationTrial(_Part, frozen=True, tag="continuation"):
    """What BF16 wrote behind an item's request, greedily: every arm is marked on the same tokens."""

    arm: str
    task: str
    item_id: str
    token_ids: tuple[int, ...]
    conditions: str


Trial = ScoreTrial | TimingTrial | CapacityTrial | PoolTrial | LoadTrial | ContinuationTrial


class Stop(_Part, frozen=True):
    """Where a study of several looks ended: it says how much of the error rate was spent."""

    look: int
    looks: int
    items: int
    """That every arm was asked."""
    of_items: int
    """That it would have been asked at the last look."""
    why: str | None
    """Why more items would not have helped; None where the last look came first."""


class Evidence(_Record, frozen=True):
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


# --- decide -----------------------------------------------------------------------------


class Reason(_Part, frozen=True):
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


class RepairChoice(_Part, frozen=True):
    scaling: str
    """'native', 'unit', 'per_tensor' or 'per_head'."""
    skip_layers: tuple[int, ...]


class Verdict(_Record, frozen=True):
    """verdict.json. `choice` is None exactly when `status` is 'cannot_tell'."""

    choice: RepairChoice | None
    status: str
    """'decided' or 'cannot_tell'."""
    repair: str
    """'none', 'scales', 'skip' or 'both': what uncalibrated FP8 needs."""
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
