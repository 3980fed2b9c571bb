"""Real E4M3 bytes, bit for bit, and the scale-free bound against its numpy reference."""

from __future__ import annotations

import numpy as np
import torch

from kvtriage.engines.embedded.codec import E4M3Codec, NativeCodec, PartialCodec, round_mantissa
from kvtriage.engines.embedded.selfcheck import count_e4m3_differences
from kvtriage.fp8 import e4m3


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50


def test_every_finite_bfloat16_converts_as_the_reference_does() -> None:
    differing, tried = count_e4m3_differences()
    assert differing == 0
    assert tried > 60_000


def test_saturation_subnormals_and_signed_zero_survive_storage() -> None:
    given = torch.tensor([1e6, -1e6, 448.0, 464.0, 2.0**-9, 2.0**-10, -(2.0**-10), 0.0, -0.0, 3 * 2.0**-10])
    stored = E4M3Codec(torch.ones(1)).encode(given.view(1, 1, -1, 1))
    assert stored.dtype is torch.float8_e4m3fn
    assert stored.view(torch.uint8).flatten().tolist() == e4m3.encode(given.numpy()).tolist()
    assert stored.view(torch.uint8).flatten().tolist()[-3:-1] == [0x00, 0x80]


def test_every_byte_comes_back_as_what_it_stands_for() -> None:
    """Signed zeros and both kinds of NaN too, from a row that is not in one piece as well."""
    stored = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).view(torch.float8_e4m3fn)
    for part in (stored, stored[..., :9]):
        found, expected = E4M3Codec(torch.ones(1)).decode(part), part.to(torch.float32)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.signbit(), expected.signbit())


def test_each_head_has_its_own_scale() -> None:
    scale = torch.tensor([0.5, 4.0])
    codec = E4M3Codec(scale)
    x = values(1, 2, 7, 3)
    expected = (
        e4m3.decode(e4m3.encode(x.numpy() / scale.numpy()[None, :, None, None])) * scale.numpy()[None, :, None, None]
    )
    np.testing.assert_array_equal(codec.decode(codec.encode(x)).numpy(), expected.astype(np.float32))
    assert codec.scales == (0.5, 4.0)


def test_native_is_the_models_dtype() -> None:
    codec = NativeCodec(torch.bfloat16)
    x = values(1, 1, 5, 3)
    assert codec.encode(x).dtype is torch.bfloat16
    torch.testing.assert_close(codec.decode(codec.encode(x)), x.bfloat16().float(), rtol=0, atol=0)


def test_the_bound_is_the_references() -> None:
    x = values(1, 2, 64, 8) * torch.tensor([1e-12, 1e9]).view(1, 2, 1, 1)
    for position in e4m3.SUB_OCTAVES:
        # float32 division moves a value across a tie now and then; nothing else may differ.
        reference = e4m3.round_mantissa((x / position).numpy()) * np.float32(position)
        np.testing.assert_allclose(round_mantissa(x, torch.tensor(position)).numpy(), reference, rtol=1e-6)


def test_a_partial_codec_quantises_its_heads_alone() -> None:
    x = values(1, 2, 9, 4)
    fp8, native = E4M3Codec(torch.ones(1)), NativeCodec(torch.bfloat16)
    codec = PartialCodec(native, fp8, torch.tensor([False, True]))
    seen = codec.decode(codec.encode(x))
    torch.testing.assert_close(seen[:, 0], x[:, 0].bfloat16().float(), rtol=0, atol=0)
    torch.testing.assert_close(seen[:, 1], fp8.decode(fp8.encode(x))[:, 1], rtol=0, atol=0)
