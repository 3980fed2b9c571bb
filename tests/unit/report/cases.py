"""Synthetic cases with the numbers that real ones have: a Gemma-like hybrid, a SmolLM2-like model, an open one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvtriage.kvcache.policy import CachePolicy, Fp8, Mantissa, Scaling
from kvtriage.kvcache.price import capacity_tokens, price_policy
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec
from kvtriage.records.evidence import ArmRecord, Conditions, Evidence
from kvtriage.records.needles import needle_item_id
from kvtriage.records.plan import DataRef, LayerGeometry, ModelRef, Plan
from kvtriage.records.scales import HeldOutRow, LayerScalesRecord, ScaleRecord, SweepRow
from kvtriage.records.sensitivities import ProbeRow, RepairRow, Sensitivities
from kvtriage.records.study import Study
from kvtriage.records.trials import CapacityTrial, ScoreTrial, TimingTrial, Trial
from kvtriage.records.verdict import Reason, RepairChoice, Verdict
from kvtriage.report import CaseView, Report, render_report

__all__ = [
    "Case",
    "deep",
    "gemma_like",
    "large",
    "render",
    "report_of",
    "smollm_like",
    "undecided",
    "view_of",
    "with_hostile_text",
    "without_arms",
    "written_by_bf16",
]

VERSION = "0.1.0"
CONDITIONS_HASH = "c0ffee" + "0" * 58
DEPTHS = (0.1, 0.5, 0.95)


@dataclass(frozen=True)
class Case:
    """The six records, in the order in which the report takes them."""

    plan: Plan
    scales: ScaleRecord
    sensitivities: Sensitivities
    evidence: Evidence
    trials: tuple[Trial, ...]
    verdict: Verdict


def render(case: Case) -> str:
    return report_of(case).html


def report_of(case: Case) -> Report:
    return render_report(view_of(case))


def view_of(case: Case) -> CaseView:
    return CaseView(case.plan, case.scales, case.sensitivities, case.evidence, case.trials, case.verdict)


def gemma_like() -> Case:
    """18 layers, full attention at 5, 11 and 17, one KV head: mantissa is lost in the sliding layers."""
    layers = tuple(
        LayerSpec(i, LayerKind.FULL, 4, 1, 256, 256)
        if i % 6 == 5
        else LayerSpec(i, LayerKind.SLIDING, 4, 1, 256, 256, 512)
        for i in range(18)
    )
    spec = CacheSpec("gemma3_text", layers, 32_768)
    skip = spec.layers_of(LayerKind.SLIDING)
    drift = {
        "bf16_repeat": 6e-8, "fp8_unit": 0.0229, "fp8_per_tensor": 0.0207, "fp8_per_head_skip": 0.0031,
        "fp8_unit_skip": 0.0034, "bound": 0.0198, "fp8_sliding_only": 0.0181, "fp8_full_only": 0.0032,
    }  # fmt: skip
    return _build(
        spec,
        ModelRef(source="demo:gemma3-270m", path="/models/gemma3-270m",
                 architecture="Gemma3ForCausalLM", fingerprint="9b" * 32, parameters=268_098_176),
        skip=skip,
        drift=drift,
        same_as={"fp8_per_head": "fp8_per_tensor"},
        layer_kl=lambda i: 0.0004 if i % 6 == 5 else 0.0011 + 0.0005 * math.sin(i),
        reach=lambda tensor, i: (22 + 5 * i if tensor == "k" else 4 + 9 * i),
        verdict=Verdict(
            kvtriage_version=VERSION, inputs=_inputs(), choice=RepairChoice(scaling="unit", skip_layers=()),
            status="decided", repair="none", arm="fp8_unit", reasons=(),
            vllm_args=("/models/gemma3-270m", "--kv-cache-dtype", "fp8"),
            headline="Serve demo:gemma3-270m with an FP8 cache as it is: no repair is needed.",
            sentences=(
                "FP8 at scale 1 drifts by 0.0229 nats per token from BF16, within the margin of 0.05.",
                "What it loses is mantissa and not range: the scale-free bound loses 0.0198 by itself, so calibrated "
                "scales have almost nothing to win back.",
                "Keeping the 15 sliding layers in BF16 would cut the drift to 0.0034, and would give up most of the "
                "capacity at 1,024 tokens.",
            ),
            caveats=_CAVEATS, ratio_vs_bf16=2.0, items_needed=None,
            next_step="Repeat with buckets as long as your traffic before you rely on it.",
        ),
    )  # fmt: skip


def smollm_like() -> Case:
    """30 layers of 3 KV heads, with V of one head far below the normal range: scales repair it."""
    layers = tuple(LayerSpec(i, LayerKind.FULL, 9, 3, 64, 64) for i in range(30))
    spec = CacheSpec("llama", layers, 8_192)
    drift = {
        "bf16_repeat": 4e-8, "fp8_unit": 0.0786, "fp8_per_tensor": 0.0301, "fp8_per_head": 0.0109,
        "fp8_per_head_skip": 0.0087, "fp8_unit_skip": 0.0112, "bound": 0.0104,
    }  # fmt: skip
    return _build(
        spec,
        ModelRef(source="models/smollm2-135m-planted", path="/srv/models/smollm2-135m-planted",
                 architecture="LlamaForCausalLM", fingerprint="4e" * 32, parameters=134_515_008),
        skip=(3,),
        drift=drift,
        same_as={},
        layer_kl=lambda i: 0.062 if i == 11 else 0.0006 + 0.0003 * math.cos(2 * i),
        reach=lambda tensor, i: (6 + 0.6 * i if tensor == "k" else 0.5 + 0.5 * i),
        verdict=Verdict(
            kvtriage_version=VERSION, inputs=_inputs(), choice=RepairChoice(scaling="per_head", skip_layers=()),
            status="decided", repair="scales", arm="fp8_per_head", reasons=(),
            vllm_args=("case/checkpoint", "--kv-cache-dtype", "fp8"),
            headline="Per-head scales repair the FP8 cache of smollm2-135m-planted.",
            sentences=(
                "FP8 at scale 1 drifts by 0.0786 nats per token from BF16, beyond the margin of 0.05.",
                "The damage is range: V of layer 11, head 1 falls below E4M3's normal range at scale 1. With "
                "per-head scales the drift is 0.0109, next to the scale-free bound of 0.0104.",
                "Per-tensor scales are not enough: heads of that layer differ by more than E4M3 spans.",
            ),
            caveats=_CAVEATS, ratio_vs_bf16=2.0, items_needed=None,
            next_step="Serve the checkpoint in case/checkpoint with the command above.",
        ),
    )  # fmt: skip


def undecided() -> Case:
    """The SmolLM2-like case with too few items: intervals straddle the margin, nothing is chosen."""
    case = smollm_like()
    trials = tuple(t for t in case.trials if not isinstance(t, ScoreTrial) or t.item_id.endswith(("-0", "-1")))
    reasons = tuple(
        msgspec.structs.replace(reason, status="cannot_tell", low=None, high=None, items=2, items_needed=41)
        if reason.clause in ("kl", "nll")
        else reason
        for reason in case.verdict.reasons
    )
    verdict = Verdict(
        kvtriage_version=VERSION, inputs=_inputs(), choice=None, status="cannot_tell", repair="none", arm=None,
        reasons=reasons, vllm_args=(), ratio_vs_bf16=None, items_needed=41,
        headline="These 2 items per bucket cannot tell whether FP8 stays within the margin.",
        sentences=("The interval of every arm reaches across the margin of 0.05 nats per token.",),
        caveats=_CAVEATS[:1], next_step="Run it again with --items 41.",
    )  # fmt: skip
    return replace(case, trials=trials, verdict=verdict)


def written_by_bf16(case: Case) -> Case:
    """The texts continued by BF16, and answered by a server that gives no likelihoods."""
    marks = {"nll": 2.0, "kl": 0.02, "top1_changed": 0.1, "first_divergence": 40.0}
    spans = {"kl@32": 0.01, "alike@32": 1.0, "kl@128": 0.03, "alike@128": 0.0}
    nothing = {"nll": None, "kl": None, "top1_changed": None}
    texts = [trial for trial in case.trials if isinstance(trial, ScoreTrial) and trial.task == "text"]
    more = [msgspec.structs.replace(t, task="generation", metrics={**marks, **spans}) for t in texts]
    alike = [msgspec.structs.replace(t, metrics={**nothing, "agreed": 1.0 if "bf16" in t.arm else 0.75}) for t in texts]
    others = [trial for trial in case.trials if trial not in texts]
    return replace(case, trials=(*others, *more, *alike))


def deep(num_layers: int = 10_000) -> Case:
    """More layers than any page has room for, every other one suspected."""
    layers = tuple(LayerSpec(i, LayerKind.FULL, 2, 1, 64, 64) for i in range(num_layers))
    return _build(
        CacheSpec("llama", layers, 4_096),
        smollm_like().plan.model,
        skip=tuple(range(0, num_layers, 2)),
        drift={"bf16_repeat": 4e-8, "fp8_unit": 0.08, "fp8_per_tensor": 0.03, "fp8_per_head_skip": 0.009},
        same_as={},
        layer_kl=lambda i: 0.001 + 0.0004 * math.sin(i),
        reach=lambda tensor, i: 10.0 + i % 100,
        verdict=smollm_like().verdict,
    )


def large() -> Case:
    """80 layers of 8 KV heads, four buckets: what a page must still hold."""
    layers = tuple(LayerSpec(i, LayerKind.FULL, 64, 8, 128, 128) for i in range(80))
    spec = CacheSpec("llama", layers, 131_072)
    case = smollm_like()
    return _build(
        spec,
        case.plan.model,
        skip=(1, 2, 40),
        drift={"bf16_repeat": 4e-8, "fp8_unit": 0.08, "fp8_per_tensor": 0.03, "fp8_per_head": 0.011,
               "fp8_per_head_skip": 0.009, "bound": 0.0104},
        same_as={},
        layer_kl=lambda i: 0.001 + 0.0004 * math.sin(i),
        reach=lambda tensor, i: 10.0 + i,
        verdict=case.verdict,
        proven=True,
        study=Study(buckets=(256, 1024, 4096, 8192), latency_repeats=8, decode_tokens=128),
    )  # fmt: skip


_CAVEATS = (
    "Storage numerics: K and V were stored in FP8 and the arithmetic stayed wide. A backend that also computes in "
    "FP8 adds an error of its own.",
    "Latency was measured on a CPU and says nothing of a GPU's kernels.",
    "Contexts beyond 1,024 tokens were not measured.",
)

_LABELS = {
    "bf16": "BF16",
    "bf16_repeat": "BF16, repeated in chunks",
    "fp8_unit": "FP8, scale 1",
    "fp8_per_tensor": "FP8, calibrated per tensor",
    "fp8_per_head": "FP8, calibrated per head",
    "fp8_per_head_skip": "FP8 per head, suspects in BF16",
    "fp8_unit_skip": "FP8, scale 1, suspects in BF16",
    "bound": "3-bit mantissa, any exponent",
    "fp8_sliding_only": "FP8 in the sliding layers",
    "fp8_full_only": "FP8 in the full layers",
}
_ROLES = {
    "bf16": "baseline", "bf16_repeat": "noise", "bound": "bound", "fp8_sliding_only": "contrast",
    "fp8_full_only": "contrast",
}  # fmt: skip


def _inputs() -> dict[str, str]:
    names = ("plan.json", "scales.json", "sensitivities.json", "trials.jsonl", "evidence.json")
    return {name: f"{index}a" * 32 for index, name in enumerate(names)}


def _policies(spec: CacheSpec, skip: tuple[int, ...]) -> dict[str, tuple[str, CachePolicy]]:
    count = spec.num_layers
    found = {
        "bf16": ("native", CachePolicy.native(count)),
        "bf16_repeat": ("native", CachePolicy.native(count)),
        "fp8_unit": ("unit", CachePolicy.fp8(count, Scaling.UNIT)),
        "fp8_per_tensor": ("per_tensor", CachePolicy.fp8(count, Scaling.PER_TENSOR)),
        "fp8_per_head": ("per_head", CachePolicy.fp8(count, Scaling.PER_HEAD)),
        "fp8_per_head_skip": ("per_head", CachePolicy.fp8(count, Scaling.PER_HEAD, skip)),
        "fp8_unit_skip": ("unit", CachePolicy.fp8(count, Scaling.UNIT, skip)),
        "bound": ("mantissa", CachePolicy.uniform(count, Mantissa())),
    }
    if spec.is_hybrid:
        sliding, full = spec.layers_of(LayerKind.SLIDING), spec.layers_of(LayerKind.FULL)
        found["fp8_sliding_only"] = ("unit", CachePolicy.only(count, sliding, Fp8(Scaling.UNIT)))
        found["fp8_full_only"] = ("unit", CachePolicy.only(count, full, Fp8(Scaling.UNIT)))
    return found


def _build(
    spec: CacheSpec,
    model: ModelRef,
    *,
    skip: tuple[int, ...],
    drift: dict[str, float],
    same_as: dict[str, str],
    layer_kl: Callable[[int], float],
    reach: Callable[[str, int], float],
    verdict: Verdict,
    study: Study | None = None,
    proven: bool = False,
) -> Case:
    study = study or Study()
    rng = random.Random(7)
    plan = Plan(
        kvtriage_version=VERSION, model=model, study=study, model_type=spec.model_type,
        data=DataRef(source="traffic.jsonl", sha256="d1" * 32, documents=212, characters=1_204_331),
        max_model_len=spec.max_model_len, assumed=(), warnings=(),
        layers=tuple(
            LayerGeometry(layer_idx=x.layer_idx, kind=str(x.kind), num_attention_heads=x.num_attention_heads,
                          num_kv_heads=x.num_kv_heads, head_dim=x.head_dim, head_dim_v=x.head_dim_v,
                          window_tokens=x.window_tokens)
            for x in spec.layers
        ),
    )  # fmt: skip
    policies = {name: found for name, found in _policies(spec, skip).items() if name in {"bf16", *drift, *same_as}}
    arms = tuple(
        ArmRecord(name=name, label=_LABELS[name], policy=policy.encode(), scaling=scaling,
                  skip_layers=policy.skip_layers,
                  role=_ROLES.get(name, "candidate"), same_as=same_as.get(name))
        for name, (scaling, policy) in policies.items()
    )  # fmt: skip
    trials = (*_scores(study, drift, rng), *_timings(study, spec, arms, rng), *_weights(spec, arms, study))
    evidence = Evidence(
        kvtriage_version=VERSION, inputs=_inputs(), arms=arms, conditions_hash=CONDITIONS_HASH, trials=len(trials),
        noise_floor_kl=drift["bf16_repeat"], peak_bytes=2_410_000_000,
        conditions=Conditions(model=model.fingerprint, data="d1" * 32, study="5f" * 32, engine="embedded",
                              engine_version=VERSION, device="cpu", backend="eager", numerics="storage",
                              compute_dtype="float32", native_dtype="bfloat16", threads=2,
                              memory_bytes=study.memory_bytes, scales="77" * 32),
    )  # fmt: skip
    return Case(
        plan,
        _scale_record(spec, reach, rng),
        _sensitivities(spec, skip, layer_kl, proven),
        evidence,
        trials,
        msgspec.structs.replace(verdict, reasons=tuple(_reasons(study, drift, rng))),
    )


def _scores(study: Study, drift: dict[str, float], rng: random.Random) -> Iterator[Trial]:
    for task, per_bucket in (("text", study.items_per_bucket), ("needle", 6)):
        for bucket in study.buckets:
            for index in range(per_bucket):
                hardness, taste = 2.4 + rng.gauss(0, 0.3), math.exp(rng.gauss(0, 0.25))
                for arm in ("bf16", *drift):
                    kl = drift.get(arm, 0.0) * taste * (1.0 if bucket == 256 else 0.88) * math.exp(rng.gauss(0, 0.06))
                    rise = kl * 0.4 + (rng.gauss(0, 0.4) * kl if arm != "bf16" else 0.0)
                    metrics: dict[str, float | None] = {
                        "nll": hardness + rise, "kl": kl, "top1_changed": round(128 * 0.45 * math.sqrt(kl)) / 128,
                    }  # fmt: skip
                    if task == "needle":
                        metrics["hit"] = float(index != 5 or kl < 0.01)
                    item_id = f"{task}-{bucket}-{index}"
                    if task == "needle":
                        item_id = needle_item_id(item_id, DEPTHS[index % 3], index // 3)
                    yield ScoreTrial(arm=arm, task=task, item_id=item_id, bucket=bucket,
                                     scored_tokens=128, metrics=metrics, conditions=CONDITIONS_HASH)  # fmt: skip


def _timings(study: Study, spec: CacheSpec, arms: tuple[ArmRecord, ...], rng: random.Random) -> Iterator[Trial]:
    for arm in arms:
        if arm.role not in ("baseline", "candidate") or arm.same_as is not None:
            continue
        share = sum(word.startswith("fp8") for word in arm.policy) / spec.num_layers
        slope, base = (9.1 - 3.2 * share) * 1e-6, (27.0 + 2.4 * share) * 1e-3
        for repeat in range(study.latency_repeats):
            for length in study.latency_contexts:
                steps = tuple(
                    (slope * length + base) * (1 + abs(rng.gauss(0, 0.015))) for _ in range(study.decode_tokens)
                )
                ttft = (2.4e-8 * length**2 + 6.1e-4 * length + 0.031) * (1 + 0.06 * share + abs(rng.gauss(0, 0.02)))
                yield TimingTrial(arm=arm.name, phase="latency", context_len=length, batch=1, repeat=repeat,
                                  ttft_s=ttft, token_s=steps, conditions=CONDITIONS_HASH)  # fmt: skip
            steps = tuple(
                (slope * 4096 + base * 1.9) * (1 + abs(rng.gauss(0, 0.02))) for _ in range(study.decode_tokens)
            )
            yield TimingTrial(arm=arm.name, phase="throughput", context_len=1024, batch=study.batch, repeat=repeat,
                              ttft_s=2.2, token_s=steps, conditions=CONDITIONS_HASH)  # fmt: skip


def _weights(spec: CacheSpec, arms: tuple[ArmRecord, ...], study: Study) -> Iterator[Trial]:
    for arm in arms:
        if arm.role in ("baseline", "candidate") and arm.same_as is None:
            policy = CachePolicy.decode(arm.policy)
            held = price_policy(spec, policy, (1024,)).policy_bytes
            yield CapacityTrial(arm=arm.name, context_len=1024, batch=1, held_bytes=held, worksheet_bytes=held,
                                capacity_tokens=capacity_tokens(spec, policy, 1024, study.memory_bytes),
                                conditions=CONDITIONS_HASH)  # fmt: skip


def _scale_record(spec: CacheSpec, reach: Callable[[str, int], float], rng: random.Random) -> ScaleRecord:
    def scales(per_head: bool) -> tuple[LayerScalesRecord, ...]:
        return tuple(
            LayerScalesRecord(
                layer_idx=x.layer_idx,
                q=(reach("k", x.layer_idx) / 448,) * (x.num_attention_heads if per_head else 1),
                k=(reach("k", x.layer_idx) / 448,) * (x.num_kv_heads if per_head else 1),
                v=(reach("v", x.layer_idx) / 448,) * (x.num_kv_heads if per_head else 1),
            )
            for x in spec.layers
        )

    held_out = tuple(
        HeldOutRow(scaling=scaling, layer_idx=x.layer_idx, tensor=tensor, head=head,
                   saturated=0.0 if scaling == "unit" or (x.layer_idx * 7 + head) % 11 else 2e-5,
                   below_normal=min(_below_normal(scaling, reach(tensor, x.layer_idx)) * (1 + rng.random()), 0.9),
            amax=reach(tensor, x.layer_idx))
        for scaling in ("unit", "per_tensor", "per_head") for x in spec.layers for tensor in ("k", "v")
        for head in range(x.num_kv_heads)
    )  # fmt: skip
    sweep = tuple(
        SweepRow(layer_idx=x.layer_idx, tensor=tensor, amax=tuple(
            reach(tensor, x.layer_idx) * (0.8 + 0.05 * step + 0.04 * rng.random()) for step in range(5)))
        for tensor in ("k", "v") for x in spec.layers
    )  # fmt: skip
    heads = tuple((1.0,) * x.num_kv_heads for x in spec.layers)
    return ScaleRecord(
        kvtriage_version=VERSION, inputs=_inputs(), per_tensor=scales(False), per_head=scales(True),
        sub_octave_k=heads, sub_octave_v=heads, calibration_items=("calibration-0",), calibration_tokens=8_192,
        held_out=held_out, position_edges=(0, 64, 128, 256, 512), sweep=sweep, peak_bytes=1_950_000_000, warnings=(),
    )  # fmt: skip


def _below_normal(scaling: str, amax: float) -> float:
    """A share that falls as the range grows, and that calibrated scales bring down to one level."""
    return 0.02 / amax if scaling == "unit" else 0.0004


def _sensitivities(
    spec: CacheSpec, skip: tuple[int, ...], layer_kl: Callable[[int], float], proven: bool
) -> Sensitivities:
    def probe(word: str, layers: tuple[int, ...], head: int | None, kl: float) -> ProbeRow:
        return ProbeRow(format=word, layers=layers, head=head, kl=(kl * 1.05, kl))

    layer_probes, head_probes = [], []
    for layer in spec.layers:
        kl = layer_kl(layer.layer_idx)
        bound = min(kl, 0.0009 + 0.0002 * math.sin(layer.layer_idx))
        layer_probes += [
            probe("fp8:unit", (layer.layer_idx,), None, kl),
            probe("mantissa", (layer.layer_idx,), None, bound),
        ]
        for head in range(layer.num_kv_heads):
            part = 0.9 if head == 1 or layer.num_kv_heads == 1 else 0.12 + 0.02 * head
            head_probes.append(probe("fp8:unit", (layer.layer_idx,), head, kl * part))
    groups = [tuple(x.layer_idx for x in spec.layers)]
    groups += [spec.layers_of(kind) for kind in spec.kinds if spec.is_hybrid]
    type_probes = [
        probe(word, group, None, 0.02 * share * len(group) / spec.num_layers)
        for group in groups
        for word, share in (("fp8:unit", 1.0), ("fp8:per_head", 0.93), ("mantissa", 0.9))
    ]
    return Sensitivities(
        kvtriage_version=VERSION, inputs=_inputs(), layer_probes=tuple(layer_probes), head_probes=tuple(head_probes),
        type_probes=tuple(type_probes), suspects=skip, suspects_stand_out=proven,
        explanation="no layer stands out: the mantissa costs 0.0179 nats per token in all",
        probe_items=("probe-0", "probe-1"), peak_bytes=2_100_000_000, repairs=_repairs(),
        findings=("Calibration is not predicted to help: what is lost is mantissa.",),
    )  # fmt: skip


def _repairs() -> tuple[RepairRow, ...]:
    left = {
        "unit": (0.02, 0.02), "per_tensor": (0.0188, None), "per_head": (0.0187, 0.0186),
        "per_head_percentile": (0.019, None), "per_head_least_error": (0.0181, None), "mantissa": (0.0179, 0.018),
    }  # fmt: skip
    return tuple(
        RepairRow(layer_idx=None, repair=repair, predicted_kl=predicted, measured_kl=measured)
        for repair, (predicted, measured) in left.items()
    )


def _reasons(study: Study, drift: dict[str, float], rng: random.Random) -> Iterator[Reason]:
    rule = study.rule
    for arm, kl in drift.items():
        if not arm.startswith("fp8") or arm.endswith("only"):
            continue
        for bucket in study.buckets:
            for clause, value, margin in (
                ("kl", kl, rule.kl_margin), ("nll", kl * 0.4, rule.nll_margin),
                ("top1", 0.45 * math.sqrt(kl), rule.top1_margin), ("needle", kl * 0.5, rule.needle_margin),
            ):  # fmt: skip
                low, high = value * (0.8 - 0.05 * rng.random()), value * 1.2
                status = "met" if high <= margin else "unmet" if low > margin else "cannot_tell"
                yield Reason(clause=clause, arm=arm, cell=f"bucket {bucket}", value=value, low=low, high=high,
                             threshold=margin, status=status, items=8,
                             items_needed=19 if status == "cannot_tell" else None,
                             text=f"{clause} {value:.4f}, margin {margin:g}")  # fmt: skip
        yield Reason(clause="capacity", arm=arm, cell="all", value=2.0, low=2.0, high=2.0, threshold=1.0, status="met",
                     items=0, items_needed=None, text="holds 2.00 times BF16's tokens")  # fmt: skip
    yield Reason(clause="backend", arm="fp8_per_head", cell="all", value=None, low=None, high=None, threshold=None,
                 status="met", items=0, items_needed=None, text="flash_attn takes one scale per KV head")  # fmt: skip


def with_hostile_text(case: Case, poison: str) -> Case:
    """The same case with `poison` in every field that a user, a file or a stage may have filled with text."""

    def spoil(value: Any, **fields: Any) -> Any:
        return msgspec.structs.replace(value, **fields)

    verdict = spoil(
        case.verdict, headline=poison, sentences=(poison,), caveats=(poison,), next_step=poison,
        vllm_args=(poison, *case.verdict.vllm_args), kvtriage_version=poison, inputs={poison: poison},
        reasons=tuple(spoil(reason, text=poison, cell=poison) for reason in case.verdict.reasons),
    )  # fmt: skip
    plan = spoil(
        case.plan, model=spoil(case.plan.model, source=poison, path=poison, architecture=poison, fingerprint=poison),
        data=spoil(case.plan.data, source=poison, sha256=poison), model_type=poison, assumed=(poison,),
        warnings=(poison,), study=spoil(case.plan.study, backend=poison, numerics=poison),
    )  # fmt: skip
    evidence = spoil(
        case.evidence, arms=tuple(spoil(arm, label=poison) for arm in case.evidence.arms), conditions_hash=poison,
        conditions=spoil(case.evidence.conditions, engine=poison, device=poison, backend=poison, numerics=poison),
    )  # fmt: skip
    return replace(
        case, plan=plan, evidence=evidence, verdict=verdict, scales=spoil(case.scales, warnings=(poison,)),
        sensitivities=spoil(case.sensitivities, explanation=poison),
    )  # fmt: skip


def without_arms(case: Case, *names: str) -> Case:
    """The same case as if these arms had never been run."""
    arms = tuple(arm for arm in case.evidence.arms if arm.name not in names)
    trials = tuple(trial for trial in case.trials if trial.arm not in names)
    return replace(case, evidence=msgspec.structs.replace(case.evidence, arms=arms), trials=trials)
