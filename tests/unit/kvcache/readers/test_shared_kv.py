"""Gemma 3n and 4. Geometry from the model cards, bytes from what servers printed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from tests.unit.kvcache.readers.configs import edited

FULL, SLIDING = LayerKind.FULL, LayerKind.SLIDING

GEMMA4_31B: Mapping[str, object] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    "use_bidirectional_attention": "vision",
}

GEMMA4_E2B: Mapping[str, object] = {
    **GEMMA4_31B,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 20,
    "sliding_window": 512,
    "max_position_embeddings": 131072,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "use_bidirectional_attention": None,
}

GEMMA3N: Mapping[str, object] = {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "num_hidden_layers": 35,
    "hidden_size": 2048,
}


def elements(spec: CacheSpec, kind: LayerKind) -> set[tuple[int, int, int]]:
    found = [layer for layer in spec.layers if layer.kind is kind]
    return {(layer.num_kv_heads, layer.head_dim, layer.head_dim_v) for layer in found}


def bf16_bytes(spec: CacheSpec, context_len: int) -> int:
    return price_policy(spec, CachePolicy.native(spec.num_layers), (context_len,)).bf16_bytes


# --- Gemma 4 ----------------------------------------------------------------------------


def test_gemma4_full_layers_have_fewer_and_wider_heads() -> None:
    spec = read_cache_spec(GEMMA4_31B)
    assert spec.layers_of(FULL) == tuple(range(5, 60, 6))
    assert elements(spec, FULL) == {(4, 512, 512)}
    assert elements(spec, SLIDING) == {(16, 256, 256)}
    assert {layer.window_tokens for layer in spec.layers} == {None, 1024}
    assert spec.assumed == ()


def test_a_server_asked_for_what_gemma4_31b_takes() -> None:
    """vLLM 0.26, BF16, 262,144 tokens, 32,768 batched: "70.79 GiB KV cache is needed" (its issue 49878).

    The server reserves the whole text in full layers; in sliding ones the window before this token and two
    batches in flight, in blocks of 16 and one block more.
    """
    spec = read_cache_spec(GEMMA4_31B)
    full = sum(2 * layer.elements_per_position for layer in spec.layers if layer.kind is FULL)
    sliding = sum(2 * layer.elements_per_position for layer in spec.layers if layer.kind is SLIDING)
    in_window = (-(-(1023 + 2 * 32768) // 16) + 1) * 16
    assert round((full * 262144 + sliding * in_window) / 2**30, 2) == 70.79


def test_one_projection_for_k_and_v_still_fills_both() -> None:
    spec = read_cache_spec(GEMMA4_31B)
    assert {layer.head_dim_v for layer in spec.layers} == {256, 512}
    own_heads = read_cache_spec(edited(GEMMA4_31B, attention_k_eq_v=False))
    assert elements(own_heads, FULL) == {(16, 512, 512)}


def test_gemma4_e2b_retains_fifteen_of_its_layers() -> None:
    spec = read_cache_spec(GEMMA4_E2B)
    assert [layer.layer_idx for layer in spec.layers if layer.holds_kv] == list(range(15))
    assert {layer.shares_with for layer in spec.layers[15:] if layer.kind is SLIDING} == {13}
    assert {layer.shares_with for layer in spec.layers[15:] if layer.kind is FULL} == {14}
    assert bf16_bytes(spec, 131072) == 2 * 2 * (3 * 131072 * 512 + 12 * 512 * 256)


def test_gemma4_layers_alternate_six_to_one_unless_it_says_so() -> None:
    spec = read_cache_spec(edited(GEMMA4_31B, num_hidden_layers=14, layer_types=...))
    assert spec.layers_of(FULL) == (5, 11, 13)
    assert [line.partition(" =")[0] for line in spec.assumed][:2] == ["layer_types", "layer_types[13]"]


def test_gemma4_may_leave_out_what_is_documented() -> None:
    bare = {key: GEMMA4_31B[key] for key in ("architectures", "model_type", "num_hidden_layers", "layer_types")}
    spec = read_cache_spec(bare)
    assert elements(spec, FULL) == {(4, 512, 512)}
    assert elements(spec, SLIDING) == {(4, 256, 256)}
    assert (spec.layers[0].window_tokens, spec.max_model_len) == (512, 131072)
    unified = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "text_config": bare}
    assert (read_cache_spec(unified).layers[0].window_tokens, read_cache_spec(unified).max_model_len) == (1024, 262144)


@pytest.mark.parametrize("num_shared", [31, 34, 35, 36, 4096])
def test_a_layer_that_finds_none_to_share_with_is_refused(num_shared: int) -> None:
    with pytest.raises(UnsupportedModel, match=f"num_kv_shared_layers is {num_shared} of 35 layers"):
        read_cache_spec(edited(GEMMA4_E2B, num_kv_shared_layers=num_shared))


def test_gemma4_in_both_directions_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="use_bidirectional_attention"):
        read_cache_spec(edited(GEMMA4_31B, use_bidirectional_attention="all"))


def test_gemma4_says_which_of_its_switches_are_not_stated() -> None:
    bare = edited(GEMMA4_31B, attention_k_eq_v=..., num_kv_shared_layers=...)
    assert read_cache_spec(bare).assumed == (
        "attention_k_eq_v = false (the default of Gemma4ForCausalLM)",
        "num_kv_shared_layers = 0 (the default of Gemma4ForCausalLM)",
    )


def test_a_null_width_of_full_layers_is_named() -> None:
    with pytest.raises(ModelError, match="does not state global_head_dim"):
        read_cache_spec(edited(GEMMA4_31B, global_head_dim=None))


# --- Gemma 3n ---------------------------------------------------------------------------


def test_gemma3n_e4b_by_its_documented_defaults() -> None:
    """35 layers, the last 15 of which share; every 5th full; 2 KV heads of 256; window 512; 32,768 tokens."""
    spec = read_cache_spec(GEMMA3N)
    assert spec.layers_of(FULL) == (4, 9, 14, 19, 24, 29, 34)
    assert elements(spec, FULL) == elements(spec, SLIDING) == {(2, 256, 256)}
    assert {(layer.kind, layer.shares_with) for layer in spec.layers[20:]} == {(SLIDING, 18), (FULL, 19)}
    assert bf16_bytes(spec, 32768) == 2 * 2 * 512 * (4 * 32768 + 16 * 512)
    assert any("num_kv_shared_layers = 15" in line for line in spec.assumed)


def test_gemma3n_e2b_shares_ten_of_thirty() -> None:
    spec = read_cache_spec(edited(GEMMA3N, num_hidden_layers=30, num_kv_shared_layers=10))
    assert sum(layer.holds_kv for layer in spec.layers) == 20
    nested = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": dict(GEMMA3N)}
    assert sum(layer.holds_kv for layer in read_cache_spec(nested).layers) == 20


def test_nothing_shared_is_a_number_too() -> None:
    assert all(layer.holds_kv for layer in read_cache_spec(edited(GEMMA3N, num_kv_shared_layers=0)).layers)
