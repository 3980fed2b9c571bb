"""Products with weights, by the faster of torch's two libraries for float32.

torch hands float32 products to MKL, whose fastest kernels are for the CPUs of its own maker. oneDNN, which
torch brings along for other dtypes, compiles its kernels for the CPU at hand and is twice as fast on AMD's.
torch's compiler calls it by the same operator. A product of few rows only reads its weights once: there MKL's
start is quicker, unless the weights are larger than a processor's caches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

__all__ = ["ONEDNN", "TORCH", "OneDnnLinear", "has_bf16_products", "onednn_linear", "product_library", "use_onednn"]

ONEDNN = "oneDNN"
TORCH = "torch"
_FEW_ROWS = 4
_CACHED_ELEMENTS = 1 << 22
"""16 MiB of float32."""


class OneDnnLinear(nn.Linear):
    """values [..., in_features] → [..., out_features], both dense float32; shares the weights it is made from.

    Weights in BF16 are multiplied in BF16: values are rounded to it before, and the product after.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, values: Tensor) -> Tensor:
        if self.weight.dtype is torch.bfloat16:
            product = onednn_linear(values.to(torch.bfloat16), self.weight).to(torch.float32)
            return product if self.bias is None else product + self.bias
        rows = values.numel() // self.in_features
        if rows == 0 or (rows < _FEW_ROWS and self.weight.numel() < _CACHED_ELEMENTS):
            return linear(values, self.weight, self.bias)
        return onednn_linear(values, self.weight, self.bias)


def onednn_linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """values [..., i] times the transpose of weight [o, i], plus bias [o]: [..., o]. Dense, of one dtype, on a CPU.

    A weight, or its transpose, with gaps between its rows takes oneDNN's plain loops: a thousand times slower.
    """
    product: Tensor = torch.ops.mkldnn._linear_pointwise(values, weight, bias, "none", [], "")
    return product


def has_bf16_products() -> bool:
    """Whether this CPU has instructions for products in BF16. Without them oneDNN widens what it multiplies."""
    able = torch.cpu.get_capabilities()
    return any(able.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def product_library(device: torch.device) -> str:
    """Which of the two a model on `device` is to use: oneDNN on CPUs where this build of torch has it."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    built = available and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return ONEDNN if device.type == "cpu" and built else TORCH


def use_onednn(model: nn.Module) -> None:
    """Replace the linear layers of a float32 model, in place. Subclasses of them are left as they are."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, OneDnnLinear(child))
