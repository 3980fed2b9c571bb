"""What a checkpoint turns on by itself: the dtype that `--kv-cache-dtype auto` becomes, and why.

vLLM 0.32 resolves `auto` in two places. When the flags are read (utils/torch_utils.py:457-530) only ModelOpt's
words count: `kv_cache_scheme` or `kv_cache_quant_algo` in a quantization_config whose quant_method begins with
`modelopt`. An hf_quant_config.json takes its place where config.json has none (transformers_utils/config.py:892),
and gets its quant_method from its producer (transformers_utils/model_arch_config_convertor.py:263-303). When a layer
is built (model_executor/layers/attention/attention.py:287-291) a `kv_cache_scheme` of compressed-tensors counts, of a
text_config too; a latent layer does not ask (mla_attention.py:485-505). Nothing else does: `quant_method` fp8, awq,
gptq, mxfp4 and quark leave the cache as it is. An explicit dtype always wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.readers.fields import describe

__all__ = ["DeclaredCache", "ModelDtype", "read_declared_cache", "read_model_dtype"]

Json = Mapping[str, object]

MODELOPT_WORDS: Mapping[str, str] = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}
MODELOPT_METHODS: Mapping[str, str] = {
    "FP8": "modelopt",
    "FP8_PER_CHANNEL_PER_TOKEN": "modelopt",
    "FP8_PB_WO": "modelopt",
    "NVFP4": "modelopt_fp4",
}
LATENT_MODEL_TYPES = frozenset(
    (
        *("axk1", "bailing_hybrid", "deepseek_mtp", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note"),
        *("glm4_moe_lite", "glm5_next", "glm5_next_text", "glm_moe_dsa", "hy_v4", "kimi_k2", "kimi_linear"),
        *("longcat_flash", "pangu_ultra_moe"),
    )
)
"""Model types that vLLM serves with latent attention where kv_lora_rank is there
(transformers_utils/model_arch_config_convertor.py:318-346)."""
SIDE_FILE_UNSEEN = (
    "no hf_quant_config.json, ModelOpt's side file, was seen beside config.json: where the checkpoint has one, "
    "--kv-cache-dtype auto may become FP8"
)
SIDE_FILE_PASSED_OVER = (
    "config.json has a quantization_config of ModelOpt that names no dtype for the cache, and then vLLM 0.32 asks no "
    "hf_quant_config.json: --kv-cache-dtype auto stays as it is, whatever that file says"
)
"""transformers_utils/config.py:889-900."""
PACKED_BY_CLASS = frozenset(("DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"))


@dataclass(frozen=True)
class DeclaredCache:
    """`cache_dtype` is what `auto` becomes: 'auto' where the cache stays in the model's dtype.

    `because` says why in a sentence, `scaling` which scales the checkpoint brings along, if any. `said` is what
    else a user should know. With `refused` the engine does not start with this checkpoint.
    """

    cache_dtype: str
    because: str
    scaling: Scaling | None = None
    said: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def is_fp8(self) -> bool:
        """True when the cache is stored in FP8 without a flag."""
        return self.cache_dtype.startswith("fp8")


def read_declared_cache(config: Json, hf_quant_config: Json | None = None) -> DeclaredCache:
    """From config.json and ModelOpt's side file, where there is one. What makes no sense declares nothing."""
    said = _said_of_class(config)
    if not PACKED_BY_CLASS.isdisjoint(_architectures(config)):
        return DeclaredCache(
            "fp8_ds_mla",
            "the class of this model stores its cache in a packed FP8 of its own, with scales that it computes itself "
            "(models/deepseek_v4/attention.py:93-125)",
            said=("with --attention-backend FLASHINFER_MLA_SPARSE_DSV4, but for sm120, it stays in BF16",),
        )
    if hf_quant_config is None and config.get("quantization_config") is None:
        said = (*said, SIDE_FILE_UNSEEN)
    quantization, origin = _quantization(config, hf_quant_config)
    if quantization is None:
        return DeclaredCache("auto", "config.json states no quantisation", said=said)
    method = _method(quantization)
    if method is None:
        algo = _inner(quantization).get("quant_algo")
        return DeclaredCache(
            "auto",
            f"{origin} is of ModelOpt and states quant_algo {describe(algo)}",
            said=said,
            refused=f"vLLM does not know the ModelOpt quant_algo {describe(algo)} in this place "
            "(transformers_utils/model_arch_config_convertor.py:280-290)",
        )
    if method.startswith("modelopt"):
        return _of_modelopt(quantization, origin, said)
    if method == "compressed-tensors":
        return _of_compressed_tensors(config, quantization, origin, said)
    return DeclaredCache(
        "auto", f"{origin} is of {_plain(method) or 'an unnamed method'}, which switches no cache by itself", said=said
    )


