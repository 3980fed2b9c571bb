"""`kvtriage plan --sweep`: many policies at once, and those worth a thought."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from kvtriage.cli.plan.answer import Memory, Question, serve_words
from kvtriage.errors import StudyError
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.prices.pareto import FrontPoint, Kept, pareto
from kvtriage.kvcache.prices.sweep import SweepRow, list_policies, sweep
from kvtriage.kvcache.spec import LayerKind
from kvtriage.kvcache.support.cautions import Severity
from kvtriage.units import format_bytes

__all__ = ["BASELINES", "MOST_ROWS", "Sweep", "run_sweep"]

MOST_ROWS = 1_000_000
BASELINES = ("BF16", "FP8")


@dataclass(frozen=True)
class Sweep:
    """`front` are the policies that nobody would pass over, by layers kept; `rows` are all there are.

    `own` are the layers of the user's own sets that hold K and V, each set as a row has it. `assumed` is what neither
    config.json nor a flag says, `notes` what is known of the release and of the GPU.
    """

    question: Question
    own: frozenset[tuple[int, ...]]
    assumed: tuple[str, ...]
    notes: tuple[str, ...]
    num_policies: int
    rows: tuple[SweepRow, ...]
    front: tuple[FrontPoint, ...]

    @property
    def servers(self) -> tuple[tuple[int, int], ...]:
        """(context, memory), in their order."""
        return tuple(self._rows_by_server)

    @property
    def is_rough(self) -> bool:
        """Whether the memory is a guess, and with it the tokens."""
        return self.question.memory is not None and self.question.memory.band is not None

    def is_own(self, row: SweepRow) -> bool:
        return row.skip_layers in self.own

    def is_wanted(self, row: SweepRow) -> bool:
        """Whether the row is shown whatever the others are."""
        return row.name in BASELINES or self.is_own(row)

    def serve(self, row: SweepRow) -> str:
        """The flags that print the row's tokens."""
        question = self.question
        policy = CachePolicy.native(question.spec.num_layers)
        if row.name != BASELINES[0]:
            scaling = question.policy.scaling or Scaling.UNIT
            policy = CachePolicy.fp8(question.spec.num_layers, scaling, row.skip_layers)
        memory = question.memory if self.is_rough else Memory(row.memory_bytes)
        args = replace(question.args, max_model_len=row.context_len)
        return " ".join(serve_words(replace(question, policy=policy, args=args, memory=memory)))

    def rows_of(self, server: tuple[int, int]) -> Sequence[SweepRow]:
        return self._rows_by_server[server]

    def front_of(self, server: tuple[int, int]) -> Sequence[FrontPoint]:
        return self._front_by_server.get(server, ())

    @cached_property
    def _rows_by_server(self) -> Mapping[tuple[int, int], Sequence[SweepRow]]:
        return _by_server(self.rows)

    @cached_property
    def _front_by_server(self) -> Mapping[tuple[int, int], Sequence[FrontPoint]]:
        return _by_server(self.front)


_Priced = TypeVar("_Priced", SweepRow, FrontPoint)


def _by_server(priced: Sequence[_Priced]) -> Mapping[tuple[int, int], Sequence[_Priced]]:
    found: dict[tuple[int, int], list[_Priced]] = {}
    for each in priced:
        found.setdefault((each.context_len, each.memory_bytes), []).append(each)
    return found


def run_sweep(question: Question, own: Sequence[Sequence[int]], memories: Sequence[int]) -> Sweep:
    """Every policy that is easily said, and `own` sets, on every server of one context and one memory.

    Each server's max_model_len is its context. Raises StudyError for more rows than anybody reads.
    """
    contexts = tuple(dict.fromkeys(question.contexts))
    sizes = tuple(dict.fromkeys(memories))
    policies = list_policies(question.spec, own)
    count = len(policies) * len(contexts) * len(sizes)
    if count > MOST_ROWS:
        raise StudyError(
            f"this sweep has {count:,} rows, more than {MOST_ROWS:,}", hint="give fewer lengths, memories or sets"
        )
    rows = sweep(question.spec, policies, question.args, contexts, sizes)
    said = tuple(each for each in question.assumed if not each.startswith("max_model_len"))
    assumed = (*question.spec.assumed, *said)
    notes = tuple(_notes(question))
    holders = {layer.layer_idx for layer in question.spec.layers if layer.holds_kv}
    kept = frozenset(tuple(sorted(holders.intersection(layers))) for layers in own)
    return Sweep(question, kept, assumed, notes, len(policies), rows, pareto(rows, Kept.LAYERS))


def _notes(question: Question) -> Iterator[str]:
    """Also what holds for layers kept in BF16, which the question itself names none of."""
    if question.memory is not None and (band := question.memory.band) is not None:
        yield (
            f"the memory is the likely size of a band, from {format_bytes(band.low_bytes)} to "
            f"{format_bytes(band.high_bytes)}: the tokens are rounded"
        )
    is_recurrent = LayerKind.STATE in question.spec.kinds
    yield from question.args.version.caveats(skips_layers=True, is_recurrent=is_recurrent)
    if question.declared.refused is not None:
        yield f"vLLM does not load this checkpoint: {question.declared.refused}"
    for finding in question.findings:
        if finding.severity is Severity.REFUSED:
            yield f"vLLM would not start with FP8: {finding.sentence}"
        elif finding.severity is Severity.WARNED:
            yield finding.sentence
