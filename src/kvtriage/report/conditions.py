"""What makes the numbers what they are: model, text, engine and records, and the study that gives them again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from kvtriage.records.evidence import Conditions
from kvtriage.report.numbers import exact
from kvtriage.report.view import CaseView
from kvtriage.units import format_bytes, format_tokens

__all__ = ["Fact", "conditions", "study_toml"]


@dataclass(frozen=True)
class Fact:
    """One line of the conditions; `code` sets it in the fixed-width face."""

    name: str
    value: str
    code: bool = False


def conditions(view: CaseView) -> tuple[tuple[str, tuple[Fact, ...]], ...]:
    """Headed groups of facts that make the numbers what they are."""
    plan, seen = view.plan, view.evidence.conditions
    return (
        (
            "Model",
            (
                Fact("named as", plan.model.source),
                Fact("folder", plan.model.path, code=True),
                Fact("architecture", f"{plan.model.architecture} ({plan.model_type})"),
                Fact("parameters", f"{plan.model.parameters:,}"),
                Fact("layers", _layers(view)),
                Fact("longest context", f"{format_tokens(plan.max_model_len)} tokens"),
                Fact("fingerprint", plan.model.fingerprint, code=True),
            ),
        ),
        (
            "Text",
            (
                Fact("source", plan.data.source, code=True),
                Fact("size", f"{plan.data.documents:,} documents, {plan.data.characters:,} characters"),
                Fact("calibrated on", f"{view.scales.calibration_tokens:,} tokens, disjoint from the evaluation"),
                *_calibrated_in(view),
                Fact("SHA-256", plan.data.sha256, code=True),
            ),
        ),
        (
            "Engine",
            (
                Fact("engine", f"{seen.engine} {seen.engine_version}"),
                Fact("device", f"{seen.device}, {seen.threads} threads"),
                Fact("attention", seen.backend),
                *((Fact("server", " ".join(seen.server), code=True),) if seen.server else ()),
                Fact("numerics", f"{seen.numerics}: {_NUMERICS.get(seen.numerics, 'as recorded')}"),
                Fact("scored by", _SCORING.get(seen.scoring, seen.scoring) + _of_top(seen)),
                Fact("rounded", seen.rounding),
                Fact("BF16 repeated", _REPEAT.get(seen.repeat, seen.repeat)),
                Fact("read back", _READBACK.get(seen.readback, seen.readback)),
                Fact("arithmetic", f"{seen.compute_dtype}; unquantised cache {seen.native_dtype}"),
                Fact("cache memory", format_bytes(seen.memory_bytes)),
                *_stop(view),
                Fact("noise floor", f"KL {exact(view.evidence.noise_floor_kl)} nats per token"),
                Fact(
                    "peak memory",
                    format_bytes(max(view.scales.peak_bytes, view.sensitivities.peak_bytes, view.evidence.peak_bytes)),
                ),
            ),
        ),
        ("Records", tuple(_records(view))),
    )


def _calibrated_in(view: CaseView) -> Iterator[Fact]:
    """Nothing for scales computed in float32."""
    if view.scales.compute_dtype != "float32":
        yield Fact("calibrated in", view.scales.compute_dtype)


def _stop(view: CaseView) -> Iterator[Fact]:
    """Nothing for a study that is read once."""
    stop = view.evidence.stop
    if stop is not None:
        items = f"look {stop.look} of {stop.looks}, after {stop.items:,} of {stop.of_items:,} items"
        yield Fact("stopped at", items if stop.why is None else f"{items}: {stop.why}")


def _of_top(seen: Conditions) -> str:
    return "" if seen.kl_top_k is None else f"; KL of the {seen.kl_top_k} most likely tokens, all others as one"


_SCORING = {
    "full": "the whole vocabulary",
    "prompt_logprobs": "the prompt's most likely tokens",
    "echo": "the prompt's most likely tokens, echoed",
    "echo_text": "the prompt's most likely tokens, echoed as text",
    "generated": "what was generated: no likelihoods",
}
_REPEAT = {"chunks": "with its prefill in chunks", "batches": "in other batches"}
_READBACK = {
    "live": "dtypes and scales, layer by layer",
    "config": "dtypes as configured, scales not",
    "none": "nothing",
}
_NUMERICS = {
    "storage": "K and V stored in FP8, arithmetic in the wider type",
    "attention": "Q, K, V and the probabilities in FP8",
}


def _layers(view: CaseView) -> str:
    first = view.spec.layers[0]
    counts: dict[str, int] = {}
    for layer in view.spec.layers:
        name = "full" if layer.window_tokens is None else f"sliding {layer.window_tokens:,}"
        counts[name] = counts.get(name, 0) + 1
    kinds = ", ".join(f"{count} {name}" for name, count in counts.items())
    return (
        f"{kinds}; {first.num_attention_heads} query and {first.num_kv_heads} KV heads of {first.head_dim} in layer "
        f"{first.layer_idx}"
    )


def _records(view: CaseView) -> Iterator[Fact]:
    yield Fact("kvtriage", view.verdict.kvtriage_version)
    yield Fact("schema", str(view.verdict.schema))
    yield Fact("conditions", view.evidence.conditions_hash, code=True)
    yield Fact("scales", view.evidence.conditions.scales, code=True)
    for name, sha256 in view.verdict.inputs.items():
        yield Fact(name, sha256, code=True)


def study_toml(view: CaseView) -> str:
    """The study as a study.toml that gives it again."""
    fields = msgspec.to_builtins(view.plan.study)
    rule = fields.pop("rule")
    lines = [f"{name} = {_toml(value)}" for name, value in fields.items()]
    lines += ["", "[rule]", *(f"{name} = {_toml(value)}" for name, value in rule.items())]
    return "\n".join(lines)


def _toml(value: object) -> str:
    return json.dumps(value)
