"""Full attention under other words, with drafters, or with keys that must say nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import LayerKind
from tests.unit.kvcache.readers.configs import LLAMA, edited

DBRX: Mapping[str, object] = {
    "architectures": ["DbrxForCausalLM"],
    "model_type": "dbrx",
    "n_layers": 40,
    "n_heads": 48,
    "d_model": 6144,
    "max_seq_len": 32768,
    "attn_config": {"kv_n_heads": 8, "clip_qkv": 8},
}


def of(architecture: str, **changes: object) -> dict[str, object]:
    return edited(LLAMA, architectures=[architecture], **changes)


def test_dbrx_has_words_of_its_own() -> None:
    """132B: 40 layers, 48 query and 8 KV heads of 128, 32,768 tokens."""
    spec = read_cache_spec(DBRX)
    assert {(layer.kind, layer.num_attention_heads, layer.num_kv_heads, layer.head_dim) for layer in spec.layers} == {
        (LayerKind.FULL, 48, 8, 128)
    }
    assert (spec.num_layers, spec.max_model_len) == (40, 32768)


@pytest.mark.parametrize("key", ["n_layers", "n_heads", "d_model", "max_seq_len", "attn_config"])
def test_dbrx_errors_use_its_words(key: str) -> None:
    with pytest.raises(ModelError, match=f"does not state {key}, which DbrxForCausalLM needs"):
        read_cache_spec(edited(DBRX, **{key: ...}))
    with pytest.raises(ModelError, match=r"does not state attn_config\.kv_n_heads"):
        read_cache_spec(edited(DBRX, attn_config={}))


def test_glm_4_5_has_a_drafter() -> None:
    spec = read_cache_spec(of("Glm4MoeForCausalLM", head_dim=128, num_nextn_predict_layers=1))
    assert spec.layers == read_cache_spec(edited(LLAMA, head_dim=128)).layers
    assert [(draft.layer_idx, draft.kind, draft.num_kv_heads) for draft in spec.draft_layers] == [
        (4, LayerKind.FULL, 8)
    ]
    assert read_cache_spec(of("Glm4MoeForCausalLM")).draft_layers == ()


@pytest.mark.parametrize(
    ("gib", "tokens"),
    [(18.16, 307184), (23.62, 399424)],
)
def test_minimax_m2_holds_what_two_servers_said(gib: float, tokens: int) -> None:
    """M2 and M2.5 in BF16 on 4 GPUs each: memory over reported tokens is the bytes of a position on one of them."""
    m2 = of("MiniMaxM2ForCausalLM", num_hidden_layers=62, num_attention_heads=48, head_dim=128)
    per_gpu = sum(2 * layer.elements_per_position for layer in read_cache_spec(m2).layers) // 4
    assert abs(gib * 2**30 / per_gpu - tokens) < 0.005 * 2**30 / per_gpu + 16


def test_minimax_m2_may_list_nothing_but_softmax_layers() -> None:
    listed = of("MiniMaxM2ForCausalLM", attn_type_list=[1] * 4, num_mtp_modules=3)
    assert read_cache_spec(listed) == read_cache_spec(of("MiniMaxM2ForCausalLM"))
    with pytest.raises(UnsupportedModel, match="linear attention"):
        read_cache_spec(of("MiniMaxM2ForCausalLM", attn_type_list=[1, 0, 1, 1]))


@pytest.mark.parametrize("architecture", ["HunYuanMoEV1ForCausalLM", "HunYuanDenseV1ForCausalLM"])
def test_hunyuan_spells_the_width_of_a_head_its_own_way(architecture: str) -> None:
    spec = read_cache_spec(of(architecture, attention_head_dim=64, use_cla=False, cla_share_factor=2))
    assert {layer.head_dim for layer in spec.layers} == {64}
    with pytest.raises(UnsupportedModel, match="use_cla"):
        read_cache_spec(of(architecture, use_cla=True, cla_share_factor=2))
    with pytest.raises(ModelError, match="head_dim 128 and attention_head_dim 64"):
        read_cache_spec(of(architecture, attention_head_dim=64, head_dim=128))
