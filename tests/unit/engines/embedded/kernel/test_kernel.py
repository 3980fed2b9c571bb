"""The decode kernel against attention in float64, written from the definition."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator

import numba
import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvtriage.engines.embedded.attention import AttentionCall
from kvtriage.engines.embedded.kernel.kernel import DecodeKernel, NoKernel, open_decode
from kvtriage.engines.embedded.kernel.machine import Machine, Widening

BLOCK = 128
"""Tokens of the largest block."""

E4M3, BF16, F16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
TOLERANCE = 3e-6
"""Of the largest value: what summing thousands of float32 products in another order moves."""


@pytest.fixture(scope="module", params=[1, 3])
def kernel(request: pytest.FixtureRequest) -> Iterator[DecodeKernel]:
    with open_decode(request.param, "storage", torch.device("cpu")) as decode:
        assert isinstance(decode, DecodeKernel)
        yield decode


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def definition(
    call: AttentionCall, key: torch.Tensor, value: torch.Tensor, spans: npt.NDArray[np.int64],
    k_scale: npt.NDArray[np.float32], v_scale: npt.NDArray[np.float32],
) -> npt.NDArray[np.float64]:  # fmt: skip
    """One query head at a time, over its span, in float64."""
    q = call.query[:, :, 0].double().numpy()
    k, v = (stored.to(torch.float32).double().numpy() for stored in (key, value))
    batch, heads, _ = q.shape
    group = heads // k.shape[1]
    output = np.zeros((batch, heads, 1, v.shape[3]))
    for b in range(batch):
        seen = slice(*spans[b])
        for h in range(heads):
            head = h // group
            scores = k[b, head, seen] @ q[b, h] * float(k_scale[head]) * call.scaling
            if call.softcap is not None:
                scores = call.softcap * np.tanh(scores / call.softcap)
            sink = -np.inf if call.sinks is None else float(call.sinks[h])
            top = max(scores.max(), sink)
            weights = np.exp(scores - top)
            total = weights.sum() + np.exp(sink - top)
            output[b, h, 0] = weights @ v[b, head, seen] * float(v_scale[head]) / total
    return output


def check(
    kernel: DecodeKernel, key: torch.Tensor, value: torch.Tensor, spans: list[tuple[int, int]], group: int,
    *, softcap: float | None = None, sinks: torch.Tensor | None = None, query: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    batch, kv_heads, _, dim = key.shape
    q = drawn(batch, kv_heads * group, 1, dim, seed=5) if query is None else query
    call = AttentionCall(0, q, q, q, dim**-0.5, softcap, sinks, None)
    k_scale = np.linspace(0.5, 1.5, kv_heads, dtype=np.float32)
    v_scale = np.linspace(2.0, 0.25, kv_heads, dtype=np.float32)
    where = np.array(spans, np.int64)
    found = kernel.attend(call, key, value, where, k_scale, v_scale)
    expected = definition(call, key, value, where, k_scale, v_scale)
    np.testing.assert_allclose(
        found.numpy(), expected, rtol=0, atol=TOLERANCE * max(1.0, float(np.abs(expected).max()))
    )
    return found


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [*itertools.product((64, 80, 96, 128, 256), (E4M3, BF16)), (8, E4M3), (20, F32), (64, F16)],
    ids=str,
)
def test_every_width_and_format(kernel: DecodeKernel, dim: int, dtype: torch.dtype) -> None:
    key, value = (drawn(1, 2, 150, dim, seed=seed).to(dtype) for seed in (1, 2))
    check(kernel, key, value, [(0, 150)], 3)


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8, 12, 11])
def test_every_group(kernel: DecodeKernel, group: int) -> None:
    key, value = (drawn(2, 2, 70, 64, seed=seed).to(E4M3) for seed in (1, 2))
    check(kernel, key, value, [(0, 70), (0, 33)], group)


@pytest.mark.parametrize(
    "length", [1, 2, 3, 5, 95, 96, 97, BLOCK - 1, BLOCK, BLOCK + 1, 1023, 1024, 1025, 2 * 1024 + BLOCK + 1]
)
def test_every_length(kernel: DecodeKernel, length: int) -> None:
    key, value = (drawn(1, 1, length, 64, seed=seed).to(E4M3) for seed in (1, 2))
    check(kernel, key, value, [(0, length)], 4)


@pytest.mark.parametrize(("dim", "dtype"), [(128, E4M3), (256, E4M3), (96, BF16), (256, BF16)], ids=str)
@pytest.mark.parametrize("length", [15, 31, 32, 33, 47, 48, 49, 64, 65, 128, 1024 + 32, 1024 + 49])
def test_lengths_of_longer_rows(kernel: DecodeKernel, length: int, dim: int, dtype: torch.dtype) -> None:
    """Of 128 to 512 bytes, whose blocks are of 48 or 32 tokens, or are added right after they are scored."""
    key, value = (drawn(1, 1, length + 3, dim, seed=seed).to(dtype) for seed in (1, 2))
    check(kernel, key, value, [(2, 2 + length)], 3)


@pytest.mark.parametrize(("dim", "dim_v", "dtype"), [(96, 64, E4M3), (64, 128, E4M3), (192, 128, BF16)], ids=str)
def test_values_of_another_width(kernel: DecodeKernel, dim: int, dim_v: int, dtype: torch.dtype) -> None:
    key, value = (drawn(2, 2, 1100, width, seed=width).to(dtype) for width in (dim, dim_v))
    check(kernel, key, value, [(0, 1100), (3, 250)], 2)


@pytest.mark.parametrize("window", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 1024, 1500])
@pytest.mark.parametrize("last", [1500, 1536, 1601])
def test_windows_at_the_edges_of_blocks(kernel: DecodeKernel, window: int, last: int) -> None:
    key, value = (drawn(1, 1, 1601, 64, seed=seed).to(E4M3) for seed in (1, 2))
    check(kernel, key, value, [(last - window, last)], 2)


def test_ragged_lengths_in_one_batch(kernel: DecodeKernel) -> None:
    key, value = (drawn(5, 2, 2100, 64, seed=seed).to(E4M3) for seed in (1, 2))
    check(kernel, key, value, [(0, 1), (0, 2100), (5, 64), (1000, 1025), (0, 1024)], 4)


@pytest.mark.parametrize("softcap", [None, 5.0, 50.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_softcap_and_sinks(kernel: DecodeKernel, softcap: float | None, with_sinks: bool) -> None:
    key, value = (drawn(1, 2, 1100, 64, seed=seed).to(E4M3) for seed in (1, 2))
    sinks = 3 * drawn(8, seed=6) if with_sinks else None
    check(kernel, key, value, [(0, 1100)], 4, softcap=softcap, sinks=sinks, query=4 * drawn(1, 8, 1, 64, seed=5))


def every_byte() -> torch.Tensor:
    """Every E4M3 number, subnormals, ±448 and both zeros included: [254]."""
    bytes_ = torch.arange(256, dtype=torch.uint8)
    return bytes_[(bytes_ & 0x7F) != 0x7F].view(E4M3)


@pytest.mark.parametrize("lane", [0, 1, 15, 16, 63])
def test_each_byte_is_read_exactly(kernel: DecodeKernel, lane: int) -> None:
    """One token seen, so that the output is its V: bit for bit, wherever in the row it stands."""
    numbers = every_byte()
    value = torch.zeros(numbers.numel(), 1, 1, 64).to(E4M3)
    value.view(torch.uint8)[:, 0, 0, lane] = numbers.view(torch.uint8)
    q = drawn(numbers.numel(), 2, 1, 64, seed=5)
    call = AttentionCall(0, q, q, q, 0.125, None, None, None)
    one = np.ones(1, np.float32)
    found = kernel.attend(call, value, value, np.array([[0, 1]] * numbers.numel(), np.int64), one, one)
    torch.testing.assert_close(found[:, 0, 0, lane], numbers.to(F32), rtol=0, atol=0)


@pytest.fixture
def flushing() -> Iterator[None]:
    """This thread, and those that it starts, take subnormal float32 for zero."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("flushing")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_subnormals_are_read_where_the_program_flushes_them(threads: int, dim: int) -> None:
    """Keys that are nothing but subnormal decide the weights, and values likewise are the output."""
    subnormal = torch.arange(256, dtype=torch.uint8)[[*range(1, 8), *range(0x81, 0x88)]]
    drawn_at = torch.randint(0, subnormal.numel(), (2, 1, 2, 3000, dim), generator=torch.Generator().manual_seed(7))
    key, value = subnormal[drawn_at].view(E4M3)
    with open_decode(threads, "storage", torch.device("cpu")) as decode:
        assert isinstance(decode, DecodeKernel)
        found = check(decode, key, value, [(0, 3000)], 4, query=300 * drawn(1, 8, 1, dim, seed=5))
    assert found.abs().max() > 2.0**-10
    smallest = torch.full((), 2.0**-100) * torch.tensor(2.0**-40)
    assert smallest == 0.0, "the kernel leaves the thread as it was"


