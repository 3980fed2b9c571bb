"""Products by oneDNN: the same numbers as torch's own, for any number of rows, on the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvtriage.engines.embedded.linear import ONEDNN, TORCH, OneDnnLinear, has_bf16_products, product_library, use_onednn

onednn = pytest.mark.skipif(product_library(torch.device("cpu")) != ONEDNN, reason="this build of torch has no oneDNN")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 0), (1, 1), (1, 3), (1, 4), (2, 33)])
def test_a_product_is_the_product(shape: tuple[int, int], bias: bool) -> None:
    linear = nn.Linear(48, 80, bias=bias).requires_grad_(False)
    values = drawn(*shape, 48)
    want = values.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    torch.testing.assert_close(OneDnnLinear(linear)(values).double(), want, rtol=0, atol=2e-6)


@onednn
@pytest.mark.parametrize("bias", [False, True])
def test_weights_in_bf16_are_multiplied_in_bf16(bias: bool) -> None:
    linear = nn.Linear(48, 80, bias=bias).requires_grad_(False)
    product = OneDnnLinear(linear)
    product.weight = nn.Parameter(linear.weight.to(torch.bfloat16), requires_grad=False)
    values = drawn(1, 7, 48)
    want = (values.to(torch.bfloat16).double() @ product.weight.double().T).to(torch.bfloat16).to(torch.float32)
    found = product(values)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, want + linear.bias if bias else want, rtol=2**-7, atol=1e-4)


@onednn
def test_a_row_has_the_same_bits_in_any_company() -> None:
    product = OneDnnLinear(nn.Linear(64, 96).requires_grad_(False))
    values = drawn(1, 40, 64)
    torch.testing.assert_close(product(values)[:, 16:32], product(values[:, 16:32]), rtol=0, atol=0)


@onednn
def test_a_model_keeps_its_weights_and_its_ties() -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(10, 4), "inner": nn.Sequential(nn.Linear(4, 4)), "head": nn.Linear(4, 10)}
    )
    head = model["head"]
    head.weight = model["embed"].weight
    names = list(model.state_dict())
    use_onednn(model)
    assert isinstance(model["head"], OneDnnLinear)
    assert isinstance(model.get_submodule("inner.0"), OneDnnLinear)
    assert model["head"].weight is model["embed"].weight
    assert list(model.state_dict()) == names


def test_an_accelerator_multiplies_by_itself() -> None:
    assert product_library(torch.device("meta")) == TORCH


def test_a_build_without_onednn_multiplies_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert product_library(torch.device("cpu")) == TORCH


@pytest.mark.parametrize(("able", "has"), [({"avx512_bf16": True}, True), ({"amx_bf16": False, "avx2": True}, False)])
def test_bf16_products_are_asked_of_the_cpu(able: dict[str, bool], has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    assert has_bf16_products() is has
