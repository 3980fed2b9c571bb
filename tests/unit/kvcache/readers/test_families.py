"""What each family's keys mean. Expected values are transformers' own (its configuration classes)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.readers import READERS, read_cache_spec
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from tests.unit.kvcache.readers.configs import GEMMA3_4B, GPT_OSS_20B, LLAMA, QWEN25_7B, edited
from tests.unit.kvcache.readers.shapes import read_shapes, shape_of

FULL, SLIDING = LayerKind.FULL, LayerKind.SLIDING


def full_layers(spec: CacheSpec) -> tuple[int, ...]:
    return spec.layers_of(FULL)


def windows(spec: CacheSpec) -> set[int | None]:
    return {layer.window_tokens for layer in spec.layers}


def geometry(spec: CacheSpec) -> tuple[int, int, int, int]:
    (found,) = {
        (layer.num_attention_heads, layer.num_kv_heads, layer.head_dim, layer.head_dim_v) for layer in spec.layers
    }
    return found


def of(architecture: str, **changes: object) -> dict[str, object]:
    return edited(LLAMA, architectures=[architecture], **changes)


# --- every layer full -------------------------------------------------------------------


def test_llama() -> None:
    spec = read_cache_spec(LLAMA)
    assert spec.model_type == "llama"
    assert spec.max_model_len == 131072
    assert full_layers(spec) == (0, 1, 2, 3)
    assert geometry(spec) == (32, 8, 128, 128)
    assert spec.assumed == ("head_dim = 128 (hidden_size / num_attention_heads)",)


def test_a_stated_head_dim_is_taken_and_nothing_is_assumed() -> None:
    spec = read_cache_spec(edited(LLAMA, head_dim=64, hidden_size=...))
    assert geometry(spec) == (32, 8, 64, 64)
    assert spec.assumed == ()


@pytest.mark.parametrize("absent", [..., None])
def test_without_kv_heads_llama_has_no_grouping(absent: object) -> None:
    spec = read_cache_spec(edited(LLAMA, num_key_value_heads=absent))
    assert geometry(spec) == (32, 32, 128, 128)
    assert any("num_key_value_heads = 32" in line for line in spec.assumed)


@pytest.mark.parametrize(
    "architecture", ["GraniteForCausalLM", "GraniteMoeForCausalLM", "OlmoForCausalLM", "Olmo2ForCausalLM"]
)
def test_others_that_are_full_everywhere(architecture: str) -> None:
    assert read_cache_spec(of(architecture)).layers == read_cache_spec(LLAMA).layers


def test_gemma_has_a_head_dim_of_its_own() -> None:
    assert geometry(read_cache_spec(of("GemmaForCausalLM"))) == (32, 8, 256, 256)


def test_a_window_that_engines_disagree_about_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM: sliding_window in config\.json is 4096"):
        read_cache_spec(edited(LLAMA, sliding_window=4096))
    switched_off = edited(LLAMA, sliding_window=4096, use_sliding_window=False)
    assert read_cache_spec(switched_off) == read_cache_spec(LLAMA)


def test_layer_types_may_only_confirm_a_full_model() -> None:
    assert read_cache_spec(edited(LLAMA, layer_types=["full_attention"] * 4)) == read_cache_spec(LLAMA)
    with pytest.raises(UnsupportedModel, match="layer_types"):
        read_cache_spec(edited(LLAMA, layer_types=["sliding_attention"] * 4))


# --- one window for all -----------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture", ["MistralForCausalLM", "Ministral3ForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM"]
)
def test_one_window_for_every_layer_or_for_none(architecture: str) -> None:
    assert windows(read_cache_spec(of(architecture, sliding_window=4096))) == {4096}
    full = read_cache_spec(of(architecture, sliding_window=None))
    assert windows(full) == {None}
    assert full_layers(full) == (0, 1, 2, 3)


def test_an_absent_window_means_the_documented_one_for_mistral_only() -> None:
    mistral = read_cache_spec(of("MistralForCausalLM"))
    assert windows(mistral) == {4096}
    assert any("sliding_window = 4096" in line for line in mistral.assumed)
    assert windows(read_cache_spec(of("MixtralForCausalLM"))) == {None}


def test_layer_types_that_contradict_the_window_are_refused() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    with pytest.raises(UnsupportedModel, match=r"layer_types in config\.json contradicts sliding_window"):
        read_cache_spec(of("MistralForCausalLM", sliding_window=4096, layer_types=types))


def test_only_phi3_may_leave_out_its_kv_heads() -> None:
    assert geometry(read_cache_spec(of("Phi3ForCausalLM", num_key_value_heads=...)))[1] == 32
    with pytest.raises(ModelError, match="does not state num_key_value_heads, which MistralForCausalLM needs"):
        read_cache_spec(of("MistralForCausalLM", num_key_value_heads=...))


# --- windows behind a switch ------------------------------------------------------------


def test_qwen25_states_a_window_and_does_not_use_it() -> None:
    spec = read_cache_spec(QWEN25_7B)
    assert windows(spec) == {None}
    assert geometry(spec) == (28, 4, 128, 128)


def test_qwen2_slides_from_max_window_layers_upwards() -> None:
    spec = read_cache_spec(edited(QWEN25_7B, use_sliding_window=True, sliding_window=4096, max_window_layers=21))
    assert full_layers(spec) == tuple(range(21))
    assert windows(spec) == {None, 4096}


def test_layer_types_may_only_say_what_the_switch_and_max_window_layers_say() -> None:
    types = ["full_attention"] * 27 + ["sliding_attention"]
    on = edited(QWEN25_7B, use_sliding_window=True, max_window_layers=27, layer_types=types)
    assert read_cache_spec(on).layers_of(SLIDING) == (27,)
    assert read_cache_spec(edited(on, max_window_layers=...)).layers_of(SLIDING) == (27,)
    with pytest.raises(UnsupportedModel, match="contradicts max_window_layers, which is 28"):
        read_cache_spec(edited(on, max_window_layers=28))
    with pytest.raises(UnsupportedModel, match="use_sliding_window is off"):
        read_cache_spec(edited(QWEN25_7B, layer_types=types))


def test_an_absent_switch_is_off_and_recorded() -> None:
    spec = read_cache_spec(edited(QWEN25_7B, use_sliding_window=...))
    assert windows(spec) == {None}
    assert spec.assumed[0] == "use_sliding_window = false (the default of Qwen2ForCausalLM)"


def test_qwen3_has_a_documented_head_dim() -> None:
    assert geometry(read_cache_spec(of("Qwen3ForCausalLM", hidden_size=1024))) == (32, 8, 128, 128)


def test_qwen3_moe_slides_everywhere_or_nowhere() -> None:
    on = of("Qwen3MoeForCausalLM", use_sliding_window=True, sliding_window=4096, max_window_layers=2)
    assert windows(read_cache_spec(on)) == {4096}
    assert windows(read_cache_spec(edited(on, use_sliding_window=False))) == {None}


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "SmolLM3ForCausalLM"])
def test_where_engines_differ_layer_types_must_decide(architecture: str) -> None:
    on = of(architecture, use_sliding_window=True, sliding_window=4096)
    with pytest.raises(UnsupportedModel, match="layer_types"):
        read_cache_spec(on)
    assert windows(read_cache_spec(edited(on, layer_types=["sliding_attention"] * 4))) == {4096}
    assert windows(read_cache_spec(edited(on, use_sliding_window=False))) == {None}


def test_smollm3_slides_where_layer_types_say_so() -> None:
    types = ["full_attention", "sliding_attention"] * 2
    on = of("SmolLM3ForCausalLM", use_sliding_window=True, sliding_window=4096, layer_types=types)
    assert read_cache_spec(on).layers_of(SLIDING) == (1, 3)


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"])
def test_windows_in_some_layers_are_refused_where_vllm_gives_them_to_none(architecture: str) -> None:
    types = ["full_attention", "sliding_attention"] * 2
    on = of(architecture, use_sliding_window=True, sliding_window=4096, layer_types=types)
    with pytest.raises(UnsupportedModel, match="layer_types has full layers"):
        read_cache_spec(on)


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "MixtralForCausalLM", "Exaone4ForCausalLM"])
def test_a_window_of_0_is_none(architecture: str) -> None:
    assert windows(read_cache_spec(of(architecture, sliding_window=0))) == {None}


# --- sliding between full ---------------------------------------------------------------


def test_gpt_oss() -> None:
    spec = read_cache_spec(GPT_OSS_20B)
    assert spec.layers_of(SLIDING) == tuple(range(0, 24, 2))
    assert windows(spec) == {None, 128}
    assert geometry(spec) == (64, 8, 64, 64)
    assert spec.assumed == ()


def test_gpt_oss_slides_by_the_number_of_the_layer() -> None:
    with pytest.raises(UnsupportedModel, match="does not alternate"):
        read_cache_spec(edited(GPT_OSS_20B, layer_types=["full_attention", "sliding_attention"] * 12))


@pytest.mark.parametrize(
    ("architecture", "changes", "full"),
    [
        ("GptOssForCausalLM", {}, (1, 3, 5, 7, 9, 11)),
        ("Gemma2ForCausalLM", {}, (1, 3, 5, 7, 9, 11)),
        ("Gemma3ForCausalLM", {}, (5, 11)),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 4}, (3, 7, 11)),
        ("Olmo3ForCausalLM", {}, (3, 7, 11)),
        ("Cohere2ForCausalLM", {}, (3, 7, 11)),
        ("Cohere2ForCausalLM", {"sliding_window_pattern": 6}, (5, 11)),
    ],
)
def test_without_layer_types_every_nth_layer_is_full(
    architecture: str, changes: Mapping[str, object], full: tuple[int, ...]
) -> None:
    spec = read_cache_spec(of(architecture, num_hidden_layers=12, sliding_window=64, **changes))
    assert full_layers(spec) == full
    assert windows(spec) == {None, 64}
    assert any("layer_types" in line for line in spec.assumed)


@pytest.mark.parametrize("pattern", [{"sliding_window_pattern": "LLLG"}, {"sliding_window_pattern": 4}, {}])
def test_exaone4_spells_its_pattern_in_letters_or_as_a_number_or_not_at_all(pattern: Mapping[str, object]) -> None:
    stated = of("Exaone4ForCausalLM", sliding_window=4096, layer_types=["sliding_attention"] * 3 + ["full_attention"])
    assert full_layers(read_cache_spec(stated)) == (3,)
    assert read_cache_spec(edited(stated, layer_types=..., **pattern)).layers == read_cache_spec(stated).layers


def test_sliding_layers_need_a_window() -> None:
    with pytest.raises(ModelError, match="does not state sliding_window, which GptOssForCausalLM needs"):
        read_cache_spec(edited(GPT_OSS_20B, sliding_window=None))


def test_gemma3_inside_a_multimodal_model_may_leave_nearly_everything_out() -> None:
    spec = read_cache_spec(GEMMA3_4B)
    assert spec.model_type == "gemma3_text"
    assert full_layers(spec) == (5, 11, 17, 23, 29)
    assert windows(spec) == {None, 1024}
    assert geometry(spec) == (8, 4, 256, 256)
    assert spec.max_model_len == 131072
    assert {line.split(" = ")[0] for line in spec.assumed} == {
        "text_config.layer_types",
        "text_config.num_attention_heads",
        "text_config.num_key_value_heads",
        "text_config.head_dim",
        "text_config.max_position_embeddings",
    }


# --- the longest context ----------------------------------------------------------------


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_yarn_extends_the_context(key: str, name: str) -> None:
    rope = {name: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec = read_cache_spec(edited(QWEN25_7B, **{key: rope}))
    assert spec.max_model_len == 131072
    assert any("max_model_len = 131072" in line for line in spec.assumed)


@pytest.mark.parametrize(
    "rope",
    [
        None,
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "factor": 2.0},
    ],
)
def test_other_rotations_do_not(rope: object) -> None:
    assert read_cache_spec(edited(LLAMA, rope_scaling=rope)).max_model_len == 131072


@pytest.mark.parametrize("factor", ["4", True, 0.5, float("nan"), float("inf"), 10**400])
def test_a_yarn_factor_that_makes_no_sense_is_named(factor: object) -> None:
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 32768}
    with pytest.raises(ModelError, match=r"rope_scaling\.factor"):
        read_cache_spec(edited(LLAMA, rope_scaling=rope))


# --- the table --------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", sorted(READERS))
def test_every_architecture_in_the_table_reads_a_published_model(architecture: str) -> None:
    spec = read_cache_spec(shape_of(architecture, read_shapes()).config)
    assert [layer.layer_idx for layer in spec.layers] == list(range(spec.num_layers))
    assert any(layer.holds_kv for layer in spec.layers)


def test_every_shape_is_of_an_architecture_in_the_table() -> None:
    assert set(read_shapes()) <= set(READERS)