def _quantization(config: Json, hf_quant_config: Json | None) -> tuple[Json | None, str]:
    """The object that counts, and where it stands."""
    stated = config.get("quantization_config")
    if isinstance(stated, Mapping):
        return stated, "quantization_config"
    if isinstance(hf_quant_config, Mapping):
        return hf_quant_config, "hf_quant_config.json"
    for holder, prefix in ((config, ""), (_text(config), "text_config.")):
        for key in ("quantization_config", "compression_config"):
            found = holder.get(key)
            if isinstance(found, Mapping):
                return found, prefix + key
    return None, ""


def _method(quantization: Json) -> str | None:
    """The quant_method as the engine rewrites it; None where it refuses to."""
    producer = quantization.get("producer")
    inner = quantization.get("quantization")
    by_modelopt = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    legacy = isinstance(inner, Mapping) and "modelopt_quant_config" in inner
    algo = inner.get("quant_algo") if isinstance(inner, Mapping) else None
    if (by_modelopt or legacy) and algo is not None:
        return MODELOPT_METHODS.get(str(algo).upper())
    stated = quantization.get("quant_method")
    return stated.lower().replace("compressed_tensors", "compressed-tensors") if isinstance(stated, str) else ""


def _inner(quantization: Json) -> Json:
    inner = quantization.get("quantization")
    return inner if isinstance(inner, Mapping) else quantization


def _of_modelopt(quantization: Json, origin: str, said: tuple[str, ...]) -> DeclaredCache:
    if origin.startswith("text_config.") or origin == "compression_config":
        return DeclaredCache("auto", f"{origin} is not where ModelOpt's words are looked for", said=said)
    inner = _inner(quantization)
    for holder, key in (
        *((inner, "kv_cache_scheme"), (quantization, "kv_cache_scheme")),
        *((inner, "kv_cache_quant_algo"), (quantization, "kv_cache_quant_algo")),
    ):
        if declared := holder.get(key):
            break
    else:
        alone = (SIDE_FILE_PASSED_OVER,) if origin == "quantization_config" else ()
        return DeclaredCache("auto", f"{origin} of ModelOpt names no dtype for the cache", said=(*said, *alone))
    word = _modelopt_word(declared)
    dtype = MODELOPT_WORDS.get(word)
    if dtype is None:
        return DeclaredCache("auto", f"{origin} has {key} {word}, which vLLM does not know and passes over", said=said)
    scaling = Scaling.PER_TENSOR if dtype == "fp8_e4m3" else None
    return DeclaredCache(dtype, f"{origin} of ModelOpt has {key} {word.upper()}", scaling, said)


def _modelopt_word(declared: object) -> str:
    """'fp8', 'nvfp4', or what it is else, in a few characters."""
    match declared:
        case str():
            return declared.lower()[:40]
        case {"num_bits": 8, "type": "float", "dynamic": False}:
            return "fp8"
        case {"num_bits": 4, "type": "float"}:
            return "nvfp4"
        case _:
            return describe(declared)


def _of_compressed_tensors(config: Json, quantization: Json, origin: str, said: tuple[str, ...]) -> DeclaredCache:
    scheme = quantization.get("kv_cache_scheme")
    if scheme is None:
        return DeclaredCache("auto", f"{origin} of compressed-tensors has no kv_cache_scheme", said=said)
    words = _scheme_words(scheme)
    if refused := _refused_scheme(scheme):
        return DeclaredCache("auto", f"{origin} has kv_cache_scheme {words}", said=said, refused=refused)
    per_head = isinstance(scheme, Mapping) and scheme.get("strategy") == "attn_head"
    scaling = Scaling.PER_HEAD if per_head else Scaling.PER_TENSOR
    because = f"{origin} of compressed-tensors has kv_cache_scheme {words}"
    if _is_latent(config):
        latent = "latent layers do not ask for the kv_cache_scheme: only --kv-cache-dtype fp8 makes their cache FP8"
        return DeclaredCache("auto", because, scaling, (*said, latent))
    return DeclaredCache("fp8", because, scaling, said)


