"""MiMo-7B: Qwen2 with a drafter."""

from __future__ import annotations

from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import LayerKind
from tests.unit.kvcache.readers.configs import QWEN25_7B, edited


def test_mimo_7b_is_qwen2_and_a_drafter() -> None:
    mimo = edited(QWEN25_7B, architectures=["MiMoForCausalLM"], model_type="mimo", num_nextn_predict_layers=1)
    spec = read_cache_spec(mimo)
    assert spec.layers == read_cache_spec(QWEN25_7B).layers
    (draft,) = spec.draft_layers
    assert (draft.layer_idx, draft.kind, draft.num_kv_heads, draft.head_dim) == (28, LayerKind.FULL, 4, 128)
    assert read_cache_spec(edited(mimo, num_nextn_predict_layers=...)).draft_layers == ()


def test_a_draft_layer_slides_where_the_last_layer_does() -> None:
    on = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20, "num_nextn_predict_layers": 2}
    spec = read_cache_spec(edited(QWEN25_7B, architectures=["MiMoForCausalLM"], **on))
    assert [(draft.layer_idx, draft.window_tokens) for draft in spec.draft_layers] == [(28, 4096), (29, 4096)]
