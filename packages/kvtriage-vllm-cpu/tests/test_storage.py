"""Bytes in vLLM's paged cache."""

from __future__ import annotations

import pytest
import torch
from kvtriage_vllm_cpu.storage import open_pages, read, write
from torch import Tensor

HEADS, BLOCK, DIM = 2, 4, 8
ONE = torch.ones(1)


def values(tokens: int) -> Tensor:
    return torch.randn(tokens, HEADS, DIM, generator=torch.Generator().manual_seed(0)) * 100


def cache(dtype: torch.dtype) -> Tensor:
    return torch.zeros(6, HEADS, BLOCK, 2 * DIM, dtype=dtype)


def slots_of(blocks: list[int], positions: range) -> Tensor:
    return torch.tensor([blocks[at // BLOCK] * BLOCK + at % BLOCK for at in positions])


def e4m3(x: Tensor, scale: Tensor) -> Tensor:
    stored = (x / scale.view(1, -1, 1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return stored.to(torch.float32) * scale.view(1, -1, 1)


@pytest.mark.parametrize("scale", [ONE, torch.tensor([0.3]), torch.tensor([0.05, 7.0])], ids=["unit", "tensor", "head"])
def test_what_is_read_is_what_e4m3_keeps(scale: Tensor) -> None:
    x, blocks = values(10), [4, 1, 3]
    pages = open_pages(cache(torch.uint8))
    write(pages.key, x, slots_of(blocks, range(10)), scale)
    found = read(pages.key, torch.tensor(blocks, dtype=torch.int32), 0, 10, scale)
    assert torch.equal(found, e4m3(x, scale).transpose(0, 1))
    assert not pages.value.any()


def test_values_saturate_and_round_to_nearest_even() -> None:
    x = torch.tensor([1e9, -1e9, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, 17.1, -0.0]).view(1, 1, 8).repeat(1, HEADS, 1)
    pages = open_pages(cache(torch.uint8))
    write(pages.value, x, torch.tensor([5]), ONE)
    found = read(pages.value, torch.tensor([1]), 1, 2, ONE)
    assert found[0, 0].tolist() == [448.0, -448.0, 1.0, 1.25, 0.0, 2.0**-8, 18.0, -0.0]


def test_every_byte_is_read_as_torch_reads_it() -> None:
    stored = torch.arange(256, dtype=torch.uint8).view(4, 1, 4, 16)
    found = read(stored, torch.arange(4), 0, 16, torch.tensor([0.5])).view(-1)
    expected = stored.view(torch.float8_e4m3fn).to(torch.float32).view(-1) * 0.5
    assert torch.equal(found.isnan(), expected.isnan())
    assert int(found.isnan().sum()) == 2
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_any_part_of_a_sequence_can_be_read() -> None:
    x, blocks = values(11), torch.tensor([5, 0, 2])
    pages = open_pages(cache(torch.bfloat16))
    write(pages.key, x, slots_of(blocks.tolist(), range(11)), ONE)
    for first, last in ((0, 11), (3, 11), (4, 9), (9, 10)):
        assert torch.equal(read(pages.key, blocks, first, last, ONE), x[first:last].bfloat16().float().transpose(0, 1))


def test_padding_is_passed_over() -> None:
    pages = open_pages(cache(torch.uint8))
    write(pages.key, values(3), torch.tensor([-1, 7, -1]), ONE)
    assert pages.key[1, :, 3].any()
    assert int(pages.key.any(dim=3).sum()) == HEADS


def test_k_and_v_lie_where_vllms_own_kernels_look_for_them() -> None:
    raw = cache(torch.bfloat16)
    pages = open_pages(raw)
    write(pages.key, torch.ones(1, HEADS, DIM), torch.tensor([0]), ONE)
    write(pages.value, 2 * torch.ones(1, HEADS, DIM), torch.tensor([0]), ONE)
    key, value = raw.view(6, HEADS, 2 * BLOCK, DIM).chunk(2, dim=2)
    assert (key[0, :, 0] == 1).all()
    assert (value[0, :, 0] == 2).all()


def test_a_view_into_a_larger_page_is_opened_in_place() -> None:
    raw = torch.zeros(3, HEADS * BLOCK * 2 * DIM + 40, dtype=torch.uint8)
    padded = raw[:, : HEADS * BLOCK * 2 * DIM].view(3, HEADS, BLOCK, 2 * DIM)
    write(open_pages(padded).key, values(1), torch.tensor([4]), ONE)
    assert raw[1].any()
