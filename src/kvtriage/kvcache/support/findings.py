"""What the engine refuses before weights load, and what starts and is known to end badly.

Which backends serve what is `backend_table`, and cautions beside it are `cautions`. Rows hold for vLLM 0.32.0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.kvcache.support.backend_choice import LayerBackend, Objection, Serving, pick_backend
from kvtriage.kvcache.support.backend_table import ONLY_FLASH
from kvtriage.kvcache.support.cautions import CAUTIONS, Severity, Subject
from kvtriage.kvcache.support.gpus import Gpu, Platform
from kvtriage.kvcache.versions import MODELLED

__all__ = ["Finding", "check_support"]


@dataclass(frozen=True)
class Finding:
    severity: Severity
    sentence: str
    source: str
    hint: str


def check_support(
    spec: CacheSpec, policy: CachePolicy, gpu: Gpu | None, serving: Serving | None = None
) -> tuple[Finding, ...]:
    """All that is known against serving `policy` there, refusals first.

    Raises ValueError for a probe, which no server can apply.
    """
    given = Serving() if serving is None else serving
    choice = None if gpu is None else pick_backend(spec, policy, gpu, given)
    subject = Subject(spec, policy, gpu, given, choice)
    findings = [*_version_findings(given), *_backend_findings(subject)]
    findings.extend(
        Finding(row.severity, row.sentence, row.source, row.hint) for row in CAUTIONS if row.applies(subject)
    )
    order = list(Severity)
    return tuple(sorted(findings, key=lambda finding: order.index(finding.severity)))


def _version_findings(serving: Serving) -> tuple[Finding, ...]:
    if serving.version == MODELLED:
        return ()
    sentence = f"what backends serve is known of vLLM {MODELLED}, and was not read for {serving.version}"
    return (Finding(Severity.SAID, sentence, "vLLM 0.32.0", "the engine itself has the last word"),)


def _backend_findings(subject: Subject) -> tuple[Finding, ...]:
    if subject.choice is None or subject.gpu is None:
        sentence = "no GPU was named, so attention backends were not checked"
        return (Finding(Severity.SAID, sentence, "platforms/cuda.py:75-165", "name one: --gpu h100-80g"),)
    return tuple(_refusal(each, subject.gpu, subject) for each in _alike(subject.choice.by_layer))


def _alike(choices: Sequence[LayerBackend]) -> Iterator[LayerBackend]:
    """What serves no layer, those together that fail for the same reasons."""
    found: dict[tuple[Objection, ...], list[LayerBackend]] = {}
    for each in choices:
        if not each.serves:
            reasons = (each.fails,) if each.fails is not None else _fewest(each.passed_over)
            found.setdefault(reasons, []).append(each)
    for group in found.values():
        yield replace(group[0], layers=tuple(sorted(layer for each in group for layer in each.layers)))


def _fewest(objections: Sequence[Objection]) -> tuple[Objection, ...]:
    """One objection for each backend: the one that most of them share."""
    shared = Counter(each.sentence for each in objections)
    chosen: dict[str, Objection] = {}
    for each in sorted(objections, key=lambda each: -shared[each.sentence]):
        chosen.setdefault(each.backend, each)
    return tuple(chosen.values())


def _refusal(choice: LayerBackend, gpu: Gpu, subject: Subject) -> Finding:
    where = f"{_named(choice.layers)} on {gpu.described}"
    hint = _way_out(choice, gpu, subject)
    if choice.fails is not None:
        sentence = f"{choice.fails.backend} is taken for {where} and raises: {choice.fails.sentence}"
        return Finding(Severity.REFUSED, sentence, choice.fails.source, hint)
    objections = _fewest(choice.passed_over)
    backends: dict[str, list[str]] = {}
    for each in objections:
        backends.setdefault(each.sentence, []).append(each.backend)
    reasons = "; ".join(f"{', '.join(names)}: {sentence}" for sentence, names in backends.items())
    sources = ", ".join(dict.fromkeys(each.source for each in objections))
    sentence = f"no attention backend serves {where}" + (f" ({reasons})" if reasons else "")
    return Finding(Severity.REFUSED, sentence, sources, hint)


def _way_out(choice: LayerBackend, gpu: Gpu, subject: Subject) -> str:
    if subject.serving.backend is not None and choice.backend is None:
        return "leave --attention-backend out"
    if any(each.sentence == ONLY_FLASH for each in choice.passed_over) and _would_serve(
        _per_tensor(subject.policy), gpu, subject
    ):
        starts = (
            "" if gpu.major in (9, 10) else "; a checkpoint of strategy attn_head does not start there in BF16 either"
        )
        return f"use per-tensor scales{starts}"
    if not _would_serve(CachePolicy.native(subject.spec.num_layers), gpu, subject):
        return "use another GPU: nothing here serves these layers in BF16 either"
    if gpu.platform is not Platform.CUDA or gpu.sm >= 89:
        return "give --kv-cache-dtype bfloat16"
    return f"give --kv-cache-dtype {'float16' if gpu.sm < 80 else 'bfloat16'}, or use a GPU of sm89 or later"


def _per_tensor(policy: CachePolicy) -> CachePolicy:
    """The same layers in FP8, with one scale each."""
    return policy if policy.is_native else CachePolicy.fp8(policy.num_layers, Scaling.PER_TENSOR, policy.skip_layers)


def _would_serve(policy: CachePolicy, gpu: Gpu, subject: Subject) -> bool:
    """With a checkpoint that asks for no scales per head."""
    return pick_backend(subject.spec, policy, gpu, replace(subject.serving, declared=None)).serves


def _named(layers: tuple[int, ...]) -> str:
    """'layer 3', 'layers 0, 2, 4', 'layers 0, 2, 4 and 9 more'."""
    shown = ", ".join(map(str, layers[:3]))
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    return f"layer{'s' if len(layers) > 1 else ''} {shown}{more}"
