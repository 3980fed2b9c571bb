"""EXAONE 4, 4.5 and K-EXAONE. LG's card of the 32B: three local layers to one global, window 4,096."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from tests.unit.kvcache.readers.configs import edited

EXAONE: Mapping[str, object] = {
    "architectures": ["Exaone4ForCausalLM"],
    "model_type": "exaone4",
    "num_hidden_layers": 8,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "hidden_size": 5120,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "max_position_embeddings": 131072,
}
LISTED = (["sliding_attention"] * 3 + ["full_attention"]) * 2


def full_layers(spec: CacheSpec) -> tuple[int, ...]:
    return spec.layers_of(LayerKind.FULL)


@pytest.mark.parametrize(
    ("pattern", "num_layers", "full"),
    [
        ("LLLG", 8, (3, 7)),
        ("LLLG", 6, (3, 5)),
        ("LG", 5, (1, 3, 4)),
        ("G", 3, (0, 1, 2)),
        ("LLLLLLLL", 4, (3,)),
        (4, 8, (3, 7)),
        (4, 6, (3,)),
        (..., 8, (3, 7)),
    ],
)
def test_letters_repeat_and_the_last_layer_is_global(pattern: object, num_layers: int, full: tuple[int, ...]) -> None:
    spec = read_cache_spec(edited(EXAONE, sliding_window_pattern=pattern, num_hidden_layers=num_layers))
    assert full_layers(spec) == full
    assert any("layer_types" in line for line in spec.assumed)


def test_layer_types_and_letters_must_agree() -> None:
    assert full_layers(read_cache_spec(edited(EXAONE, layer_types=LISTED))) == (3, 7)
    with pytest.raises(UnsupportedModel, match=r"layer_types in config\.json contradicts sliding_window_pattern"):
        read_cache_spec(edited(EXAONE, layer_types=LISTED[::-1]))
    assert full_layers(read_cache_spec(edited(EXAONE, layer_types=LISTED[::-1], sliding_window_pattern=...))) == (0, 4)


@pytest.mark.parametrize("pattern", ["LLXG", "lllg", "", " "])
def test_other_letters_are_refused(pattern: str) -> None:
    with pytest.raises(ModelError, match="sliding_window_pattern"):
        read_cache_spec(edited(EXAONE, sliding_window_pattern=pattern))


def test_a_null_window_means_full_attention() -> None:
    spec = read_cache_spec(edited(EXAONE, sliding_window=None, sliding_window_pattern=None))
    assert full_layers(spec) == tuple(range(8))
    with pytest.raises(UnsupportedModel, match="sliding_window is null"):
        read_cache_spec(edited(EXAONE, sliding_window=None, layer_types=LISTED))


def test_the_drafter_is_made_like_the_first_layers() -> None:
    text = edited(EXAONE, model_type="exaone4_5_text", num_nextn_predict_layers=1)
    spec = read_cache_spec({"architectures": ["Exaone4_5_ForConditionalGeneration"], "text_config": text})
    assert spec.layers == read_cache_spec(EXAONE).layers
    assert [(draft.layer_idx, draft.kind, draft.window_tokens) for draft in spec.draft_layers] == [
        (8, LayerKind.SLIDING, 4096)
    ]
    assert read_cache_spec(EXAONE).draft_layers == ()


def test_k_exaone_has_one_window_and_a_drafter() -> None:
    moe = edited(EXAONE, architectures=["ExaoneMoEForCausalLM"], sliding_window=128, num_nextn_predict_layers=4)
    spec = read_cache_spec(moe)
    assert [draft.kind for draft in spec.draft_layers] == [LayerKind.SLIDING] * 3 + [LayerKind.FULL]
    assert {layer.window_tokens for layer in spec.layers} == {None, 128}
    for key in ("sliding_windows", "mtp_layer_types", "mtp_sliding_windows"):
        with pytest.raises(UnsupportedModel, match=key):
            read_cache_spec(edited(moe, **{key: [128] * 8}))
    with pytest.raises(UnsupportedModel, match="num_nextn_predict_layers is 9"):
        read_cache_spec(edited(moe, num_nextn_predict_layers=9))
