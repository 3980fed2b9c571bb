"""config.json → CacheSpec, one attention family per file.

To add an architecture: write its family's file, or find the one that fits, and add a line here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.readers import (
    block_configs,
    block_sparse,
    chunked,
    cross,
    exaone,
    full,
    interleaved,
    latent,
    latent_compressed,
    latent_sparse,
    latent_unfolded,
    multimodal,
    older,
    recurrent_conv,
    recurrent_delta,
    recurrent_latent,
    recurrent_mamba,
    shared_kv,
    switched_window,
    two_geometries,
    uniform_window,
)
from kvtriage.kvcache.readers.absurd import refuse_absurd_sizes
from kvtriage.kvcache.readers.fields import HINT, Fields, describe
from kvtriage.kvcache.readers.refusals import refuse_unread_caches
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["READERS", "Reader", "read_cache_spec"]


NEAR = 0.75
"""From here on, names are alike enough to be worth showing (of 1, as difflib counts)."""


@dataclass(frozen=True)
class Reader:
    """`read` makes the spec. `also` are the keys, of those that announce an unusual cache, that it understands:
    any other such key in a config.json refuses it."""

    read: Callable[[Fields], CacheSpec]
    also: tuple[str, ...] = ()


READERS: Mapping[str, Reader] = {
    "ArceeForCausalLM": Reader(full.read_full),
    "BaichuanForCausalLM": Reader(older.read_baichuan),
    "BailingMoeV2_5ForCausalLM": Reader(recurrent_latent.read_bailing_linear, recurrent_latent.UNDERSTOOD),
    "BailingMoeV3ForCausalLM": Reader(recurrent_latent.read_bailing_v3, recurrent_latent.UNDERSTOOD),
    "ChatGLMForConditionalGeneration": Reader(older.read_chatglm),
    "ChatGLMModel": Reader(older.read_chatglm),
    "Cohere2ForCausalLM": Reader(interleaved.read_cohere2),
    "DbrxForCausalLM": Reader(full.read_dbrx),
    "DeciLMForCausalLM": Reader(block_configs.read_decilm, block_configs.UNDERSTOOD),
    "DeepseekV2ForCausalLM": Reader(latent.read_latent_dense, latent.UNDERSTOOD),
    "DeepseekV32ForCausalLM": Reader(latent_sparse.read_latent_sparse, latent_sparse.UNDERSTOOD),
    "DeepseekV3ForCausalLM": Reader(latent.read_latent_dense, latent.UNDERSTOOD),
    "DeepseekV4ForCausalLM": Reader(latent_compressed.read_latent_compressed, latent_compressed.UNDERSTOOD),
    "Exaone4ForCausalLM": Reader(exaone.read_exaone4),
    "Exaone4_5_ForConditionalGeneration": Reader(exaone.read_exaone4_5),
    "ExaoneMoEForCausalLM": Reader(exaone.read_exaone_moe),
    "ExaoneMoeForCausalLM": Reader(exaone.read_exaone_moe),
    "FalconForCausalLM": Reader(older.read_falcon),
    "FalconH1ForCausalLM": Reader(recurrent_mamba.read_falcon_h1, recurrent_mamba.UNDERSTOOD),
    "GPT2LMHeadModel": Reader(older.read_gpt2),
    "GPTBigCodeForCausalLM": Reader(older.read_gpt_bigcode),
    "GPTNeoXForCausalLM": Reader(full.read_full),
    "Gemma2ForCausalLM": Reader(interleaved.read_gemma2),
    "Gemma3ForCausalLM": Reader(interleaved.read_gemma3),
    "Gemma3ForConditionalGeneration": Reader(interleaved.read_gemma3_multimodal),
    "Gemma3nForCausalLM": Reader(shared_kv.read_gemma3n, shared_kv.UNDERSTOOD),
    "Gemma3nForConditionalGeneration": Reader(shared_kv.read_gemma3n_multimodal, shared_kv.UNDERSTOOD),
    "Gemma4ForCausalLM": Reader(shared_kv.read_gemma4, shared_kv.UNDERSTOOD),
    "Gemma4ForConditionalGeneration": Reader(shared_kv.read_gemma4_multimodal, shared_kv.UNDERSTOOD),
    "Gemma4UnifiedForConditionalGeneration": Reader(shared_kv.read_gemma4_unified, shared_kv.UNDERSTOOD),
    "GemmaForCausalLM": Reader(full.read_gemma),
    "Glm4ForCausalLM": Reader(full.read_glm),
    "Glm4MoeForCausalLM": Reader(full.read_glm4_moe),
    "Glm4MoeLiteForCausalLM": Reader(latent.read_latent_dense, latent.UNDERSTOOD),
    "Glm4vForConditionalGeneration": Reader(multimodal.read_glm4v),
    "GlmForCausalLM": Reader(full.read_glm),
    "GlmMoeDsaForCausalLM": Reader(latent_sparse.read_latent_sparse, latent_sparse.UNDERSTOOD),
    "GptOssForCausalLM": Reader(interleaved.read_gpt_oss),
    "GraniteForCausalLM": Reader(full.read_full),
    "GraniteMoeForCausalLM": Reader(full.read_full),
    "GraniteMoeHybridForCausalLM": Reader(recurrent_mamba.read_granite_hybrid, recurrent_mamba.UNDERSTOOD),
    "HunYuanDenseV1ForCausalLM": Reader(full.read_hunyuan),
    "HunYuanMoEV1ForCausalLM": Reader(full.read_hunyuan),
    "Idefics3ForConditionalGeneration": Reader(multimodal.read_text_config),
    "InternLM2ForCausalLM": Reader(full.read_full),
    "InternLM3ForCausalLM": Reader(full.read_full),
    "InternVLChatModel": Reader(multimodal.read_llm_config),
    "InternVLForConditionalGeneration": Reader(multimodal.read_text_config),
    "JambaForCausalLM": Reader(recurrent_mamba.read_jamba, recurrent_mamba.UNDERSTOOD),
    "KimiK25ForConditionalGeneration": Reader(latent.read_latent_dense_multimodal, latent.UNDERSTOOD),
    "KimiK3ForConditionalGeneration": Reader(recurrent_latent.read_kimi_linear_multimodal, recurrent_latent.UNDERSTOOD),
    "KimiLinearForCausalLM": Reader(recurrent_latent.read_kimi_linear, recurrent_latent.UNDERSTOOD),
    "KimiVLForConditionalGeneration": Reader(latent.read_latent_dense_multimodal, latent.UNDERSTOOD),
    "Lfm2ForCausalLM": Reader(recurrent_conv.read_lfm2, recurrent_conv.UNDERSTOOD),
    "Lfm2MoeForCausalLM": Reader(recurrent_conv.read_lfm2_moe, recurrent_conv.UNDERSTOOD),
    "Lfm2VlForConditionalGeneration": Reader(recurrent_conv.read_lfm2_multimodal, recurrent_conv.UNDERSTOOD),
    "Llama4ForCausalLM": Reader(chunked.read_llama4, chunked.UNDERSTOOD),
    "Llama4ForConditionalGeneration": Reader(chunked.read_llama4_multimodal, chunked.UNDERSTOOD),
    "LlamaForCausalLM": Reader(full.read_full),
    "LlavaForConditionalGeneration": Reader(multimodal.read_text_config),
    "LlavaLlamaModel": Reader(multimodal.read_llm_cfg),
    "LlavaNextForConditionalGeneration": Reader(multimodal.read_text_config),
    "LlavaOnevisionForConditionalGeneration": Reader(multimodal.read_text_config),
    "LocateAnythingForConditionalGeneration": Reader(multimodal.read_text_config),
    "MPTForCausalLM": Reader(older.read_mpt),
    "MiMoForCausalLM": Reader(switched_window.read_mimo),
    "MiMoV2FlashForCausalLM": Reader(two_geometries.read_mimo_v2, two_geometries.UNDERSTOOD),
    "MiMoV2ForCausalLM": Reader(two_geometries.read_mimo_v2, two_geometries.UNDERSTOOD),
    "MiniCPM3ForCausalLM": Reader(latent_unfolded.read_minicpm3, latent_unfolded.UNDERSTOOD),
    "MiniCPMForCausalLM": Reader(full.read_full),
    "MiniCPMV": Reader(multimodal.read_minicpmv),
    "MiniCPMV4_6ForConditionalGeneration": Reader(recurrent_delta.read_minicpmv4_6, recurrent_delta.UNDERSTOOD),
    "MiniMaxM2ForCausalLM": Reader(full.read_minimax_m2),
    "MiniMaxM3ForCausalLM": Reader(block_sparse.read_minimax_m3, block_sparse.UNDERSTOOD),
    "MiniMaxM3SparseForCausalLM": Reader(block_sparse.read_minimax_m3, block_sparse.UNDERSTOOD),
    "MiniMaxM3SparseForConditionalGeneration": Reader(block_sparse.read_minimax_m3_multimodal, block_sparse.UNDERSTOOD),
    "Ministral3ForCausalLM": Reader(uniform_window.read_ministral3),
    "Mistral3ForConditionalGeneration": Reader(uniform_window.read_mistral3_multimodal),
    "MistralForCausalLM": Reader(uniform_window.read_mistral),
    "MixtralForCausalLM": Reader(uniform_window.read_mixtral),
    "MllamaForConditionalGeneration": Reader(cross.read_mllama, also=("cross_attention_layers",)),
    "MolmoForCausalLM": Reader(full.read_full),
    "MptForCausalLM": Reader(older.read_mpt),
    "NemotronHForCausalLM": Reader(recurrent_mamba.read_nemotron_h, recurrent_mamba.UNDERSTOOD),
    "OPTForCausalLM": Reader(full.read_full),
    "Olmo2ForCausalLM": Reader(full.read_full),
    "Olmo3ForCausalLM": Reader(interleaved.read_olmo3),
    "OlmoForCausalLM": Reader(full.read_full),
    "OlmoHybridForCausalLM": Reader(recurrent_delta.read_olmo_hybrid, recurrent_delta.UNDERSTOOD),
    "OlmoeForCausalLM": Reader(full.read_full),
    "Phi3ForCausalLM": Reader(uniform_window.read_phi3),
    "PhiForCausalLM": Reader(full.read_full),
    "PhiMoEForCausalLM": Reader(uniform_window.read_phimoe),
    "PhimoeForCausalLM": Reader(uniform_window.read_phimoe),
    "QWenLMHeadModel": Reader(older.read_qwen),
    "Qwen2AudioForConditionalGeneration": Reader(multimodal.read_text_config),
    "Qwen2ForCausalLM": Reader(switched_window.read_qwen2),
    "Qwen2MoeForCausalLM": Reader(switched_window.read_qwen2_moe),
    "Qwen2VLForConditionalGeneration": Reader(multimodal.read_qwen2_vl),
    "Qwen2_5_VLForConditionalGeneration": Reader(multimodal.read_qwen2_vl),
    "Qwen3ForCausalLM": Reader(switched_window.read_qwen3),
    "Qwen3MoeForCausalLM": Reader(switched_window.read_qwen3_moe),
    "Qwen3NextForCausalLM": Reader(recurrent_delta.read_qwen3_next, recurrent_delta.UNDERSTOOD),
    "Qwen3VLForConditionalGeneration": Reader(multimodal.read_qwen3_vl),
    "Qwen3VLMoeForConditionalGeneration": Reader(multimodal.read_qwen3_vl_moe),
    "Qwen3_5ForCausalLM": Reader(recurrent_delta.read_qwen3_5, recurrent_delta.UNDERSTOOD),
    "Qwen3_5ForConditionalGeneration": Reader(recurrent_delta.read_qwen3_5_multimodal, recurrent_delta.UNDERSTOOD),
    "Qwen3_5MoeForCausalLM": Reader(recurrent_delta.read_qwen3_5, recurrent_delta.UNDERSTOOD),
    "Qwen3_5MoeForConditionalGeneration": Reader(recurrent_delta.read_qwen3_5_multimodal, recurrent_delta.UNDERSTOOD),
    "SeedOssForCausalLM": Reader(full.read_seed_oss),
    "SmolLM3ForCausalLM": Reader(switched_window.read_smollm3),
    "SmolVLMForConditionalGeneration": Reader(multimodal.read_text_config),
    "StableLmForCausalLM": Reader(full.read_stablelm),
    "Starcoder2ForCausalLM": Reader(uniform_window.read_mixtral),
    "Step3p5ForCausalLM": Reader(two_geometries.read_step3, two_geometries.UNDERSTOOD),
    "Step3p7FlashForCausalLM": Reader(two_geometries.read_step3, two_geometries.UNDERSTOOD),
    "Step3p7ForConditionalGeneration": Reader(two_geometries.read_step3_multimodal, two_geometries.UNDERSTOOD),
}


def read_cache_spec(config: Mapping[str, object]) -> CacheSpec:
    """The geometry of the cache, from a parsed config.json.

    Raises UnsupportedModel for an architecture or a kind of cache that is not read, and
    ModelError, naming the key, for one that is missing or makes no sense; also for sizes that no model has.
    """
    architecture = _architecture(config)
    fields = Fields(architecture, config)
    reader = READERS.get(architecture)
    refuse_unread_caches(fields, () if reader is None else reader.also)
    if reader is None:
        raise UnsupportedModel(
            f"{architecture}, which config.json names in architectures, is not read by kvtriage",
            hint=_unread(architecture),
        )
    spec = reader.read(fields)
    refuse_absurd_sizes(spec)
    return spec


def _unread(architecture: str) -> str:
    """Names that are nearly this one, if any, and where to look."""
    stems = {name: _stem(name) for name in sorted(READERS)}
    close = difflib.get_close_matches(_stem(architecture), stems.values(), n=3, cutoff=NEAR)
    near = [name for name, stem in stems.items() if stem in close][:3]
    meant = f"near by name, and perhaps of another shape: {', '.join(near)}; " if near else ""
    return (
        f"{meant}docs/reference/models.md has all {len(READERS)} that are read; where you know the layers, "
        "'kvtriage plan --cases' takes them as layer_runs (docs/reference/capacity.md)"
    )


def _stem(architecture: str) -> str:
    """'Llama' of 'LlamaForCausalLM': what classes of every model end in makes no two of them alike."""
    return architecture.partition("For")[0].removesuffix("Model")


def _architecture(config: object) -> str:
    """The first entry of `architectures`."""
    if not isinstance(config, Mapping):
        raise ModelError(f"config.json is {describe(config)}, not an object", hint=HINT)
    named = config.get("architectures")
    if not isinstance(named, list) or not named:
        raise ModelError("config.json names no architecture: it has no list under architectures", hint=HINT)
    first = named[0]
    if not isinstance(first, str) or not first.isidentifier() or len(first) > 100:
        raise ModelError(f"config.json names {describe(first)} as its architecture", hint=HINT)
    return first
