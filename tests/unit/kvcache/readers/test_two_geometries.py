"""MiMo-V2 and Step. Geometry from the model cards and from what a server's log says of padding."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import LayerKind
from tests.unit.kvcache.readers.configs import edited

FULL, SLIDING = LayerKind.FULL, LayerKind.SLIDING

MIMO_V2: Mapping[str, object] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "attention_chunk_size": 128,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, *[0, 1, 1, 1, 1, 1] * 7, 0],
    "max_position_embeddings": 262144,
}

STEP: Mapping[str, object] = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "sliding_window": 512,
    "num_nextn_predict_layers": 3,
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 2 + ["sliding_attention"] * 3,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 96,
        "num_attention_groups": 4,
        "head_dim": 64,
    },
    "max_position_embeddings": 262144,
}


# --- MiMo-V2 ----------------------------------------------------------------------------


def test_mimo_v2_flash() -> None:
    """39 sliding layers and 9 full ones: a server that pads to groups of nine says 6 padding layers, 15.38 % of 39."""
    spec = read_cache_spec(MIMO_V2)
    assert (len(spec.layers_of(SLIDING)), len(spec.layers_of(FULL))) == (39, 9)
    assert round(100 * (-39 % 9) / 39, 2) == 15.38
    full, sliding = spec.layers[0], spec.layers[1]
    assert (full.num_kv_heads, full.head_dim, full.head_dim_v, full.window_tokens) == (4, 192, 128, None)
    assert (sliding.num_kv_heads, sliding.head_dim, sliding.head_dim_v, sliding.window_tokens) == (8, 192, 128, 128)
    assert (full.elements_per_position, sliding.elements_per_position) == (4 * 320, 8 * 320)


def test_mimo_v2_drafts_with_one_sliding_layer() -> None:
    spec = read_cache_spec(MIMO_V2)
    (draft,) = spec.draft_layers
    assert (draft.layer_idx, draft.kind, draft.num_kv_heads, draft.window_tokens) == (48, SLIDING, 8, 128)
    assert any("draft layers = 1" in line for line in spec.assumed)


def test_v_is_as_wide_as_k_unless_it_says_so() -> None:
    spec = read_cache_spec(edited(MIMO_V2, v_head_dim=None, swa_v_head_dim=...))
    assert {(layer.head_dim, layer.head_dim_v) for layer in spec.layers} == {(192, 192)}
    assert {"v_head_dim = 192 (as wide as K)", "swa_v_head_dim = 192 (as wide as K)"} <= set(spec.assumed)


def test_the_widths_of_mimo_v2_s_full_layers_are_documented() -> None:
    spec = read_cache_spec(edited(MIMO_V2, head_dim=..., v_head_dim=...))
    assert spec.layers == read_cache_spec(MIMO_V2).layers
    for line in ("head_dim = 192", "v_head_dim = 128"):
        assert f"{line} (the default of MiMoV2FlashForCausalLM)" in spec.assumed


def test_the_window_has_two_names_that_must_agree() -> None:
    assert read_cache_spec(edited(MIMO_V2, sliding_window=...)) == read_cache_spec(MIMO_V2)
    with pytest.raises(ModelError, match="sliding_window 256 and sliding_window_size 128"):
        read_cache_spec(edited(MIMO_V2, sliding_window=256))


def test_mimo_v2_must_say_which_layers_slide() -> None:
    with pytest.raises(ModelError, match="does not state hybrid_layer_pattern"):
        read_cache_spec(edited(MIMO_V2, hybrid_layer_pattern=None))
    with pytest.raises(ModelError, match="hybrid_layer_pattern"):
        read_cache_spec(edited(MIMO_V2, hybrid_layer_pattern=[2] * 48))
    with pytest.raises(UnsupportedModel, match="contradicts hybrid_layer_pattern"):
        read_cache_spec(edited(MIMO_V2, layer_types=["full_attention"] * 48))


@pytest.mark.parametrize("key", ["swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim"])
def test_the_heads_of_sliding_layers_are_named_when_missing(key: str) -> None:
    with pytest.raises(ModelError, match=f"does not state {key}"):
        read_cache_spec(edited(MIMO_V2, **{key: ...}))


# --- Step -------------------------------------------------------------------------------


def test_step_gives_sliding_layers_heads_of_their_own() -> None:
    spec = read_cache_spec(STEP)
    assert spec.layers_of(FULL) == (0, 4)
    full, sliding = spec.layers[0], spec.layers[1]
    assert (full.num_attention_heads, full.num_kv_heads, full.head_dim) == (64, 8, 128)
    assert (sliding.num_attention_heads, sliding.num_kv_heads, sliding.head_dim) == (96, 4, 64)
    assert sliding.window_tokens == 512
    assert spec.assumed == ()


def test_step_layer_types_go_on_to_the_drafter() -> None:
    spec = read_cache_spec(STEP)
    assert [(layer.layer_idx, layer.kind) for layer in spec.draft_layers] == [(8, SLIDING), (9, SLIDING), (10, SLIDING)]


def test_a_draft_layer_that_is_not_listed_is_taken_to_be_full() -> None:
    spec = read_cache_spec(edited(STEP, layer_types=["full_attention", *["sliding_attention"] * 3] * 2))
    assert [layer.kind for layer in spec.draft_layers] == [FULL] * 3
    assert any("draft layers = 3 of full attention" in line for line in spec.assumed)
    assert read_cache_spec(edited(STEP, num_nextn_predict_layers=0, layer_types=["full_attention"] * 8)).assumed == ()


def test_step_without_other_heads_has_one_geometry() -> None:
    spec = read_cache_spec(edited(STEP, attention_other_setting=None))
    assert {(layer.num_attention_heads, layer.num_kv_heads, layer.head_dim) for layer in spec.layers} == {(64, 8, 128)}
    other = {"attention_type": "full_attention", "num_attention_heads": 96, "num_attention_groups": 8}
    with pytest.raises(UnsupportedModel, match="attention_other_setting"):
        read_cache_spec(edited(STEP, attention_other_setting=other))


def test_step_must_state_its_kinds_and_its_window() -> None:
    with pytest.raises(UnsupportedModel, match="layer_types is not stated"):
        read_cache_spec(edited(STEP, layer_types=...))
    with pytest.raises(ModelError, match="does not state sliding_window"):
        read_cache_spec(edited(STEP, sliding_window=None))
    with pytest.raises(ModelError, match=r"layer_types in config\.json has 7 entries for 8 layers"):
        read_cache_spec(edited(STEP, layer_types=["full_attention"] * 7))


def test_step_inside_a_multimodal_model() -> None:
    nested = {"architectures": ["Step3p7ForConditionalGeneration"], "model_type": "step3p7", "text_config": dict(STEP)}
    assert read_cache_spec(nested).layers == read_cache_spec(STEP).layers
