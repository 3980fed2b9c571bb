"""Texts that begin alike: where each is cut, so that what they share is read once.

A needle is hidden in a text that is scored itself, and begins as that text does; the answers of one question share
all of it. Such texts are read in pieces, cut where they part, and an engine that keeps what it stored of a piece goes
on from there. Where a text is cut follows from the token ids of all that are asked, and from nothing else: so it is
read in the same pieces whoever reads it, and whatever was read before.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvtriage.engines.base import ScoreRequest

__all__ = ["PIECE_TOKENS", "count_read", "cut_where_alike", "group_runs", "order_alike"]

PIECE_TOKENS = 128
"""Texts are cut at its multiples: the blocks of attention are those of a whole pass then, to the row."""
_LEAST_REST = 16
"""Tokens behind the last cut. Products of very few rows take another way to their sums."""
_RUN_TEXTS = 4
"""That one worker reads in a row at the most, so that others do not wait for it at the end."""


def cut_where_alike(requests: Sequence[ScoreRequest]) -> list[ScoreRequest]:
    """The requests, in their order, each with its cuts: wherever others share its tokens up to there and no further.

    No scored position lies before a cut. A request that shares nothing is not cut.
    """
    nodes: dict[tuple[int, tuple[int, ...]], int] = {}
    paths = [_path(request, nodes) for request in requests]
    readers = Counter(itertools.chain.from_iterable(paths))
    return [replace(request, cuts=_cuts(path, readers)) for request, path in zip(requests, paths, strict=True)]


def _path(request: ScoreRequest, nodes: dict[tuple[int, tuple[int, ...]], int]) -> list[int]:
    """Of each piece that may be cut off: a number that all requests with the same tokens up to its end have."""
    most = min(request.score_from - 1, len(request.token_ids) - _LEAST_REST)
    path, node = [], -1
    for stop in range(PIECE_TOKENS, most + 1, PIECE_TOKENS):
        node = nodes.setdefault((node, request.token_ids[stop - PIECE_TOKENS : stop]), len(nodes))
        path.append(node)
    return path


def _cuts(path: Sequence[int], readers: Counter[int]) -> tuple[int, ...]:
    """Behind each piece that more requests read than go on as this one does."""
    counts = [*(readers[node] for node in path), 1]
    return tuple(
        PIECE_TOKENS * number for number, (here, next_) in enumerate(itertools.pairwise(counts), 1) if here > next_
    )


def order_alike(requests: Sequence[ScoreRequest]) -> list[int]:
    """The numbers of the requests, those that share a beginning one after the other; else in their order."""
    first: dict[tuple[int, ...], int] = {}
    paths = []
    for number, request in enumerate(requests):
        begun = (request.token_ids[:cut] for cut in request.cuts)
        paths.append([first.setdefault(tokens, number) for tokens in begun] or [number])
    return sorted(range(len(requests)), key=lambda number: paths[number])


def group_runs(requests: Sequence[ScoreRequest]) -> list[range]:
    """Numbers of consecutive requests that one worker is to read in a row, because they begin alike."""
    runs: list[range] = []
    for number, request in enumerate(requests):
        run = runs[-1] if runs else range(0)
        if 0 < len(run) < _RUN_TEXTS and _begin_alike(requests[number - 1], request):
            runs[-1] = range(run.start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def _begin_alike(one: ScoreRequest, other: ScoreRequest) -> bool:
    cuts = one.cuts[:1]
    return cuts != () and cuts == other.cuts[:1] and one.token_ids[: cuts[0]] == other.token_ids[: cuts[0]]


def count_read(requests: Sequence[ScoreRequest]) -> int:
    """Tokens that are read where a beginning is read once, whatever is scored behind it."""
    return sum(_fresh(requests))


def _fresh(requests: Sequence[ScoreRequest]) -> Iterator[int]:
    begun: set[tuple[int, ...]] = set()
    for request in requests:
        for start, cut in itertools.pairwise((0, *request.cuts)):
            tokens = request.token_ids[:cut]
            if tokens not in begun:
                begun.add(tokens)
                yield cut - start
        yield len(request.token_ids) - max(request.cuts, default=0)
