"""The search: the cheapest set whose joint damage keeps the margin, with few sets measured.

Three ways lead to sets that keep it, and two make them smaller.

    seeds    the sets that others would choose, and of two rankings of single layers (by damage, and by
             damage per byte) the shortest beginning that keeps the margin: found by doubling and halving
    growth   from FP8 everywhere, the move that wins most per byte is added, as measured beside what is
             there already. Moves are layers and whole attention types. What a layer wins alone is the first
             estimate; moves are measured again, best estimate first, until the best measured one beats all
             estimates. Where the estimates do not add up to the damage there is, every move is measured;
             where no move wins anything, pairs are tried
    pruning  leave out what is not needed, in blocks, then one by one
    swaps    one layer for another, or two for one, where that is cheaper

Every comparison that decides is of measured sets. One thing is inferred: a set is not measured where a
larger one has failed, and only as long as no measured set has gainsaid that more BF16 never harms.

Nothing here knows an engine: what a set costs and does is asked of the functions handed in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvtriage.stages.search.rivals import ranking, worst_layers
from kvtriage.stages.set_prices import Layers, SetPrice

__all__ = ["Hunt", "Judged"]

_SHORTLIST = 4
_UNEXPLAINED = 0.7
"""Estimates that add up to less than this share of the damage do not explain it."""
_PLATEAU = 0.02
"""A move that wins less than this share of the damage wins nothing."""
_ROUNDS = 3


@dataclass(frozen=True)
class Judged:
    """A set on all texts."""

    keeps: bool
    mean: float


@dataclass
class Hunt:
    """What is known so far. `judge` and `screen` measure whole batches, so that sets share work.

    layers: all of the model's, L; groups: its attention types; isolated: damage of each layer alone.
    """

    layers: Layers
    groups: Sequence[Layers]
    isolated: Mapping[int, float]
    price_of: Callable[[Layers], SetPrice | None]
    """None for a set that the engine refuses."""
    screen: Callable[[Sequence[Layers]], Sequence[float]]
    """Mean damage on a few texts, for ranking."""
    judge: Callable[[Sequence[Layers]], Sequence[Judged]]
    judged: dict[Layers, Judged] = field(default_factory=dict)
    refused: set[Layers] = field(default_factory=set)
    inferred: set[Layers] = field(default_factory=set)
    _prices: dict[Layers, SetPrice] = field(default_factory=dict)
    _gain: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._gain = {layer: max(self.isolated.get(layer, 0.0), 0.0) for layer in self.layers}

    # --- what is asked of it ------------------------------------------------------------

    def cheapest(self, seeds: Iterable[Layers]) -> Layers | None:
        """The cheapest set found that keeps the margin; None when the engine accepts none that does."""
        nothing: Layers = frozenset()
        self.look_at([nothing])
        if self._keeps(nothing):
            return self.best
        self.look_at([*seeds, self.layers])
        for order in self._orders():
            self.shortest_beginning(order)
        self.grow()
        for start in self._starts():
            self._refine(start)
        return self.best

    @property
    def best(self) -> Layers | None:
        """Of all sets that were judged the cheapest that keeps the margin; of equal ones that which drifts least."""
        return min(self._kept(), key=self._rank, default=None)

    def price(self, skip: Layers) -> SetPrice | None:
        if skip not in self._prices and skip not in self.refused:
            found = self.price_of(skip)
            if found is None:
                self.refused.add(skip)
            else:
                self._prices[skip] = found
        return self._prices.get(skip)

    def look_at(self, sets: Iterable[Layers], *, even_if_bound: bool = False) -> None:
        """Judge what is accepted, not judged yet, and not bound to fail (unless it is to be shown all the same)."""
        new = []
        for skip in dict.fromkeys(sets):
            if skip in self.judged or self.price(skip) is None:
                continue
            if self._bound_to_fail(skip) and not even_if_bound:
                self.inferred.add(skip)
            else:
                new.append(skip)
        if new:
            self.judged.update(zip(new, self.judge(new), strict=True))

    def under(self, judge: Callable[[Sequence[Layers]], Sequence[Judged]]) -> Hunt:
        """The same hunt under another judge, who judges again what was judged before."""
        again = dict(zip(self.judged, judge(tuple(self.judged)), strict=True))
        return replace(self, judge=judge, judged=again)

    def shortest_beginning(self, order: Sequence[int]) -> None:
        """Judge beginnings of `order` until the shortest that keeps the margin is among them, if there is one."""
        low, high = 0, 1
        while not self._kept_after_looking(worst_layers(order, high)):
            if high >= len(order):
                return
            low, high = high, min(2 * high, len(order))
        while high - low > 1:
            middle = (low + high) // 2
            if self._kept_after_looking(worst_layers(order, middle)):
                high = middle
            else:
                low = middle

    def grow(self, *, until: float | None = None, most_moves: int | None = None) -> None:
        """Add the best move to FP8 everywhere until the margin is kept, or the mean damage is down to `until`.

        Down to `until` the way is shown and not decided on: what single layers win alone is believed.
        """
        state: Layers = frozenset()
        for _ in range(len(self.layers) if most_moves is None else most_moves):
            self.look_at([state], even_if_bound=until is not None)
            judged = self.judged.get(state)
            if judged is not None and (judged.keeps if until is None else judged.mean <= until):
                return
            added = self._best_move(state, thorough=until is None)
            if added is None:
                return
            state |= added
        self.look_at([state], even_if_bound=until is not None)

    # --- growth -------------------------------------------------------------------------

    def _best_move(self, state: Layers, *, thorough: bool) -> Layers | None:
        moves = self._moves(state)
        if not moves:
            return None
        level = self.screen([state])[0]
        explained = sum(self._gain[layer] for layer in self.layers - state) >= _UNEXPLAINED * level
        wins = self._measure_moves(state, level, moves, len(moves) if thorough and not explained else _SHORTLIST)
        if thorough and max(wins.values()) <= _PLATEAU * level:
            likely = ranking({layer: self.isolated.get(layer, 0.0) for layer in self.layers - state})[: _SHORTLIST + 1]
            pairs = [frozenset(pair) for pair in itertools.combinations(likely, 2)]
            wins |= self._win(state, level, [pair for pair in pairs if self.price(state | pair) is not None])
            if max(wins.values()) <= _PLATEAU * level:
                return max(moves, key=lambda move: self._per_byte(state, move, self._isolated(move)))
        return max(wins, key=lambda move: self._per_byte(state, move, wins[move]))

    def _moves(self, state: Layers) -> list[Layers]:
        single = [frozenset({layer}) for layer in sorted(self.layers - state)]
        whole = [group - state for group in self.groups if group - state]
        return [move for move in dict.fromkeys((*single, *whole)) if self.price(state | move) is not None]

    def _measure_moves(self, state: Layers, level: float, moves: Sequence[Layers], at_once: int) -> dict[Layers, float]:
        """What moves win beside `state`: measured until no estimate of another beats the best."""
        waiting = sorted(moves, key=lambda move: -self._per_byte(state, move, self._estimate(move)))
        wins: dict[Layers, float] = {}
        while waiting:
            best = max((self._per_byte(state, move, win) for move, win in wins.items()), default=None)
            if best is not None and self._per_byte(state, waiting[0], self._estimate(waiting[0])) <= best:
                break
            wins |= self._win(state, level, waiting[:at_once])
            waiting = waiting[at_once:]
        return wins

    def _win(self, state: Layers, level: float, moves: Sequence[Layers]) -> dict[Layers, float]:
        wins = {
            move: level - mean for move, mean in zip(moves, self.screen([state | move for move in moves]), strict=True)
        }
        for move, win in wins.items():
            if len(move) == 1:
                self._gain[next(iter(move))] = max(win, 0.0)
        return wins

    def _per_byte(self, state: Layers, move: Layers, win: float) -> float:
        before, after = self.price(state), self.price(state | move)
        if before is None or after is None:
            return win
        return win / max(after.held_bytes - before.held_bytes, 1.0)

    def _estimate(self, move: Layers) -> float:
        return sum(self._gain[layer] for layer in move)

    def _isolated(self, move: Layers) -> float:
        return sum(self.isolated.get(layer, 0.0) for layer in move)

    def _orders(self) -> tuple[Sequence[int], ...]:
        """Single layers by damage, and by damage per byte."""
        nothing: Layers = frozenset()
        per_byte = {
            layer: self._per_byte(nothing, frozenset({layer}), self.isolated.get(layer, 0.0)) for layer in self.layers
        }
        by_damage = ranking({layer: self.isolated.get(layer, 0.0) for layer in self.layers})
        return tuple(dict.fromkeys((by_damage, ranking(per_byte))))

    # --- making it smaller --------------------------------------------------------------

    def _starts(self) -> list[Layers]:
        """The two cheapest sets that hold, neither within the other: pruning the larger would lead to the smaller."""
        kept = sorted(self._kept(), key=self._rank)
        return [*kept[:1], *[skip for skip in kept if not kept[0] <= skip][:1]]

    def _refine(self, state: Layers) -> None:
        for _ in range(_ROUNDS):
            pruned = self._prune(state)
            swapped = self._swap(pruned)
            if swapped == state:
                return
            state = swapped

    def _prune(self, state: Layers) -> Layers:
        waiting = [layer for layer in ranking(self._gain)[::-1] if layer in state]
        while waiting:
            block = waiting[:_SHORTLIST]
            half = waiting[: len(waiting) // 2]
            ways = [state - set(half), state - set(block), *(state - {layer} for layer in block)]
            self.look_at(ways)
            fitting = [way for way in ways if self._keeps(way) and self._is_cheaper(way, state)]
            if not fitting:
                waiting = waiting[_SHORTLIST:]
                continue
            smaller = min(fitting, key=self._rank)
            # What had to stay beside more has to stay beside less.
            waiting = [w for w in waiting if w in smaller and (w not in block or state - {w} in fitting)]
            state = smaller
        return state

    def _swap(self, state: Layers) -> Layers:
        outside = [layer for layer in ranking(self._gain) if layer not in state][:_SHORTLIST]
        inside = [layer for layer in ranking(self._gain)[::-1] if layer in state][:_SHORTLIST]
        leaving = [frozenset(out) for size in (1, 2) for out in itertools.combinations(inside, size)]
        ways = [state - out | {entering} for out in leaving for entering in outside]
        cheaper = [way for way in dict.fromkeys(ways) if self._is_cheaper(way, state) and not self._bound_to_fail(way)]
        if not cheaper:
            return state
        by_damage = sorted(zip(self.screen(cheaper), cheaper, strict=True), key=lambda found: found[0])
        shortlist = [way for _, way in by_damage[:_SHORTLIST]]
        self.look_at(shortlist)
        return min((way for way in shortlist if self._keeps(way)), key=self._rank, default=state)

    # --- what is known ------------------------------------------------------------------

    def _kept(self) -> list[Layers]:
        return [skip for skip, found in self.judged.items() if found.keeps]

    def _keeps(self, skip: Layers) -> bool:
        return skip in self.judged and self.judged[skip].keeps

    def _kept_after_looking(self, skip: Layers) -> bool:
        self.look_at([skip])
        return self._keeps(skip)

    def _rank(self, skip: Layers) -> tuple[SetPrice, float, tuple[int, ...]]:
        return self._prices[skip], self.judged[skip].mean, tuple(sorted(skip))

    def _is_cheaper(self, skip: Layers, than: Layers) -> bool:
        price, other = self.price(skip), self.price(than)
        return price is not None and other is not None and price < other

    def _bound_to_fail(self, skip: Layers) -> bool:
        failed = [other for other, found in self.judged.items() if not found.keeps]
        return self._is_monotone and any(skip < other for other in failed)

    @property
    def _is_monotone(self) -> bool:
        """No judged set keeps the margin with fewer layers in BF16 than another that does not."""
        kept = self._kept()
        return not any(small < large for large, found in self.judged.items() if not found.keeps for small in kept)
