from __future__ import annotations

import pytest

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec, Compressor, IndexKeys, LayerKind
from tests.unit.kvcache.readers.configs import edited
from tests.unit.kvcache.readers.latent_configs import DEEPSEEK_V4_FLASH

VECTOR_BYTES = 512 * 2


def walked_bytes(ratio: int, context_len: int) -> int:
    """BF16 bytes of one layer, found by feeding it token by token and keeping what has to be kept."""
    window: list[int] = []
    waiting: list[int] = []
    pooled = 0
    overlap = ratio if ratio == 4 else 0
    for position in range(context_len):
        window = [*window, position][-128:]
        if ratio:
            waiting = [*waiting, position][-(ratio + overlap) :]
            pooled += position % ratio == ratio - 1
    vectors = VECTOR_BYTES * (len(window) + pooled)
    if ratio == 128:
        return vectors + len(waiting) * 2 * 512 * 4
    if ratio == 4:
        return vectors + len(waiting) * 2 * 2 * (512 + 128) * 4 + pooled * 132
    return vectors


def layer_bytes(spec: CacheSpec, context_len: int) -> list[int]:
    prices = [
        price_policy(CacheSpec("one", (layer,), 1), CachePolicy.native(1), (context_len,)) for layer in spec.layers
    ]
    return [price.bf16_bytes for price in prices]


@pytest.mark.parametrize("context_len", [1, 3, 4, 7, 8, 9, 127, 128, 129, 131, 255, 256, 1000])
def test_a_layer_holds_what_a_walk_over_the_text_keeps(context_len: int) -> None:
    ratios = [0, 1, 4, 128]
    spec = read_cache_spec(edited(DEEPSEEK_V4_FLASH, num_hidden_layers=4, compress_ratios=ratios))
    assert layer_bytes(spec, context_len) == [walked_bytes(ratio, context_len) for ratio in (0, 0, 4, 128)]


def test_flash_at_32768_tokens() -> None:
    spec = read_cache_spec(DEEPSEEK_V4_FLASH)
    native = price_policy(spec, CachePolicy.native(43), (32_768,))
    assert native.retained_positions == 43 * 128 + 21 * 8_192 + 20 * 256
    assert native.side_bytes == 21 * (8 * 8_192 + 8_192 * 132 + 8 * 2_048) + 20 * 128 * 4_096
    assert native.bf16_bytes == 221_954_048
    fp8 = price_policy(spec, CachePolicy.fp8(43, Scaling.PER_TENSOR), (32_768,))
    assert fp8.policy_bytes == native.retained_positions * 512 + native.side_bytes


def test_each_ratio_brings_what_it_needs() -> None:
    spec = read_cache_spec(DEEPSEEK_V4_FLASH)
    window_only, fine, coarse = spec.layers[0], spec.layers[2], spec.layers[3]
    assert {layer.kind for layer in spec.layers} == {LayerKind.LATENT}
    assert {(layer.num_kv_heads, layer.head_dim, layer.head_dim_v) for layer in spec.layers} == {(1, 512, 0)}
    assert {layer.window_tokens for layer in spec.layers} == {128}
    assert (window_only.compress_ratio, window_only.beside) == (None, ())
    assert (fine.compress_ratio, fine.beside) == (4, (Compressor(8, 8192), IndexKeys(132, 4), Compressor(8, 2048)))
    assert (coarse.compress_ratio, coarse.beside) == (128, (Compressor(128, 4096),))


def test_the_drafter_has_its_window_only() -> None:
    (draft,) = read_cache_spec(DEEPSEEK_V4_FLASH).draft_layers
    assert (draft.layer_idx, draft.window_tokens, draft.compress_ratio, draft.beside) == (43, 128, None, ())


def test_the_list_may_end_with_the_model() -> None:
    whole = read_cache_spec(DEEPSEEK_V4_FLASH)
    ratios = DEEPSEEK_V4_FLASH["compress_ratios"]
    assert isinstance(ratios, list)
    assert read_cache_spec(edited(DEEPSEEK_V4_FLASH, compress_ratios=ratios[:43])) == whole


def test_without_the_fine_ratio_no_index_is_needed() -> None:
    config = edited(
        DEEPSEEK_V4_FLASH, num_hidden_layers=1, compress_ratios=[128], index_topk=..., index_head_dim=..., head_dim=512
    )
    assert len(read_cache_spec(config).layers[0].beside) == 1


def test_the_context_is_stated_and_yarn_agrees() -> None:
    spec = read_cache_spec(DEEPSEEK_V4_FLASH)
    assert spec.max_model_len == 16 * 65_536
    assert spec.assumed == ()


@pytest.mark.parametrize("key", ["compress_ratios", "head_dim", "sliding_window", "index_topk", "index_head_dim"])
@pytest.mark.parametrize("value", [None, ...])
def test_a_missing_key_is_named(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=key):
        read_cache_spec(edited(DEEPSEEK_V4_FLASH, **{key: value}))


@pytest.mark.parametrize(
    "ratios", [[0] * 42, [0] * 45, [0] * 42 + [-1], [0] * 42 + [4.0], [0] * 42 + [True], "4", 4, [[4]] * 43]
)
def test_ratios_that_make_no_sense_are_named(ratios: object) -> None:
    with pytest.raises(ModelError, match="compress_ratios"):
        read_cache_spec(edited(DEEPSEEK_V4_FLASH, compress_ratios=ratios))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("compress_ratios", [0] * 42 + [64]),
        ("compress_ratios", [0] * 43 + [4]),
        ("num_key_value_heads", 8),
        ("kv_lora_rank", 512),
    ],
)
def test_what_has_no_rule_is_refused_by_its_key(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match=f"DeepseekV4ForCausalLM.*{key}"):
        read_cache_spec(edited(DEEPSEEK_V4_FLASH, **{key: value}))
