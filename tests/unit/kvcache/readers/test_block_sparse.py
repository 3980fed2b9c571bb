"""MiniMax M3: 60 layers, the first three dense; 4 KV heads of 128; a BF16 index key of 128 in each sparse layer."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import IndexKeys, LayerKind
from tests.unit.kvcache.readers.configs import edited

SPARSE: Mapping[str, object] = {
    "use_sparse_attention": True,
    "sparse_index_dim": 128,
    "sparse_attention_freq": [0] * 3 + [1] * 57,
}

M3: Mapping[str, object] = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "model_type": "minimax_m3_text",
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 6144,
    "sparse_attention_config": SPARSE,
    "num_mtp_modules": 1,
    "max_position_embeddings": 1048576,
}


def test_every_layer_keeps_everything_and_sparse_ones_their_index() -> None:
    spec = read_cache_spec(M3)
    assert spec.kinds == (LayerKind.FULL,)
    assert [layer.layer_idx for layer in spec.layers if not layer.beside] == [0, 1, 2]
    assert {layer.beside for layer in spec.layers[3:]} == {(IndexKeys(256),)}


def test_fp8_does_not_halve_the_index() -> None:
    """A position: 60 layers × 4 heads × (128 + 128) elements, and 57 × 128 × 2 bytes of index keys."""
    worksheet = price_policy(read_cache_spec(M3), CachePolicy.fp8(60, Scaling.UNIT), (1,))
    assert worksheet.bf16_bytes == 2 * 61440 + 14592
    assert worksheet.fp8_bytes == 61440 + 14592


def test_draft_layers_are_sparse() -> None:
    spec = read_cache_spec(edited(M3, num_mtp_modules=2))
    assert [(layer.layer_idx, layer.beside) for layer in spec.draft_layers] == [
        (i, (IndexKeys(256),)) for i in (60, 61)
    ]
    assert read_cache_spec(edited(M3, num_mtp_modules=...)).draft_layers == ()


def test_two_counts_of_draft_layers() -> None:
    spec = read_cache_spec(edited(M3, num_mtp_modules=7, num_nextn_predict_layers=1))
    assert len(spec.draft_layers) == 7
    assert any("draft layers = 7" in line for line in spec.assumed)
    assert read_cache_spec(edited(M3, num_nextn_predict_layers=1)).assumed == ()


def test_an_outer_model_type_serves_a_nested_model_that_has_none() -> None:
    text = edited(M3, model_type=...)
    nested = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "text_config": text,
    }
    spec = read_cache_spec(nested)
    assert spec.model_type == "minimax_m3_vl"
    assert spec.layers == read_cache_spec(M3).layers
    assert read_cache_spec({**nested, "text_config": dict(M3)}).model_type == "minimax_m3_text"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sparse_attention_freq": None}, "sparse_attention_freq, which says what layers are sparse"),
        ({"sparse_attention_freq": [1] * 59}, "has 59 entries for 60 layers"),
        ({"sparse_attention_freq": [0.5] * 60}, "not a list of zeros and ones"),
        ({"use_sparse_attention": False}, "use_sparse_attention is off"),
        ({"sparse_index_dim": None}, "does not state sparse_attention_config.sparse_index_dim"),
        ({"sparse_index_dim": -128}, "sparse_index_dim in config.json is -128"),
    ],
)
def test_an_index_that_makes_no_sense_is_named(change: Mapping[str, object], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        read_cache_spec(edited(M3, sparse_attention_config={**SPARSE, **change}))


def test_without_sparse_attention_config_it_is_not_guessed() -> None:
    with pytest.raises(ModelError, match="does not state sparse_attention_config"):
        read_cache_spec(edited(M3, sparse_attention_config=None))
    with pytest.raises(UnsupportedModel, match="sparse attention"):
        read_cache_spec(edited(M3, architectures=["LlamaForCausalLM"]))