def test_adversarial_bytes(kernel: DecodeKernel) -> None:
    """Keys and values drawn from the subnormals, ±448 and signed zeros; queries that make one score tower."""
    numbers = every_byte()
    extreme = torch.cat([numbers[:8], numbers[-8:], numbers[126:134]]).view(torch.uint8)
    generator = torch.Generator().manual_seed(7)
    key, value = (
        extreme[torch.randint(0, extreme.numel(), (1, 2, 700, 64), generator=generator)].view(E4M3) for _ in range(2)
    )
    for size in (1e-6, 1e-3, 1.0):
        check(kernel, key, value, [(0, 700)], 4, query=size * drawn(1, 8, 1, 64, seed=5))


def test_scores_far_apart(kernel: DecodeKernel) -> None:
    """A late key outweighs all before it by more than float32 can hold, and all after it."""
    key = torch.zeros(1, 1, 3000, 64)
    key[0, 0, 1500] = 400.0
    value = drawn(1, 1, 3000, 64, seed=2)
    check(kernel, key.to(E4M3), value.to(E4M3), [(0, 3000)], 1, query=torch.ones(1, 1, 1, 64))
    check(kernel, key.to(E4M3), value.to(E4M3), [(0, 3000)], 1, query=-torch.ones(1, 1, 1, 64))


