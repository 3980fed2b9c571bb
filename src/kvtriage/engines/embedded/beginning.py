"""What texts have in common is read once: the cache behind the tokens that they begin with.

Where a text is cut, what an arm has stored by then is kept as the arm stores it, a sliding layer's window included. A
text that begins alike goes on behind it. What is stored of a piece depends on the tokens up to its end, on where these
are cut, and on the arm, so it does not matter which text left it there, or whether it is there at all. Of one text
after another only what the next one begins with stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.engines.base import ScoreRequest
from kvtriage.engines.embedded.cache import LayerCache

__all__ = ["MOST_BEGUN_BYTES", "Beginning", "Beginnings"]

MOST_BEGUN_BYTES = 512 << 20
"""Of stored caches; what goes beyond it is read again."""


@dataclass(frozen=True, eq=False)
class Beginning:
    """What an arm stored of a text's first tokens; not all of it in layers below the one at which it resumed."""

    caches: tuple[LayerCache, ...] = ()

    @property
    def tokens(self) -> int:
        return self.caches[-1].seen if self.caches else 0

    @property
    def first_layer(self) -> int:
        """Whose cache has all of the tokens: a layer that was resumed over any piece lacks these."""
        return next((index for index, cache in enumerate(self.caches) if cache.seen == self.tokens), 0)

    @property
    def held_bytes(self) -> int:
        return sum(cache.held_bytes for cache in self.caches)


_Key = tuple[tuple[int, ...], tuple[int, ...], object]
"""Tokens, where they are cut, and how they are stored."""


class Beginnings:
    """Of the text that is being read, by arm."""

    def __init__(self, most_bytes: int = MOST_BEGUN_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: dict[_Key, Beginning] = {}

    @property
    def held_bytes(self) -> int:
        return sum(kept.held_bytes for kept in self._kept.values())

    def longest(self, request: ScoreRequest, way: object) -> Beginning:
        """That this text goes on behind, stored in this `way`; an empty one where there is none."""
        self._forget_others(request.token_ids)
        keys = (_key(request, cut, way) for cut in reversed(request.cuts))
        return next((self._kept[key] for key in keys if key in self._kept), Beginning())

    def keep(self, request: ScoreRequest, way: object, caches: Sequence[LayerCache]) -> None:
        """A copy of what `caches` hold of a text that was just read up to one of its cuts."""
        cut = caches[-1].seen
        held = self.held_bytes + sum(cache.held_bytes for cache in caches)
        if held <= self._most_bytes:
            self._kept[_key(request, cut, way)] = Beginning(tuple(cache.copy(cut) for cache in caches))

    def _forget_others(self, token_ids: tuple[int, ...]) -> None:
        others = [key for key in self._kept if token_ids[: len(key[0])] != key[0]]
        for key in others:
            del self._kept[key]


def _key(request: ScoreRequest, cut: int, way: object) -> _Key:
    return request.token_ids[:cut], tuple(own for own in request.cuts if own <= cut), way
