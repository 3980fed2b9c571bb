"""Which text calibrates, which is held out, which is probed and which is judged on.

Documents are dealt to the four roles, not items, so that no text plays two of them; then it is
checked that no run of tokens of an evaluation item occurs in the others. Where one long file
is all there is, the roles get separate spans of it, and the split says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from kvtriage.errors import DataError
from kvtriage.records.study import Study, check_context
from kvtriage.tasks.corpus import Document
from kvtriage.tasks.overlap import RUN_TOKENS, Runs
from kvtriage.tasks.reading import Source, reading_order

if TYPE_CHECKING:
    from kvtriage.engines.base import Tokenizer

__all__ = ["GAP_TOKENS", "Item", "Split", "split_corpus"]

GAP_TOKENS = RUN_TOKENS
"""Tokens left out between two roles that must share a document."""

_LEAST_READING = 4_000_000
_CHARACTERS_PER_TOKEN = 64
"""How many characters may be looked at for each token that is needed, and in any case."""


@dataclass(frozen=True)
class Item:
    """One text of exactly `bucket` tokens: BOS, then consecutive tokens of one document."""

    item_id: str
    """doc_id.offset.length, in tokens of the document."""
    token_ids: tuple[int, ...]
    bucket: int
    doc_id: str


@dataclass(frozen=True)
class Split:
    """Items by role. Calibration and holdout items have one length, probe items another."""

    calibration: tuple[Item, ...]
    holdout: tuple[Item, ...]
    probe: tuple[Item, ...]
    evaluation: tuple[Item, ...]
    """By bucket, ascending."""
    dropped_overlaps: int = 0
    """Candidates refused because they shared a run of tokens with another role's text."""
    notes: tuple[str, ...] = ()
    """What a reader of the results should know about the text, in sentences."""


@dataclass(frozen=True)
class _Demand:
    """`count` items of `length` tokens, BOS included."""

    role: str
    length: int
    count: int


def split_corpus(documents: Sequence[Document], study: Study, tokenizer: Tokenizer, max_model_len: int) -> Split:
    """Deal the documents out. The same documents in any order, study and tokenizer give the same split.

    Tokenises only until there is enough. Raises StudyError when the model cannot hold the
    lengths asked for, and DataError, saying what is missing, when the text cannot fill them.
    """
    check_context(study, max_model_len)
    demands = _demands(study)
    needed = sum(demand.length * demand.count for demand in demands)
    reading = reading_order(documents, study.seed, max(_LEAST_READING, _CHARACTERS_PER_TOKEN * needed))
    sources = [Source(document, tokenizer) for document in reading]
    draw = _Draw(tokenizer.bos)
    notes = []
    if _draw_by_document(draw, sources, demands) is not None:
        draw = _Draw(tokenizer.bos)
        unmet = _draw_by_span(draw, sources, demands)
        if unmet is not None:
            raise _shortage(unmet, draw, sources, study, len(tokenizer.bos))
        notes.append(
            "the text has too few long documents to give each its own role: calibration, held-out, probe and "
            f"evaluation items are separate spans of the same documents, at least {GAP_TOKENS} tokens apart"
        )
    split = Split(
        calibration=draw.of("calibration"),
        holdout=draw.of("holdout"),
        probe=draw.of("probe"),
        evaluation=tuple(sorted(draw.of("evaluation"), key=lambda item: item.bucket)),
        dropped_overlaps=draw.dropped,
    )
    return replace(split, notes=(*notes, *_notes(split, documents)))


def _demands(study: Study) -> tuple[_Demand, ...]:
    """In the order in which they are filled: evaluation last, its longest bucket first."""
    return (
        _Demand("calibration", study.calibration_tokens, study.calibration_items),
        _Demand("holdout", study.calibration_tokens, study.holdout_items),
        _Demand("probe", study.probe_tokens, study.probe_items),
        *(_Demand("evaluation", bucket, study.items_per_bucket) for bucket in sorted(study.buckets, reverse=True)),
    )


class _Draw:
    """The items drawn so far, and the candidates refused on the way."""

    def __init__(self, bos: tuple[int, ...]) -> None:
        self.bos = bos
        self.items: dict[_Demand, list[Item]] = {}
        self.dropped = 0

    def of(self, role: str) -> tuple[Item, ...]:
        return tuple(item for demand, items in self.items.items() if demand.role == role for item in items)

    def start(self, demand: _Demand) -> Runs:
        """The runs that items of this demand may not share: holdout not with calibration, evaluation with none."""
        self.items[demand] = []
        if demand.role not in ("holdout", "evaluation"):
            return Runs({})
        others = [item for role in ("calibration", "holdout", "probe") if role != demand.role for item in self.of(role)]
        return Runs.of((item.token_ids for item in others), demand.length)

    def lacks(self, demand: _Demand) -> bool:
        return len(self.items[demand]) < demand.count

    def take(self, demand: _Demand, source: Source, forbidden: Runs) -> bool:
        """Take the next item from `source`, past any run that is forbidden; False when it holds no more."""
        body = demand.length - len(self.bos)
        while source.holds(body):
            token_ids = self.bos + source.peek(body)
            shared_until = forbidden.shared_until(token_ids)
            if shared_until is None:
                item_id = f"{source.doc_id}.{source.position}.{demand.length}"
                self.items[demand].append(Item(item_id, token_ids, demand.length, source.doc_id))
                source.position += body
                return True
            self.dropped += 1
            source.position += max(1, shared_until - len(self.bos))
        return False


