"""One checkpoint, checked: the record that the text and the JSON are made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtriage.checkpoints.finding import Finding, Level
from kvtriage.checkpoints.scale_findings import attention_heads, find_suspects
from kvtriage.checkpoints.scale_loading import LayerLoad, choose_loader, predict_loading
from kvtriage.checkpoints.stored_scales import HeldScales, load_held_scales
from kvtriage.errors import UnsupportedModel
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["Answer", "Checked", "Group", "Live", "Said", "check_checkpoint"]


class Group(msgspec.Struct, frozen=True):
    """Scales of one tensor that are kept alike."""

    tensor: str
    form: str
    dtype: str
    shape: tuple[int, ...]
    layers: tuple[int, ...]


class Said(msgspec.Struct, frozen=True):
    level: str
    """'wrong', 'suspect' or 'said'."""
    text: str


class Live(msgspec.Struct, frozen=True):
    """What a running server applies."""

    layers: int
    equal: int
    """Layers whose live scales are those of the file, to the bit."""
    in_bf16: int
    """Layers whose cache is not in FP8 there."""
    backend: str
    differing: tuple[str, ...]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`status` is 'fine' or 'suspect'. `loading`: what vLLM 0.32 makes of q, k and v → that of how many layers."""

    path: str
    status: str
    scales: int
    groups: tuple[Group, ...]
    auto_becomes: str
    because: str
    loader: str
    loading: dict[str, dict[str, int]]
    findings: tuple[Said, ...]
    live: Live | None = None

    def joined_by(self, live: Live) -> Answer:
        """With what a server said of it."""
        status = "suspect" if live.differing else self.status
        return msgspec.structs.replace(self, live=live, status=status)


@dataclass(frozen=True)
class Checked:
    """The answer, and what a comparison with a server needs."""

    answer: Answer
    held: HeldScales
    spec: CacheSpec | None


def check_checkpoint(folder: Path, also: tuple[Finding, ...] = ()) -> Checked:
    """`also` are findings of the caller's. Raises ModelError for what cannot be read."""
    held = load_held_scales(folder)
    spec, unread = _geometry(held)
    loads = predict_loading(held, attention_heads(held, spec))
    findings = (*also, *find_suspects(held, spec), *unread)
    suspect = any(finding.level is not Level.SAID for finding in findings)
    answer = Answer(
        path=str(folder),
        status="suspect" if suspect else "fine",
        scales=len(held.scales),
        groups=_groups(held),
        auto_becomes=held.declared.cache_dtype,
        because=held.declared.because,
        loader=choose_loader(held),
        loading=_fates(loads),
        findings=tuple(Said(finding.level, finding.text) for finding in findings),
    )
    return Checked(answer, held, spec)


def _geometry(held: HeldScales) -> tuple[CacheSpec | None, tuple[Finding, ...]]:
    try:
        return read_cache_spec(held.config), ()
    except UnsupportedModel as error:
        return None, (Finding(Level.SAID, f"layers and heads could not be compared with config.json: {error.message}"),)


def _groups(held: HeldScales) -> tuple[Group, ...]:
    found: dict[tuple[str, str, str, tuple[int, ...]], list[int]] = {}
    for scale in held.scales:
        found.setdefault((scale.tensor, scale.form.value, scale.dtype, scale.shape), []).append(scale.layer_idx)
    return tuple(Group(*kept, tuple(sorted(layers))) for kept, layers in found.items())


def _fates(loads: tuple[LayerLoad, ...]) -> dict[str, dict[str, int]]:
    counted: Mapping[str, Counter[str]] = {tensor: Counter() for tensor in ("k", "v", "q")}
    for load in loads:
        for tensor, counts in counted.items():
            counts[getattr(load, tensor).fate.value] += 1
    return {tensor: dict(counts) for tensor, counts in counted.items()}
