"""What the kernel writes against what the codecs encode: the same bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvtriage.engines.embedded.cache import LayerCache, RaggedCache, Writers
from kvtriage.engines.embedded.codec import Codec, E4M3Codec, NativeCodec
from kvtriage.engines.embedded.kernel.kernel import DecodeKernel, open_decode

SCALES = {"one": np.ones(2, np.float32), "by head": np.array([0.37, 3.1], np.float32)}


@pytest.fixture(scope="module")
def kernel() -> Iterator[DecodeKernel]:
    with open_decode(1, "storage", torch.device("cpu")) as decode:
        assert isinstance(decode, DecodeKernel)
        yield decode


def codec_and_writers(kernel: DecodeKernel, fmt: str, scale: str) -> tuple[Codec, Writers]:
    codec: Codec = E4M3Codec(torch.from_numpy(SCALES[scale])) if fmt == "fp8" else NativeCodec(torch.bfloat16)
    divisors = SCALES[scale] if fmt == "fp8" else SCALES["one"]
    write = kernel.writer(codec.dtype, divisors)
    assert write is not None
    return codec, (write, write)


def of_bits(bits: np.ndarray) -> torch.Tensor:
    """As K of one token: [1, 2, 1, D]."""
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32).reshape(1, 2, 1, -1))


def as_stored(kernel: DecodeKernel, values: torch.Tensor, fmt: str, scale: str) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernel and by the codec."""
    codec, (write, _) = codec_and_writers(kernel, fmt, scale)
    expected = codec.encode(values)
    store = torch.zeros_like(expected)
    write(values, store, np.zeros(1, np.int64))
    return store, expected


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit by bit, but for what kind of NaN."""
    nan = expected.float().isnan()
    assert torch.equal(found.float().isnan(), nan)
    kind = torch.uint8 if found.dtype is torch.float8_e4m3fn else torch.int16
    assert torch.equal(found.view(kind)[~nan], expected.view(kind)[~nan])


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_any_float32(kernel: DecodeKernel, fmt: str, scale: str) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 2 * 200_000)
    assert_same(*as_stored(kernel, of_bits(bits), fmt, scale))


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_every_sign_exponent_and_tie(kernel: DecodeKernel, fmt: str) -> None:
    """All upper halves of a float32, alone and next to what lies halfway between two results."""
    upper = np.arange(1 << 16, dtype=np.int64) << 16
    tails = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    assert_same(*as_stored(kernel, of_bits(np.concatenate([upper + tail for tail in tails])), fmt, "one"))


def test_every_tie_of_e4m3(kernel: DecodeKernel) -> None:
    """Halfway between two neighbours, and one bit to each side; the smallest and largest among them."""
    codes = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.cat([(codes[1:] + codes[:-1]) / 2, torch.tensor([448.0, 464.0, 480.0, 2.0**-10])])
    beside = torch.cat([ties, torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties * 0)])
    values = torch.stack([beside, -beside])[None, :, None]
    assert_same(*as_stored(kernel, values, "fp8", "one"))


@pytest.mark.parametrize("flush", [False, True])
def test_subnormals_whatever_the_thread_does_with_those_of_float32(kernel: DecodeKernel, flush: bool) -> None:
    values = torch.linspace(-(2.0**-5), 2.0**-5, 402).reshape(1, 2, 1, 201)
    expected = as_stored(kernel, values, "fp8", "by head")[1]
    torch.set_flush_denormal(flush)
    try:
        found = as_stored(kernel, values, "fp8", "by head")[0]
    finally:
        torch.set_flush_denormal(False)
    assert_same(found, expected)


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_caches_hold_what_they_hold_by_their_codecs(kernel: DecodeKernel, fmt: str) -> None:
    """A full cache, a ring that goes round, and both ragged."""
    codec, writers = codec_and_writers(kernel, fmt, "by head")
    drawn = torch.Generator().manual_seed(1)
    held: list[list[torch.Tensor]] = []
    for way in (None, writers):
        drawn.manual_seed(1)
        caches = [LayerCache(codec, codec, 12, window) for window in (None, 4)]
        ragged = [LayerCache(codec, codec, 12, 4) for _ in range(2)]
        for cache, tokens in zip((*caches, *ragged), (3, 3, 2, 5), strict=True):
            text = torch.randn(1, 2, tokens, 8, generator=drawn)
            cache.append(text, text)
        batches: list[LayerCache | RaggedCache] = [*caches, RaggedCache(ragged)]
        for batch in batches:
            for _ in range(6):
                key, value = (torch.randn(len(batch.lengths), 2, 1, 8, generator=drawn) for _ in range(2))
                batch.append_one(key, value, way)
        held.append([part[..., : batch.spans[0, 1], :] for batch in batches for part in batch.stored])
    for found, expected in zip(*held, strict=True):
        assert_same(found, expected)


def test_a_full_cache_refuses_one_more(kernel: DecodeKernel) -> None:
    codec, writers = codec_and_writers(kernel, "fp8", "one")
    cache = LayerCache(codec, codec, 2, None)
    text = torch.ones(1, 2, 2, 8)
    cache.append(text, text)
    with pytest.raises(ValueError, match="2 tokens"):
        cache.append_one(text[:, :, :1], text[:, :, :1], writers)


def test_other_dtypes_are_left_to_their_codecs(kernel: DecodeKernel) -> None:
    assert kernel.writer(torch.float16, SCALES["one"]) is None
    assert kernel.writer(torch.float32, SCALES["one"]) is None