@pytest.mark.parametrize("dtype", [E4M3, BF16], ids=str)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    key, value = (drawn(3, 4, 3000, 64, seed=seed).to(dtype) for seed in (1, 2))
    found = []
    for threads in (1, 2, 5):
        with open_decode(threads, "storage", torch.device("cpu")) as decode:
            assert isinstance(decode, DecodeKernel)
            found.append(check(decode, key, value, [(0, 3000), (7, 2500), (0, 1)], 3))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_threads_that_come_late_are_not_waited_for() -> None:
    """The kernel's own threads have something else to do until its answer is there."""
    key, value = (drawn(1, 4, 3000, 64, seed=seed).to(BF16) for seed in (1, 2))
    answered = threading.Event()
    with open_decode(3, "storage", torch.device("cpu")) as decode:
        assert isinstance(decode, DecodeKernel)
        assert decode._pool is not None
        waited = [decode._pool.submit(answered.wait, 60) for _ in range(2)]
        check(decode, key, value, [(0, 3000)], 3)
        answered.set()
        assert all(one.result() for one in waited)


def test_nan_in_the_query_reaches_the_output(kernel: DecodeKernel) -> None:
    key = drawn(1, 1, 100, 64, seed=1).to(E4M3)
    q = torch.full((1, 1, 1, 64), torch.nan)
    call = AttentionCall(0, q, q, q, 0.125, None, None, None)
    one = np.ones(1, np.float32)
    assert torch.isnan(kernel.attend(call, key, key, np.array([[0, 100]]), one, one)).all()


def test_where_there_is_no_kernel_the_reason_is_given() -> None:
    for numerics, device, word in (("attention", "cpu", "probabilities"), ("storage", "cuda", "CPU")):
        with open_decode(2, numerics, torch.device(device)) as decode:
            assert isinstance(decode, NoKernel)
            assert word in decode.name
            assert decode.name.startswith("torch")


def test_without_numba_torch_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvtriage.engines.embedded.kernel.decode", None)
    monkeypatch.delattr("kvtriage.engines.embedded.kernel.decode", raising=False)
    with open_decode(1, "storage", torch.device("cpu")) as decode:
        assert isinstance(decode, NoKernel)
        assert "numba does not load" in decode.name


def test_where_numba_compiles_nothing_torch_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with open_decode(1, "storage", torch.device("cpu")) as decode:
        assert decode.name == "torch (NUMBA_DISABLE_JIT is set)"


@pytest.mark.parametrize(
    ("cpu", "features", "name", "lanes", "lot", "key_lot"),
    [
        ("znver5", "+avx,+avx2,+avx512f", "avx512", 16, 64, 16),
        ("znver3", "+avx2,-avx512f", "avx2", 8, 32, 16),
        ("sapphirerapids", "+avx2,+avx512f", "avx512", 16, 0, 0),
        ("generic", "-avx2", "128-bit", 4, 0, 0),
    ],
)
def test_the_machine_is_told_by_its_features(
    cpu: str, features: str, name: str, lanes: int, lot: int, key_lot: int
) -> None:
    machine = Machine.of(cpu, features)
    assert (machine.name, machine.lanes) == (name, lanes)
    assert machine.widening("float8_e4m3fn", 128).lot == lot
    assert machine.key_widening("float8_e4m3fn", 128).lot == lot
    assert machine.key_widening("float8_e4m3fn", 64).lot == key_lot
    assert machine.key_widening("bfloat16", 64) == Widening(0, 0)
    assert machine.widening("float8_e4m3fn", 80) == Widening(8, 0)
    assert machine.widening("bfloat16", 128) == Widening(0, 0)


@pytest.mark.parametrize(("row_bytes", "tokens"), [(1, 128), (64, 96), (96, 64), (128, 48), (256, 32), (1024, 16)])
def test_a_block_is_whole_vectors_of_tokens(row_bytes: int, tokens: int) -> None:
    assert Machine.of("znver5", "+avx2,+avx512f").block(row_bytes) == tokens
