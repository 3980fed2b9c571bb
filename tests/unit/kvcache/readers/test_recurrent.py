"""Recurrent hybrids: which layer is what, what it holds, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec, LayerKind, StateTensor
from tests.unit.kvcache.readers.configs import edited
from tests.unit.kvcache.readers.recurrent_configs import (
    BAILING,
    FALCON_H1,
    GRANITE_SMALL,
    JAMBA,
    KIMI_LINEAR,
    LFM2,
    NEMOTRON_NANO,
    OLMO_HYBRID,
    QWEN3_NEXT,
    QWEN35_27B,
    QWEN35_TEXT,
)


def kinds(spec: CacheSpec) -> dict[LayerKind, int]:
    return dict(Counter(layer.kind for layer in spec.layers))


def state_bytes(spec: CacheSpec) -> int:
    return sum(layer.side_bytes(1) for layer in spec.layers)


def position_bytes(spec: CacheSpec) -> int:
    """BF16 bytes of one more token."""
    return 2 * sum(layer.elements_per_position for layer in spec.layers)


@pytest.mark.parametrize(
    ("config", "layers", "full_or_latent", "state", "token"),
    [
        # 36 × (3·8,192·2 + 32·128·128·2);   12 × 2·2·256·2
        (QWEN3_NEXT, 48, range(3, 48, 4), 36 * 1_097_728, 24_576),
        # 48 × (3·10,240·2 + 48·128·128·4);  16 × 2·4·256·2
        (QWEN35_27B, 64, range(3, 64, 4), 48 * 3_207_168, 65_536),
        # 24 × (3·(2·30·96 + 30·192)·2 + 30·192·96·2);  8 × 2·30·128·2
        (OLMO_HYBRID, 32, range(3, 32, 4), 24 * 1_175_040, 122_880),
        # 23 × (3·6,144·2 + 64·64·128·4);  6 × 2·2·128·2
        (NEMOTRON_NANO, 52, (5, 12, 19, 26, 33, 42), 23 * 2_134_016, 6144),
        # 36 × (3·8,448·2 + 128·64·128·2);  4 × 2·8·128·2
        (GRANITE_SMALL, 40, (5, 15, 25, 35), 36 * 2_147_840, 16_384),
        # 36 × (3·(1,536 + 2·128)·2 + 24·64·128·2);  36 × 2·2·64·2
        (FALCON_H1, 36, range(36), 36 * 403_968, 18_432),
        # 28 × (3·8,192·2 + 8,192·16·2);  4 × 2·8·128·2
        (JAMBA, 32, (4, 12, 20, 28), 28 * 311_296, 16_384),
        # 10 × 2·2,048·2;  6 × 2·8·64·2
        (LFM2, 16, (2, 5, 8, 10, 12, 14), 10 * 8192, 12_288),
        # 20 × (3·12,288·2 + 32·128·128·4);  7 × 576·2
        (KIMI_LINEAR, 27, (3, 7, 11, 15, 19, 23, 26), 20 * 2_170_880, 8064),
    ],
)
def test_published_geometries(
    config: Mapping[str, object], layers: int, full_or_latent: tuple[int, ...], state: int, token: int
) -> None:
    spec = read_cache_spec(config)
    assert spec.num_layers == layers
    assert [layer.layer_idx for layer in spec.layers if layer.holds_kv] == list(full_or_latent)
    assert state_bytes(spec) == state
    assert position_bytes(spec) == token


@pytest.mark.parametrize(
    ("architecture", "latent", "state"),
    [
        # lightning attention, 16 matrices of 128 × 128; layers 8 and 16
        ("BailingMoeV2_5ForCausalLM", (7, 15), 18 * 524_288),
        # KDA, in float32, 3 inputs of 3·16·128; layers 8 and 16, and the 4 beyond the last whole group
        ("BailingMoeV3ForCausalLM", (7, 15, 16, 17, 18, 19), 14 * 1_085_440),
    ],
)
def test_groups_end_in_a_latent_layer(architecture: str, latent: tuple[int, ...], state: int) -> None:
    spec = read_cache_spec({**BAILING, "architectures": [architecture]})
    assert spec.layers_of(LayerKind.LATENT) == latent
    assert state_bytes(spec) == state
    assert [(layer.layer_idx, layer.kind, layer.head_dim) for layer in spec.draft_layers] == [
        (20, LayerKind.LATENT, 576)
    ]


# --- blocks that the engine has been seen to choose -------------------------------------


@pytest.mark.parametrize(
    ("element_bytes", "ranks", "speculative_tokens", "block"),
    [(2, 1, 0, 784), (1, 1, 0, 1568), (2, 1, 1, 800), (1, 1, 2, 1600), (2, 2, 2, 800), (1, 4, 3, 1600)],
)
def test_an_attention_page_covers_a_state_in_as_many_tokens_as_servers_print(
    element_bytes: int, ranks: int, speculative_tokens: int, block: int
) -> None:
    """Qwen3.5 and 3.6 27B, alone and with MTP: a page is the smallest multiple of 16 tokens that holds a state."""
    recurrent, *_, attention = read_cache_spec(QWEN35_27B).layers[:4]
    state = sum(
        tensor.rank_bytes(ranks, speculative_tokens) for tensor in recurrent.beside if isinstance(tensor, StateTensor)
    )
    sixteen_tokens = 16 * attention.elements_per_position * element_bytes // ranks
    assert 16 * -(-state // sixteen_tokens) == block


def test_the_page_of_a_smaller_model() -> None:
    """Qwen3.5 and 3.6 35B-A3B in FP8."""
    text = {**QWEN35_TEXT, "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32}
    recurrent, *_, attention = read_cache_spec(edited(QWEN35_27B, text_config=text)).layers[:4]
    assert 16 * -(-recurrent.side_bytes(1) // (16 * attention.elements_per_position)) == 2096


# --- what a state is, and is not --------------------------------------------------------


def test_a_recurrent_layer_has_no_heads_and_no_positions() -> None:
    layer = read_cache_spec(QWEN3_NEXT).layers[0]
    assert (layer.kind, layer.num_attention_heads, layer.num_kv_heads) == (LayerKind.STATE, 0, 0)
    assert not layer.holds_kv
    assert layer.retained_positions(4096) == 0
    assert layer.side_bytes(1) == layer.side_bytes(1_000_000) > 0


def test_layers_of_experts_keep_nothing() -> None:
    spec = read_cache_spec(NEMOTRON_NANO)
    assert kinds(spec) == {LayerKind.STATE: 23, LayerKind.NONE: 23, LayerKind.FULL: 6}
    assert all(spec.layers[idx].side_bytes(4096) == 0 for idx in spec.layers_of(LayerKind.NONE))


def test_attention_and_a_state_in_one_layer() -> None:
    layer = read_cache_spec(FALCON_H1).layers[0]
    assert layer.kind is LayerKind.FULL
    assert layer.holds_kv
    assert [cache.name for cache in layer.beside if isinstance(cache, StateTensor)] == [
        "conv",
        "conv_groups",
        "recurrent",
    ]


def test_fp8_leaves_the_states_as_they_are() -> None:
    spec = read_cache_spec(QWEN3_NEXT)
    price = price_policy(spec, CachePolicy.fp8(spec.num_layers, Scaling.UNIT), [1000])
    assert price.side_bytes == 36 * 1_097_728
    assert price.bf16_bytes - price.fp8_bytes == 1000 * 24_576 // 2


# --- dtypes of the recurrent matrices ---------------------------------------------------


@pytest.mark.parametrize(
    ("word", "matrix_bytes"), [("float32", 3_145_728), ("bfloat16", 1_572_864), ("float16", 1_572_864)]
)
def test_the_dtype_that_a_config_names(word: str, matrix_bytes: int) -> None:
    spec = read_cache_spec(edited(QWEN35_27B, text_config={**QWEN35_TEXT, "mamba_ssm_dtype": word}))
    assert spec.layers[0].side_bytes(1) == 61_440 + matrix_bytes


def test_without_one_the_engines_default_is_assumed() -> None:
    qwen = read_cache_spec(edited(QWEN35_27B, text_config={**QWEN35_TEXT, "mamba_ssm_dtype": None}))
    assert qwen.layers[0].side_bytes(1) == 61_440 + 1_572_864
    assert any("mamba_ssm_dtype = the model's dtype" in line for line in qwen.assumed)
    nemotron = read_cache_spec(edited(NEMOTRON_NANO, mamba_ssm_cache_dtype=None))
    assert state_bytes(nemotron) == 23 * 2_134_016
    assert any("mamba_ssm_cache_dtype = float32" in line for line in nemotron.assumed)


def test_qwen3_next_is_served_without_looking_at_the_key() -> None:
    spec = read_cache_spec(edited(QWEN3_NEXT, mamba_ssm_dtype="float32"))
    assert state_bytes(spec) == 36 * 1_097_728


def test_minicpmv_is_served_without_looking_at_the_key() -> None:
    config = edited(QWEN35_27B, architectures=["MiniCPMV4_6ForConditionalGeneration"], model_type="minicpmv4_6")
    spec = read_cache_spec(config)
    assert state_bytes(spec) == 48 * (61_440 + 1_572_864)
    assert spec.draft_layers == ()


def test_a_dtype_without_such_a_state_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"mamba_ssm_cache_dtype is 'fp8'"):
        read_cache_spec(edited(NEMOTRON_NANO, mamba_ssm_cache_dtype="fp8"))


# --- drafters ---------------------------------------------------------------------------


def drafters(spec: CacheSpec) -> list[tuple[int, LayerKind]]:
    return [(layer.layer_idx, layer.kind) for layer in spec.draft_layers]


def test_drafters_go_on_after_the_last_layer() -> None:
    assert drafters(read_cache_spec(QWEN35_27B)) == [(64, LayerKind.FULL)]
    assert drafters(read_cache_spec(edited(QWEN3_NEXT, num_nextn_predict_layers=0))) == []


def test_a_drafter_that_qwen3_next_does_not_state_is_assumed() -> None:
    spec = read_cache_spec(QWEN3_NEXT)
    assert drafters(spec) == [(48, LayerKind.FULL)]
    assert any("num_nextn_predict_layers = 1" in line for line in spec.assumed)


@pytest.mark.parametrize(
    "pattern", [{"mtp_hybrid_override_pattern": "*E"}, {"mtp_layers_block_type": ["attention", "moe"]}, {}]
)
def test_a_nemotron_drafter_has_a_pattern_of_its_own(pattern: dict[str, object]) -> None:
    spec = read_cache_spec(edited(NEMOTRON_NANO, num_nextn_predict_layers=1, **pattern))
    assert drafters(spec) == [(52, LayerKind.FULL), (53, LayerKind.NONE)]
    assert any("mtp_layers_block_type" in line for line in spec.assumed) == (not pattern)


def test_more_than_one_nemotron_drafter_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="num_nextn_predict_layers is 2"):
        read_cache_spec(edited(NEMOTRON_NANO, num_nextn_predict_layers=2))


# --- spellings of the same thing --------------------------------------------------------


def test_nemotron_as_a_list_and_without_a_number_of_layers() -> None:
    words = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
    listed = [words[letter] for letter in str(NEMOTRON_NANO["hybrid_override_pattern"])]
    config = edited(NEMOTRON_NANO, layers_block_type=listed, hybrid_override_pattern=None, num_hidden_layers=None)
    assert read_cache_spec(config) == read_cache_spec(NEMOTRON_NANO)
    both = edited(NEMOTRON_NANO, layers_block_type=listed)
    assert read_cache_spec(both) == read_cache_spec(NEMOTRON_NANO)


def test_granite_in_the_newer_words() -> None:
    newer = {"attention": "full_attention", "mamba": "linear_attention"}
    types = [newer[word] for word in GRANITE_SMALL["layer_types"]]  # type: ignore[attr-defined]
    assert read_cache_spec(edited(GRANITE_SMALL, layer_types=types)) == read_cache_spec(GRANITE_SMALL)


def test_a_granite_of_attention_alone_needs_no_mamba_key() -> None:
    config = {key: value for key, value in GRANITE_SMALL.items() if not key.startswith("mamba")}
    spec = read_cache_spec({**config, "layer_types": ["attention"] * 40})
    assert kinds(spec) == {LayerKind.FULL: 40}
    assert state_bytes(spec) == 0


def test_lfm2_in_three_forms() -> None:
    types = ["full_attention" if idx in (2, 5, 8, 10, 12, 14) else "conv" for idx in range(16)]
    listed = read_cache_spec(edited(LFM2, layer_types=types, full_attn_idxs=None))
    assert listed == read_cache_spec(LFM2)
    experts = edited(LFM2, architectures=["Lfm2MoeForCausalLM"], model_type="lfm2_moe", layer_types=types)
    assert state_bytes(read_cache_spec(experts)) == state_bytes(listed)
    text = {**LFM2, "conv_dim": None}
    nested: dict[str, Any] = {"architectures": ["Lfm2VlForConditionalGeneration"], "text_config": text}
    spec = read_cache_spec({**nested, "model_type": "lfm2_vl"})
    assert state_bytes(spec) == state_bytes(listed)
    assert any("text_config.conv_dim = 2048" in line for line in spec.assumed)


@pytest.mark.parametrize(("value", "assumed"), [("auto", True), (64, False)])
def test_the_width_of_a_mamba_head_may_be_a_word(value: object, assumed: bool) -> None:
    spec = read_cache_spec(edited(FALCON_H1, mamba_d_head=value))
    assert state_bytes(spec) == 36 * 403_968
    assert any("mamba_d_head = 64" in line for line in spec.assumed) == assumed


def test_a_null_mamba_d_ssm_means_the_expanded_hidden_size() -> None:
    spec = read_cache_spec(edited(FALCON_H1, mamba_d_ssm=None, mamba_n_heads=32))
    assert spec.layers[0].side_bytes(1) == 3 * (2048 + 256) * 2 + 32 * 64 * 128 * 2


def test_kimi_linear_inside_another() -> None:
    config = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": KIMI_LINEAR}
    spec = read_cache_spec(config)
    assert spec == read_cache_spec(KIMI_LINEAR)
    assert spec.max_model_len == 1_048_576


# --- contradictions ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "edits", "said"),
    [
        (NEMOTRON_NANO, {"num_hidden_layers": 50}, "50 layers and a pattern of 52"),
        (NEMOTRON_NANO, {"layers_block_type": ["mamba"] * 52}, "contradict each other"),
        (NEMOTRON_NANO, {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern has 'X'"),
        (NEMOTRON_NANO, {"hybrid_override_pattern": None}, "neither layers_block_type nor hybrid_override_pattern"),
        (NEMOTRON_NANO, {"sliding_window": 4096}, "sliding_window"),
        (NEMOTRON_NANO, {"n_groups": None}, "n_groups"),
        (GRANITE_SMALL, {"layer_types": ["attention"] * 39}, "39 entries for 40 layers"),
        (GRANITE_SMALL, {"layer_types": ["recurrent"] * 40}, "layer_types has 'recurrent'"),
        (GRANITE_SMALL, {"layer_types": None}, "states no layer_types"),
        (GRANITE_SMALL, {"mamba_d_head": 128}, "128 Mamba heads of 128"),
        (GRANITE_SMALL, {"head_dim": 64}, "head_dim 64 in config.json contradicts hidden_size 4096"),
        (QWEN3_NEXT, {"layer_types": ["sliding_attention"] * 48}, "layer_types has 'sliding_attention'"),
        (QWEN3_NEXT, {"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim"),
        (QWEN3_NEXT, {"linear_num_key_heads": "16"}, "linear_num_key_heads"),
        (JAMBA, {"attn_layer_offset": 8}, "attn_layer_offset below its attn_layer_period 8"),
        (LFM2, {"full_attn_idxs": [2, 16]}, "full_attn_idxs"),
        (LFM2, {"full_attn_idxs": [2, -1]}, "full_attn_idxs"),
        (LFM2, {"full_attn_idxs": None}, "neither layer_types nor full_attn_idxs"),
        (KIMI_LINEAR, {"kv_lora_rank": None}, "kv_lora_rank"),
        (KIMI_LINEAR, {"linear_attn_config": None}, "linear_attn_config"),
        (KIMI_LINEAR, {"max_position_embeddings": 4096}, "model_max_length"),
    ],
)
def test_what_contradicts_itself_is_named(config: Mapping[str, Any], edits: dict[str, object], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_cache_spec(edited(config, **edits))
    assert said in caught.value.message


@pytest.mark.parametrize(
    "lists",
    [
        {"kda_layers": [1, 2, 3], "full_attn_layers": [4]},
        {"kda_layers": list(range(1, 28)), "full_attn_layers": [4]},
        {"kda_layers": list(range(27)), "full_attn_layers": [27]},
        {"kda_layers": list(range(1, 28)), "full_attn_layers": None},
    ],
)
def test_kimi_layers_must_be_listed_once_each(lists: dict[str, object]) -> None:
    delta = {**dict(KIMI_LINEAR["linear_attn_config"]), **lists}  # type: ignore[call-overload]
    with pytest.raises(ModelError, match="not the layers 1 to 27, each once"):
        read_cache_spec(edited(KIMI_LINEAR, linear_attn_config=delta))
