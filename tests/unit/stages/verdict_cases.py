"""Synthetic cases for the rule: a small model, its arms, and trials with given mean drifts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from kvtriage.kvcache.policy import CachePolicy, Fp8, Mantissa, Scaling
from kvtriage.records.evidence import ArmRecord, Conditions, Evidence
from kvtriage.records.plan import DataRef, LayerGeometry, ModelRef, Plan
from kvtriage.records.rule import Rule
from kvtriage.records.scales import LayerScalesRecord, ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.study import Study
from kvtriage.records.trials import CapacityTrial, ScoreTrial, TimingTrial, Trial
from kvtriage.records.verdict import Verdict
from kvtriage.stages.decide import decide

LAYERS = 6
HEADS = 3
SKIP = (3,)
LATENCY_CONTEXTS = (128, 512, 1024, 2048)
CONDITIONS = "c" * 64

SCALINGS = {"fp8_unit": "unit", "fp8_per_tensor": "per_tensor", "fp8_per_head": "per_head", "bound": "mantissa"}
HEALTHY = {
    "bf16": 0.0,
    "bf16_repeat": 1e-7,
    "bound": 0.0091,
    "fp8_unit": 0.0098,
    "fp8_per_tensor": 0.0095,
    "fp8_per_head": 0.0085,
    "fp8_unit_skip": 0.0089,
    "fp8_per_head_skip": 0.0080,
}
"""Mean KL by arm, nats per token, as measured on a healthy SmolLM2-135M."""


@dataclass(frozen=True)
class Case:
    """What `decide` takes; `kl` and the like are means by arm."""

    kl: Mapping[str, float] = field(default_factory=lambda: dict(HEALTHY))
    rule: Rule = field(default_factory=Rule)
    backend: str = "flash_attn"
    items: int = 8
    spread: float = 0.1
    """Relative spread of the KL among items, independent from arm to arm."""
    top1: Mapping[str, float] = field(default_factory=dict)
    needle: Mapping[str, float] = field(default_factory=dict)
    hits: Mapping[str, float] = field(default_factory=dict)
    unscored: Mapping[str, int] = field(default_factory=dict)
    """So many text items of an arm have no score."""
    same_as: Mapping[str, str] = field(default_factory=dict)
    nll: float = 2.4
    itl: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """(slope, intercept) in seconds by arm; others (1e-5, 0.010)."""
    skip: tuple[int, ...] = SKIP
    suspects_stand_out: bool = True
    kinds: tuple[str, ...] = ("full",) * LAYERS
    kv_heads: int = HEADS
    native_dtype: str = "bfloat16"
    per_head: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """V scale by (layer, head); others 0.02."""
    checkpoint: str | None = "case/checkpoint"
    conditions: Mapping[str, str | bool] = field(default_factory=dict)
    """What differs from a run of the embedded engine."""

    def plan(self) -> Plan:
        study = Study(
            buckets=(256, 1024),
            items_per_bucket=self.items,
            latency_contexts=LATENCY_CONTEXTS,
            backend=self.backend,
            rule=self.rule,
        )
        geometry = [
            LayerGeometry(
                layer_idx=i,
                kind=kind,
                num_attention_heads=9,
                num_kv_heads=self.kv_heads,
                head_dim=64,
                head_dim_v=64,
                window_tokens=128 if kind == "sliding" else None,
            )
            for i, kind in enumerate(self.kinds)
        ]
        return Plan(
            kvtriage_version="0",
            model=ModelRef(
                source="org/model",
                path="/models/model",
                architecture="LlamaForCausalLM",
                fingerprint="f" * 64,
                parameters=135_000_000,
            ),
            data=DataRef(source="text.jsonl", sha256="d" * 64, documents=40, characters=100_000),
            study=study,
            model_type="llama",
            max_model_len=8192,
            layers=tuple(geometry),
            assumed=(),
            warnings=(),
        )

    def scales(self) -> ScaleRecord:
        own = [tuple(self.per_head.get((i, h), 0.02) for h in range(self.kv_heads)) for i in range(LAYERS)]
        flat = (0.02,) * self.kv_heads
        rows = [LayerScalesRecord(layer_idx=i, q=(0.02,) * 9, k=flat, v=v) for i, v in enumerate(own)]
        shared = [LayerScalesRecord(layer_idx=i, q=(0.02,), k=(0.02,), v=(max(v),)) for i, v in enumerate(own)]
        return ScaleRecord(
            kvtriage_version="0",
            per_tensor=tuple(shared),
            per_head=tuple(rows),
            sub_octave_k=(flat,) * LAYERS,
            sub_octave_v=(flat,) * LAYERS,
            calibration_items=(),
            calibration_tokens=1024,
            held_out=(),
            position_edges=(0, 256),
            sweep=(),
            peak_bytes=0,
            warnings=(),
        )

    def sensitivities(self) -> Sensitivities:
        return Sensitivities(
            kvtriage_version="0",
            layer_probes=(),
            head_probes=(),
            type_probes=(),
            suspects=self.skip,
            suspects_stand_out=self.suspects_stand_out,
            explanation="",
            probe_items=(),
            peak_bytes=0,
        )

    def arms(self) -> tuple[ArmRecord, ...]:
        return tuple(self._arm(name) for name in [*self.kl, *self.same_as])

    def evidence(self) -> Evidence:
        conditions = Conditions(
            model="m",
            data="d",
            study="s",
            engine="embedded",
            engine_version="1",
            device="cpu",
            backend="eager",
            numerics="storage",
            compute_dtype="float32",
            native_dtype=self.native_dtype,
            threads=1,
            memory_bytes=16 * 1024**3,
            scales="x",
        )
        return Evidence(
            kvtriage_version="0",
            arms=self.arms(),
            conditions=msgspec.structs.replace(conditions, **self.conditions),
            conditions_hash=CONDITIONS,
            trials=len(self.trials()),
            noise_floor_kl=self.kl.get("bf16_repeat", 0.0),
            peak_bytes=0,
        )

    def trials(self) -> tuple[Trial, ...]:
        return tuple(trial for number, arm in enumerate(self.kl) for trial in self._trials_of(arm, number))

    def decide(self, trials: Sequence[Trial] | None = None) -> Verdict:
        """The verdict, having been through JSON as the case folder does it."""
        verdict = decide(
            self.plan(),
            self.scales(),
            self.sensitivities(),
            self.evidence(),
            self.trials() if trials is None else trials,
            self.checkpoint,
            {"evidence.json": "e" * 64},
        )
        assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict
        return verdict

    def _arm(self, name: str) -> ArmRecord:
        base = name.removesuffix("_skip")
        skip = self.skip if base != name else ()
        scaling = SCALINGS.get(base, "native")
        if scaling == "native":
            policy = CachePolicy.native(LAYERS)
        elif scaling == "mantissa":
            policy = CachePolicy.uniform(LAYERS, Mantissa())
        else:
            policy = CachePolicy.uniform(LAYERS, Fp8(Scaling(scaling)), skip)
        roles = {"bf16": "baseline", "bf16_repeat": "noise", "bound": "bound"}
        return ArmRecord(
            name=name,
            label=name,
            policy=policy.encode(),
            scaling=scaling,
            skip_layers=skip,
            role=roles.get(name, "candidate"),
            same_as=self.same_as.get(name),
        )

    def _trials_of(self, arm: str, number: int) -> list[Trial]:
        trials: list[Trial] = []
        kl, quantised = self.kl[arm], not arm.startswith("bf16")
        for bucket in (256, 1024):
            for i in range(self.items):
                jitter = self.spread * (((i * 7 + number * 3 + bucket) % 11) / 5 - 1)
                drift = kl * (1 + jitter)
                lost = i < self.unscored.get(arm, 0)
                metrics = {
                    "nll": self.nll + 0.3 * (i % 8) + drift,
                    "kl": drift,
                    "top1_changed": self.top1.get(arm, 0.05 if quantised else 0.0),
                }
                trials.append(_score(arm, "text", f"text-{bucket}-{i}", bucket, metrics, lost))
            for i in range(6):
                more = self.needle.get(arm, 0.02 if quantised else 0.0) * (1 + 0.1 * (i % 3 - 1))
                metrics = {"nll": 0.5 + 0.1 * i + more, "kl": kl, "top1_changed": 0.0}
                metrics["hit"] = 1.0 if i < self.hits.get(arm, 6) else 0.0
                trials.append(_score(arm, "needle", f"needle-{bucket}-{i}", bucket, metrics, False))
        slope, intercept = self.itl.get(arm, (1e-5, 0.010))
        for context_len in LATENCY_CONTEXTS:
            for repeat in range(2):
                itl_s = slope * context_len + intercept + 1e-5 * ((repeat + number + context_len // 128) % 3 - 1)
                trials.append(
                    TimingTrial(
                        arm=arm,
                        phase="latency",
                        context_len=context_len,
                        batch=1,
                        repeat=repeat,
                        ttft_s=0.1,
                        token_s=(itl_s,) * 3,
                        conditions=CONDITIONS,
                    )
                )
        trials.append(
            CapacityTrial(
                arm=arm,
                context_len=1024,
                batch=1,
                held_bytes=1,
                worksheet_bytes=1,
                capacity_tokens=1,
                conditions=CONDITIONS,
            )
        )
        return trials


def _score(arm: str, task: str, item_id: str, bucket: int, metrics: Mapping[str, float], lost: bool) -> ScoreTrial:
    return ScoreTrial(
        arm=arm,
        task=task,
        item_id=item_id,
        bucket=bucket,
        scored_tokens=64,
        metrics=dict.fromkeys(metrics) if lost else dict(metrics),
        conditions=CONDITIONS,
    )


def drifting(**kl: float) -> Case:
    """A healthy case, but for these arms."""
    return Case(kl={**HEALTHY, **kl})


UNDERFLOW = drifting(fp8_unit=0.0286, fp8_per_tensor=0.0093, fp8_unit_skip=0.0270)
"""One V head × 2^-12: calibration repairs it, and per-tensor already does."""

SPREAD_HEADS = drifting(fp8_unit=0.0900, fp8_per_tensor=0.0880, fp8_unit_skip=0.0089)
"""Heads further apart than E4M3 spans: only per-head scales repair it, or BF16 in that layer."""

OFFSET = drifting(
    bound=0.0775,
    fp8_unit=0.0793,
    fp8_per_tensor=0.2152,
    fp8_per_head=0.1328,
    fp8_unit_skip=0.0085,
    fp8_per_head_skip=0.0082,
)
"""A constant 40 added to V of one layer: mantissa, only BF16 repairs it."""

OFFSET_AND_UNDERFLOW = replace(
    OFFSET, kl={**OFFSET.kl, "fp8_unit": 0.0990, "fp8_unit_skip": 0.0280, "fp8_per_head_skip": 0.0082}
)
"""Both faults, in different layers."""

HOPELESS = drifting(
    bound=0.4, fp8_unit=0.5, fp8_per_tensor=0.45, fp8_per_head=0.42, fp8_unit_skip=0.3, fp8_per_head_skip=0.28
)


def without(case: Case, *arms: str) -> Case:
    return replace(case, kl={name: kl for name, kl in case.kl.items() if name not in arms})
