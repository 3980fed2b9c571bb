"""Config.json contents of models with latent attention: only what is read, as their authors publish it."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["DEEPSEEK_V2_LITE", "DEEPSEEK_V3", "DEEPSEEK_V4_FLASH", "DEEPSEEK_V32", "GLM_52", "KIMI_K25", "MINICPM3"]

DEEPSEEK_V3: Mapping[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "rope_scaling": {"factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"},
}

DEEPSEEK_V2_LITE: Mapping[str, object] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 2048,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_scaling": {"factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"},
}

KIMI_K25: Mapping[str, object] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {
        "model_type": "kimi_k2",
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 262144,
        "rope_scaling": {"factor": 64.0, "original_max_position_embeddings": 4096, "type": "yarn"},
    },
}

DEEPSEEK_V32: Mapping[str, object] = {
    **DEEPSEEK_V3,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}

GLM_52: Mapping[str, object] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 192,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "index_skip_topk_offset": 3,
    "indexer_types": [
        "full",
        "full",
        "full",
        *["shared", "shared", "shared", "full"] * 18,
        "shared",
        "shared",
        "shared",
    ],
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1048576,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}

DEEPSEEK_V4_FLASH: Mapping[str, object] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1048576,
    "rope_scaling": {"factor": 16, "original_max_position_embeddings": 65536, "type": "yarn"},
}

MINICPM3: Mapping[str, object] = {
    "architectures": ["MiniCPM3ForCausalLM"],
    "num_hidden_layers": 62,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "hidden_size": 2560,
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "max_position_embeddings": 32768,
}
