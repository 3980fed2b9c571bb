"""Scales against llm-compressor's, on the same model and the same token ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvtriage.engines.embedded.engine import open_engine
from kvtriage.fp8.scales import fit_scales
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.readers import read_cache_spec
from tests.unit.engines.demo_folder import demo_folder

REFERENCE = Path(__file__).parents[3] / "shared" / "reference"
VARIANTS = {
    Scaling.PER_HEAD: "attn_head_static_minmax_fp32_basic",
    Scaling.PER_TENSOR: "tensor_static_minmax_fp32_basic",
}
"""The observer that keeps a running maximum; the default one is an average that forgets nothing but weighs the first
sample with 86 %."""


def silent(*_: object) -> None:
    """Nobody is watching."""


def test_smollm2_scales_are_static_minmax() -> None:
    if not REFERENCE.is_dir():
        pytest.skip("llm-compressor's scales lie beside this checkout only where the project is developed")
    folder = demo_folder("demo:smollm2-135m")
    prompts = json.loads((REFERENCE / "calib_ids_smollm2.json").read_text())["input_ids"]
    variants = json.loads((REFERENCE / "llmcompressor_scales_smollm2.json").read_text())["variants"]
    spec = read_cache_spec(json.loads((folder / "config.json").read_bytes()))
    with open_engine(folder, spec, numerics="storage", device="cpu") as engine:
        stats = engine.observe(prompts, (0,), silent)
    for scaling, variant in VARIANTS.items():
        for layer in fit_scales(stats, spec, scaling).layers:
            for tensor, ours in (("k", layer.k), ("v", layer.v)):
                theirs = variants[variant][f"model.layers.{layer.layer_idx}.self_attn.{tensor}_scale"]["values"]
                np.testing.assert_allclose(ours, theirs, rtol=2e-6, err_msg=f"{tensor} of layer {layer.layer_idx}")