def _draw_by_document(draw: _Draw, sources: Sequence[Source], demands: Sequence[_Demand]) -> _Demand | None:
    """Every document plays one role. Returns the first demand that cannot be met."""
    stream = iter(sources)
    dealt = _deal(stream, demands, len(draw.bos))
    for demand in demands:
        forbidden = draw.start(demand)
        for source in dealt[demand]:
            draw.take(demand, source, forbidden)
        while draw.lacks(demand) and (fresh := next(stream, None)) is not None:
            dealt[demand].append(fresh)
            draw.take(demand, fresh, forbidden)
        live = [source for other in demands if other.role == demand.role for source in dealt[other]]
        while draw.lacks(demand) and live:
            live = [source for source in live if draw.lacks(demand) and draw.take(demand, source, forbidden)]
        if draw.lacks(demand):
            return demand
    return None


def _deal(stream: Iterator[Source], demands: Sequence[_Demand], bos_tokens: int) -> dict[_Demand, list[Source]]:
    """One document for each item, as far as they go; each goes where the largest share is still missing."""
    dealt: dict[_Demand, list[Source]] = {demand: [] for demand in demands}

    def missing(demand: _Demand) -> float:
        return 1 - len(dealt[demand]) / demand.count

    while wanting := [demand for demand in demands if missing(demand) > 0]:
        source = next(stream, None)
        if source is None:
            break
        fitting = [demand for demand in wanting if source.holds(demand.length - bos_tokens)]
        if fitting:
            dealt[max(fitting, key=lambda demand: (missing(demand), demand.length))].append(source)
    return dealt


def _draw_by_span(draw: _Draw, sources: Sequence[Source], demands: Sequence[_Demand]) -> _Demand | None:
    """Fill one role after the other from the documents laid end to end, with a gap between roles."""
    for source in sources:
        source.position = 0
    for _, group in groupby(demands, key=lambda demand: demand.role):
        for demand in group:
            forbidden = draw.start(demand)
            for source in sources:
                while draw.lacks(demand) and draw.take(demand, source, forbidden):
                    pass
            if draw.lacks(demand):
                return demand
        for source in sources:
            if source.position > 0:
                source.position += GAP_TOKENS
    return None


def _notes(split: Split, documents: Sequence[Document]) -> Iterator[str]:
    copies = sum(document.copies - 1 for document in documents)
    if copies:
        yield f"{copies:,} of the texts given are exact repeats of others and were left out"
    if split.dropped_overlaps:
        yield (
            f"{split.dropped_overlaps:,} candidate items shared {RUN_TOKENS} tokens in a row (or all they had) with "
            "text of another role and were dropped"
        )
    origins: Mapping[int, Counter[str]] = {
        bucket: Counter(item.doc_id for item in items)
        for bucket, items in groupby(split.evaluation, key=lambda item: item.bucket)
    }
    for bucket, origin in origins.items():
        if len(origin) < origin.total():
            yield (
                f"the {origin.total()} items of bucket {bucket} come from only {len(origin)} separate texts, so "
                "their intervals may be too narrow"
            )


def _shortage(unmet: _Demand, draw: _Draw, sources: Sequence[Source], study: Study, bos_tokens: int) -> DataError:
    """Say exactly what is missing, and a study that this text would do for."""
    for source in sources:
        source.position = 0
    if not any(source.holds(unmet.length - bos_tokens) for source in sources):
        longest = max((source.count_tokens() + bos_tokens for source in sources), default=0)
        too_long = max(_demands(study), key=lambda demand: (demand.length > longest, demand.role == "evaluation"))
        return DataError(
            f"the longest line has {longest:,} tokens, {_name(too_long)} needs {too_long.length:,} in one line",
            hint=_shorter_study(study, longest),
        )
    have = len(draw.items[unmet])
    message = (
        f"the text fills only {have} of the {unmet.count} items of {unmet.length:,} tokens that {_name(unmet)} needs"
    )
    if draw.dropped:
        return DataError(
            f"{message}; {draw.dropped:,} candidates repeat text of another role",
            hint="give text that repeats itself less; a prompt that all lines begin with is best cut off",
        )
    total = sum(demand.length * demand.count for demand in _demands(study))
    return DataError(
        f"{message}; the whole study reads {total:,} tokens",
        hint="give more text, or ask for fewer items (items_per_bucket, calibration_items) in study.toml",
    )


def _name(demand: _Demand) -> str:
    match demand.role:
        case "evaluation":
            return f"bucket {demand.length}"
        case "probe":
            return "the probe (probe_tokens)"
        case _:
            return f"the {demand.role} text (calibration_tokens)"


def _shorter_study(study: Study, longest: int) -> str:
    if longest < 32:
        return "give longer lines"
    short = 1 << (longest.bit_length() - 1)
    buckets = [bucket for bucket in study.buckets if bucket <= longest] or [short]
    probe_tokens = study.probe_tokens if study.probe_tokens <= longest else short
    changes = {
        "score_tokens": buckets[0] // 2 if study.score_tokens > buckets[0] // 2 else None,
        "calibration_tokens": short if study.calibration_tokens > longest else None,
        "probe_tokens": short if study.probe_tokens > longest else None,
        "probe_score_tokens": probe_tokens // 2 if study.probe_score_tokens >= probe_tokens else None,
    }
    settings = [f"{key} = {value}" for key, value in changes.items() if value is not None]
    flags = f"--buckets {','.join(map(str, buckets))}"
    return f"give longer lines, or {flags}" + (f" with {', '.join(settings)} in study.toml" if settings else "")
