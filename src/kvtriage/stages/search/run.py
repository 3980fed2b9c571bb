"""search: choose on some texts, verify what was chosen, claim on others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from kvtriage import __version__
from kvtriage.engines.base import Engine
from kvtriage.engines.info import EngineInfo
from kvtriage.errors import CaseError, EngineError
from kvtriage.kvcache.policy import Scaling
from kvtriage.records.frontier import Frontier, SearchTrial, SetTrial, VerifiedSet
from kvtriage.records.plan import Plan
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.study import Study, supports_per_head
from kvtriage.records.values import scale_set
from kvtriage.stages import Reporter
from kvtriage.stages.ablate import conditions_hash, study_conditions
from kvtriage.stages.reading import CANNOT_TELL, MET
from kvtriage.stages.search.choosing import UNVERIFIED, Choice, choose_set
from kvtriage.stages.search.front import Measured, draw_rows
from kvtriage.stages.search.naming import name_sets
from kvtriage.stages.search.probing import Probing
from kvtriage.stages.search.proving import Proving
from kvtriage.stages.search.rivals import isolated_damage
from kvtriage.stages.search.texts import choosing_items, of_text, screening_items
from kvtriage.stages.set_prices import Layers, Pricing, SetPrice
from kvtriage.stages.wording import name_layers
from kvtriage.tasks.base import TaskItem
from kvtriage.tasks.split import Split

__all__ = ["search"]


def search(
    plan: Plan,
    scales: ScaleRecord,
    sensitivities: Sensitivities,
    split: Split,
    items: Sequence[TaskItem],
    engine: Engine,
    done: Sequence[SearchTrial],
    sink: Callable[[SearchTrial], None],
    report: Reporter,
    inputs: Mapping[str, str],
) -> Frontier:
    """Measure what `done` does not hold yet; each line goes to `sink` at once.

    Raises CaseError when `done` was measured under other conditions or asks for what this search does not,
    EngineError when the engine would not start even in BF16, PolicyNotApplied, NonFinite, and StudyError for a text
    that no needle can be hidden in.
    """
    info, spec, study = engine.info(), engine.spec, plan.study
    conditions = conditions_hash(study_conditions(plan, scales, sensitivities.suspects, info))
    per_head = info.per_head_scales and supports_per_head(study.backend)
    scaling = Scaling.PER_HEAD if per_head else Scaling.PER_TENSOR
    pricing, fitted = Pricing.of(plan, scaling), scale_set(scales, scaling)
    native = pricing.price(frozenset(range(spec.num_layers)))
    if native is None:
        raise EngineError(
            "the server would not start with this model and memory, not even in BF16",
            hint="'kvtriage plan' says what it refuses; a study with more memory_bytes may do",
        )
    every, claims = choosing_items(split, study, engine.tokenizer, spec.windows), of_text(items)
    choosing = of_text(every)
    _check_done(done, conditions, (*every, *claims))
    probing = Probing(pricing, engine, fitted, conditions, sink, report)
    probing.recall(trial for trial in done if isinstance(trial, SetTrial))
    of_arms = [trial for trial in done if not isinstance(trial, SetTrial)]
    proving = Proving(plan, pricing, engine, info, fitted, every, split, conditions, sink, report, of_arms)

    def verify(skip: Layers) -> VerifiedSet:
        lacking = _lacking(pricing.price(skip), info) if engine.one_arm_at_a_time else ""
        if proving.is_probed or not (lacking or info.arms):
            return proving.verify(skip)
        why = lacking or "the servers that run are of other arms"
        return VerifiedSet(skip_layers=tuple(sorted(skip)), status=UNVERIFIED, text=why)

    isolated = isolated_damage(sensitivities, scaling)
    choice = choose_set(spec, study.rule, isolated, probing, choosing, screening_items(choosing), verify)
    shown = name_sets(choice, spec, isolated)
    readings = dict(zip(shown, probing.measure(shown, claims), strict=True))
    measured = {
        skip: Measured(skip, price, judged.mean)
        for skip, judged in choice.hunt.judged.items()
        if (price := choice.hunt.price(skip)) is not None
    }
    return Frontier(
        kvtriage_version=__version__,
        inputs=dict(inputs),
        scaling=scaling,
        found=None if choice.found is None else tuple(sorted(choice.found)),
        status=choice.status,
        explanation=_explain(choice, plan, probing.count),
        rows=draw_rows(shown, measured, readings, choice.found, native.held_bytes, study.rule),
        verified=choice.verified,
        kl_margin=study.rule.kl_margin,
        max_model_len=pricing.max_model_len,
        measured_sets=probing.count,
        inferred_sets=len(choice.hunt.inferred - choice.hunt.judged.keys()),
        refused_sets=len(choice.hunt.refused),
        choosing_texts=tuple(item.request.item_id for item in choosing),
        claim_texts=tuple(item.request.item_id for item in claims),
        notes=(*_notes(choosing, study, spec.windows), *_notes_of_servers(choice, proving)),
    )


def _check_done(done: Sequence[SearchTrial], conditions: str, asked: Sequence[TaskItem]) -> None:
    """Whether these lines could have come from this very search."""
    names = {item.request.item_id for item in asked}
    for number, trial in enumerate(done, start=1):
        if trial.conditions != conditions:
            raise CaseError(
                "the sets that are already there were measured under other conditions than these",
                hint="same machine, threads, versions and study are needed to go on; or start a new case folder",
            )
        read = trial.items if isinstance(trial, SetTrial) else (trial.item_id,)
        if not names.issuperset(read):
            raise CaseError(
                f"line {number} of search.jsonl holds a text that this search does not ask about",
                hint="it was edited or joined by hand: remove it to search again, or start a new case folder",
            )


def _explain(choice: Choice, plan: Plan, count: int) -> str:
    if choice.found is None:
        return "no set of layers was shown to keep the margins while others are in FP8: BF16 stays"
    if not choice.found:
        return "FP8 in every layer keeps the margins: none has to stay in BF16"
    price = choice.hunt.price(choice.found)
    flags = f", which the engine accepts with {' '.join(price.flags)} alone," if price and price.flags else ""
    keeps = {
        MET: "keeps all margins jointly",
        CANNOT_TELL: "keeps the KL margin and is not shown to break another",
    }.get(choice.status, "keeps the KL margin")
    named = name_layers(choice.found, plan.layers)
    others = f"none of {count} sets measured is shown to do so with fewer bytes"
    return f"with {named} in BF16{flags} the model {keeps}; {others}"


def _lacking(price: SetPrice | None, info: EngineInfo) -> str:
    """What the set's server starts with alone, and servers are not given; '' for nothing."""
    lacking = [flag for flag in (price.flags if price else ()) if flag not in info.server]
    if not lacking:
        return ""
    return f"its server starts with {' '.join(lacking)} alone, and all servers are to be alike: give it to them"


def _notes_of_servers(choice: Choice, proving: Proving) -> Iterator[str]:
    if not (proving.is_probed and choice.verified):
        return
    yield "sets were verified inside BF16's server, which rounded as theirs would; the ablation starts one for the set"
    found = None if choice.found is None else choice.hunt.price(choice.found)
    if lacking := _lacking(found, proving.info):
        yield f"the ablation has to be told: {lacking}"


def _notes(choosing: Sequence[TaskItem], study: Study, windows: Sequence[int]) -> Iterator[str]:
    longest, asked = max(item.bucket for item in choosing), max(study.buckets)
    if longest < asked:
        unasked = (
            ", and facts at the borders of windows were left to the ablation"
            if windows and study.window_needles
            else ""
        )
        yield (
            f"no text but the evaluation's is longer than {longest:,} tokens: sets were chosen at that length, and are "
            f"claimed at {asked:,}{unasked}; a larger calibration_tokens chooses there as well"
        )