def _scheme_words(scheme: object) -> str:
    """'num_bits 8, strategy tensor, type float'."""
    if not isinstance(scheme, Mapping):
        return describe(scheme)
    return ", ".join(f"{key} {_plain(value)}" for key, value in sorted(scheme.items()) if value is not None)


def _plain(value: object) -> str:
    return value[:40] if isinstance(value, str) and value.isprintable() else describe(value)


def _refused_scheme(scheme: object) -> str | None:
    """compressed_tensors.py:1103-1141."""
    match scheme:
        case {"num_bits": 8, "type": "float", "strategy": "tensor" | "attn_head", "symmetric": True}:
            return None
        case _:
            return (
                "vLLM takes a kv_cache_scheme of 8-bit float, strategy tensor or attn_head, and symmetric only "
                "(model_executor/layers/quantization/compressed_tensors/compressed_tensors.py:1103-1141)"
            )


def _said_of_class(config: Json) -> tuple[str, ...]:
    if "GlmMoeDsaForCausalLM" in _architectures(config):
        return (
            "on data-centre Blackwell (sm100) vLLM stores this model's cache in FP8 where no dtype is given "
            "(model_executor/models/config.py:43-55)",
        )
    return ()


def _is_latent(config: Json) -> bool:
    """As the engine tells: the text model's type, and a kv_lora_rank."""
    text = _text(config) or config
    return text.get("kv_lora_rank") is not None and _model_type(text) in LATENT_MODEL_TYPES


def _model_type(config: Json) -> str | None:
    stated = config.get("model_type")
    return stated if isinstance(stated, str) else None


def _architectures(config: Json) -> tuple[str, ...]:
    named = config.get("architectures")
    return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()


def _text(config: Json) -> Json:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else {}


# --- the model's own dtype --------------------------------------------------------------


@dataclass(frozen=True)
class ModelDtype:
    """`stated` is the checkpoint's word, None where only its weights can tell. `served` is what `--dtype auto` makes
    of it, and so what an unquantised cache is stored in; `element_bytes` are its bytes."""

    stated: str | None
    served: str
    because: str

    @property
    def element_bytes(self) -> int:
        return 4 if self.served == "float32" else 2


DTYPE_WORDS: Mapping[str, str] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
}
NO_FLOAT16 = frozenset(("gemma2", "gemma3", "gemma3_text", "glm4"))
"""Model types that vLLM does not serve in float16 (config/model.py:2380-2385)."""


def read_model_dtype(config: Json, *, has_bfloat16: bool = True) -> ModelDtype:
    """What the model and an unquantised cache are served in (config/model.py:2405-2446).

    config.json says `dtype` or, in older files, `torch_dtype`; a text_config or vision_config is asked where it does
    not, and then the weights are, which are not read here: BF16 is taken. float32 is served in BF16. `has_bfloat16`
    is False for GPUs before sm80.
    """
    stated = _stated_dtype(config)
    supported = ["bfloat16", "float16", "float32"] if has_bfloat16 else ["float16", "float32"]
    if _model_type(config) in NO_FLOAT16:
        supported.remove("float16")
    if stated is None:
        return ModelDtype(None, supported[0], "config.json states no dtype: the weights decide, BF16 is taken")
    if stated == "float32":
        return ModelDtype(stated, supported[0], "float32 is served in half the bytes")
    if stated in supported:
        return ModelDtype(stated, stated, "as config.json states")
    return ModelDtype(stated, supported[0], f"{stated} is not served here")


def _stated_dtype(config: Json) -> str | None:
    """transformers_utils/model_arch_config_convertor.py:223-241."""
    for key in ("", "text_config", "vision_config", "encoder_config"):
        holder = config.get(key) if key else config
        if not isinstance(holder, Mapping):
            continue
        for name in ("dtype", "torch_dtype"):
            word = holder.get(name)
            if isinstance(word, str) and word.removeprefix("torch.") in DTYPE_WORDS:
                return DTYPE_WORDS[word.removeprefix("torch.")]
    return None
