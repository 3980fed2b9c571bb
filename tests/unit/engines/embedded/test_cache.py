"""The cache of one layer: what it retains, what it shows, what it holds."""

from __future__ import annotations

import pytest
import torch

from kvtriage.engines.embedded.cache import LayerCache, RaggedCache
from kvtriage.engines.embedded.codec import E4M3Codec, NativeCodec

HEADS, DIM, WINDOW = 2, 4, 5
NATIVE = NativeCodec(torch.bfloat16)
FP8 = E4M3Codec(torch.ones(1))


def positions(start: int, count: int) -> torch.Tensor:
    """K or V whose every element is its own position: [1, HEADS, count, DIM]."""
    return torch.arange(start, start + count, dtype=torch.float32).view(1, 1, -1, 1).expand(1, HEADS, -1, DIM)


def fed(cache: LayerCache, chunks: list[int]) -> list[torch.Tensor]:
    shown, start = [], 0
    for count in chunks:
        key, value = cache.append(positions(start, count), -positions(start, count))
        torch.testing.assert_close(key, -value)
        shown.append(key[0, 0, :, 0])
        start += count
    return shown


@pytest.mark.parametrize("codec", [NATIVE, FP8])
def test_a_full_layer_shows_everything_in_order(codec: NativeCodec | E4M3Codec) -> None:
    shown = fed(LayerCache(codec, codec, 12, None), [4, 1, 1, 3, 1])
    assert [row.tolist() for row in shown] == [list(range(n)) for n in (4, 5, 6, 9, 10)]


@pytest.mark.parametrize("codec", [NATIVE, FP8])
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("begun", [[3], [WINDOW], [7], [4, 4, 1]])
def test_a_copy_goes_on_by_itself(codec: NativeCodec | E4M3Codec, window: int | None, begun: list[int]) -> None:
    """With other room than the first one had, and whatever becomes of that."""
    seen = sum(begun)
    whole, first = (LayerCache(codec, codec, seen + room, window) for room in (6, 0))
    fed(whole, begun)
    fed(first, begun)
    copy = first.copy(seen + 6)
    for store in first.stored:
        store.zero_()
    for count in (4, 1, 1):
        expected, found = (cache.append(positions(seen, count), positions(seen, count)) for cache in (whole, copy))
        torch.testing.assert_close(found, expected)
        seen += count
    assert (copy.held_bytes, copy.lengths) == (whole.held_bytes, whole.lengths)


@pytest.mark.parametrize("codec", [NATIVE, FP8])
@pytest.mark.parametrize("chunks", [[3, 1, 1, 1, 1, 1], [8, 1, 1], [2, 2, 2, 2], [1] * 12, [4, 7, 1], [5, 5, 1], [16]])
def test_a_sliding_layer_shows_every_query_its_window(codec: NativeCodec | E4M3Codec, chunks: list[int]) -> None:
    shown = fed(LayerCache(codec, codec, sum(chunks), WINDOW), chunks)
    start = 0
    for count, row in zip(chunks, shown, strict=True):
        seen = row.tolist()
        for query in range(start, start + count):
            window = set(range(max(0, query - WINDOW + 1), query + 1))
            assert window <= set(seen)
        if count > 1:
            assert seen[-count:] == list(range(start, start + count))
            assert seen == sorted(seen)
        else:
            assert len(seen) <= WINDOW
        start += count


@pytest.mark.parametrize(("codec", "element_bytes"), [(NATIVE, 2), (FP8, 1)])
@pytest.mark.parametrize(("window", "tokens"), [(None, 1), (None, 9), (5, 3), (5, 5), (5, 9)])
def test_held_bytes_are_those_of_the_retained_positions(
    codec: NativeCodec | E4M3Codec, element_bytes: int, window: int | None, tokens: int
) -> None:
    cache = LayerCache(codec, codec, tokens, window)
    fed(cache, [1] * tokens)
    retained = tokens if window is None else min(tokens, window)
    assert cache.retained == retained
    assert cache.held_bytes == 2 * HEADS * DIM * retained * element_bytes


def test_an_empty_cache_holds_nothing() -> None:
    assert LayerCache(FP8, FP8, 4, None).held_bytes == 0


def test_more_tokens_than_it_was_made_for_are_refused() -> None:
    with pytest.raises(ValueError, match="made for 4 tokens was given 5"):
        fed(LayerCache(FP8, FP8, 4, 2), [3, 2])


@pytest.mark.parametrize("codec", [NATIVE, FP8])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_sequences_of_different_lengths_each_keep_their_own(codec: NativeCodec | E4M3Codec, window: int | None) -> None:
    """Joined of two caches, then again of what was joined; each shows the positions that it would show alone."""
    parts = []
    for length in (2, 7):
        parts.append(LayerCache(codec, codec, 12, window))
        fed(parts[-1], [length])
    once = RaggedCache(parts)
    once.append_one(*_ones(once.lengths))
    parts.append(LayerCache(codec, codec, 12, window))
    fed(parts[-1], [4])
    cache = RaggedCache([once, parts[-1]])
    for _ in range(3):
        cache.append_one(*_ones(cache.lengths))
    assert cache.lengths == (6, 11, 7)
    held = [min(length, window or length) for length in cache.lengths]
    assert cache.spans.tolist() == [[0, count] for count in held]
    assert cache.held_bytes == sum(held) * HEADS * 2 * DIM * codec.dtype.itemsize
    for row, (length, count) in enumerate(zip(cache.lengths, held, strict=True)):
        key, value = cache.visible(row)
        assert sorted(key[0, 1, :, 0].tolist()) == list(range(length - count, length))
        torch.testing.assert_close(key, -value)


def test_no_sequence_grows_beyond_what_the_cache_was_made_for() -> None:
    full, short = LayerCache(FP8, FP8, 4, 2), LayerCache(FP8, FP8, 4, 2)
    fed(full, [4])
    fed(short, [1])
    with pytest.raises(ValueError, match="made for 4"):
        RaggedCache([short, full]).append_one(*_ones((1, 4)))


def _ones(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of each sequence's next position."""
    key = torch.cat([positions(length, 1) for length in lengths])
    return key, -key
