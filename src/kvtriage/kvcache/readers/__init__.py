"""config.json → CacheSpec, one attention family per file.

To add an architecture: write its family's file, or find the one that fits, and add a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.readers import full, interleaved, switched_window, uniform_window
from kvtriage.kvcache.readers.fields import HINT, Fields, describe
from kvtriage.kvcache.readers.refusals import refuse_unread_caches
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["READERS", "Reader", "read_cache_spec"]

Reader = Callable[[Fields], CacheSpec]

READERS: Mapping[str, Reader] = {
    "Cohere2ForCausalLM": interleaved.read_cohere2,
    "Exaone4ForCausalLM": interleaved.read_exaone4,
    "Gemma2ForCausalLM": interleaved.read_gemma2,
    "Gemma3ForCausalLM": interleaved.read_gemma3,
    "Gemma3ForConditionalGeneration": interleaved.read_gemma3_multimodal,
    "GemmaForCausalLM": full.read_gemma,
    "GptOssForCausalLM": interleaved.read_gpt_oss,
    "GraniteForCausalLM": full.read_full,
    "GraniteMoeForCausalLM": full.read_full,
    "LlamaForCausalLM": full.read_full,
    "Ministral3ForCausalLM": uniform_window.read_ministral3,
    "MistralForCausalLM": uniform_window.read_mistral,
    "MixtralForCausalLM": uniform_window.read_mixtral,
    "Olmo2ForCausalLM": full.read_full,
    "Olmo3ForCausalLM": interleaved.read_olmo3,
    "OlmoForCausalLM": full.read_full,
    "Phi3ForCausalLM": uniform_window.read_phi3,
    "Qwen2ForCausalLM": switched_window.read_qwen2,
    "Qwen2MoeForCausalLM": switched_window.read_qwen2_moe,
    "Qwen3ForCausalLM": switched_window.read_qwen3,
    "Qwen3MoeForCausalLM": switched_window.read_qwen3_moe,
    "SmolLM3ForCausalLM": switched_window.read_smollm3,
}


def read_cache_spec(config: Mapping[str, object]) -> CacheSpec:
    """The geometry of the cache, from a parsed config.json.

    Raises UnsupportedModel for an architecture or a kind of cache that is not read, and
    ModelError, naming the key, for one that is missing or makes no sense.
    """
    architecture = _architecture(config)
    fields = Fields(architecture, config)
    refuse_unread_caches(fields)
    if architecture not in READERS:
        raise UnsupportedModel(
            f"{architecture}, which config.json names in architectures, is not read by kvtriage",
            hint=f"it reads {', '.join(sorted(READERS))}",
        )
    return READERS[architecture](fields)


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
