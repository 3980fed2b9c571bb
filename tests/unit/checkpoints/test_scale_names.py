from __future__ import annotations

import pytest

from kvtriage.checkpoints.scale_names import Form, ScaleName, read_scale_name


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("model.layers.3.self_attn.k_scale", ScaleName("model.", 3, "k", Form.COMPRESSED_TENSORS)),
        (
            "model.language_model.layers.12.self_attn.q_scale",
            ScaleName("model.language_model.", 12, "q", Form.COMPRESSED_TENSORS),
        ),
        ("model.layers.0.self_attn.v_proj.v_scale", ScaleName("model.", 0, "v", Form.PROJECTIONS)),
        ("backbone.layers.7.mixer.k_proj.k_scale", ScaleName("backbone.", 7, "k", Form.PROJECTIONS)),
        ("model.layers.0.self_attn.qkv_proj.k_scale", ScaleName("model.", 0, "k", Form.FUSED_PROJECTION)),
        ("model.layers.0.self_attn.q_proj.output_scale", ScaleName("model.", 0, "q", Form.OUTPUTS)),
        ("model.layers.0.self_attn.v_cache.scale", ScaleName("model.", 0, "v", Form.CACHES)),
        ("model.layers.0.self_attn.attn.v_scale", ScaleName("model.", 0, "v", Form.ENGINE)),
        ("model.layers.0.self_attn.kv_scale", ScaleName("model.", 0, "kv", Form.FUSED_SCALE)),
    ],
)
def test_every_form(name: str, found: ScaleName) -> None:
    assert read_scale_name(name) == found


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_proj.weight_scale",
        "model.layers.0.self_attn.k_proj.input_scale",
        "model.layers.0.mlp.experts.0.w2.k_scale",
        "vision_tower.encoder.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.k_scale.extra",
        "k_scale",
        "",
        "layers.1." * 100_000 + "self_attn.k_scale",
    ],
)
def test_other_tensors_are_no_scales(name: str) -> None:
    assert read_scale_name(name) is None
