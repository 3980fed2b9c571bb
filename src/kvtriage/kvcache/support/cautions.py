"""What starts and is known to end badly, or is refused for the model's sake: cautions, one row each.

They are about the model, the scales and the GPU; which backends serve what is `backend_table`. Rows hold for vLLM
0.32.0. A source is file:line below vLLM's package folder, or a public issue.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from kvtriage.kvcache.policy import CachePolicy, Fp8, Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec
from kvtriage.kvcache.support.backend_choice import BackendChoice, Serving, layers_with_own_backend
from kvtriage.kvcache.support.gpus import Gpu, Platform

__all__ = ["CAUTIONS", "Caution", "Severity", "Subject"]


class Severity(enum.StrEnum):
    """REFUSED: the engine does not start. WARNED: it starts, and may end badly. SAID: good to know."""

    REFUSED = "refused"
    WARNED = "warned"
    SAID = "said"


@dataclass(frozen=True)
class Subject:
    """What a caution is asked about. Without a GPU there is no choice either."""

    spec: CacheSpec
    policy: CachePolicy
    gpu: Gpu | None
    serving: Serving
    choice: BackendChoice | None

    @property
    def fp8_layers(self) -> tuple[LayerSpec, ...]:
        formats = self.policy.formats
        return tuple(
            layer for layer in self.spec.layers if layer.holds_kv and isinstance(formats[layer.layer_idx], Fp8)
        )

    @property
    def has_static_scales(self) -> bool:
        return any(isinstance(fmt, Fp8) and fmt.scaling is not Scaling.UNIT for fmt in self.policy.formats)

    def is_on(self, *majors: int) -> bool:
        return self.gpu is not None and self.gpu.major in majors

    def is_on_platform(self, platform: Platform) -> bool:
        return self.gpu is not None and self.gpu.platform is platform

    def uses(self, backend: str) -> bool:
        return self.choice is not None and any(each.backend == backend for each in self.choice.by_layer)


@dataclass(frozen=True)
class Caution:
    """One row: `applies` says when, the rest is the finding."""

    severity: Severity
    applies: Callable[[Subject], bool]
    sentence: str
    source: str
    hint: str


NO_QK_NORM = frozenset(
    ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_audio", "step3p7")
)
"""Model types whose keys are known to pass 448 at scale 1."""
SCALES_NOT_LOADED = ("qwen3_5",)
ONE_KIND_OF_LAYER = frozenset(("mimo", "qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3"))
"""Model types whose class asserts that all layers slide or none does."""
WITHOUT_A_CLASS = frozenset(("baichuan", "llava_llama", "locateanything", "mllama", "mpt", "qwen"))
"""Model types that vLLM 0.32 no longer has, or never had, a class of its own for."""
SMALL_WINDOW = 1024


def _is_unit(subject: Subject) -> bool:
    return bool(subject.fp8_layers) and not subject.has_static_scales


def _shares_scaled_cache(subject: Subject) -> bool:
    shared = {layer.shares_with for layer in subject.spec.layers}
    return subject.has_static_scales and any(layer.layer_idx in shared for layer in subject.fp8_layers)


def _on_ampere(subject: Subject) -> bool:
    relies = bool(subject.fp8_layers) and subject.uses("FLASHINFER")
    return relies and subject.gpu is not None and 80 <= subject.gpu.sm < 89


def _own_class(subject: Subject) -> bool:
    return bool(layers_with_own_backend(subject.spec))


def _is_packed(subject: Subject) -> bool:
    return any(layer.compress_ratio is not None for layer in subject.spec.layers)


def _has_wide_heads_on_hopper(subject: Subject) -> bool:
    """The width of a latent is no head_dim, and its backends are others."""
    wide = (layer.kind is not LayerKind.LATENT and layer.head_dim >= 256 for layer in subject.fp8_layers)
    return subject.is_on(9) and any(wide)


def _drafts_on_sm89(subject: Subject) -> bool:
    drafts = bool(subject.spec.draft_layers) and bool(subject.fp8_layers)
    return drafts and subject.gpu is not None and subject.gpu.sm == 89


CAUTIONS: tuple[Caution, ...] = (
    Caution(
        Severity.REFUSED,
        lambda on: (
            on.spec.model_type in ONE_KIND_OF_LAYER and {LayerKind.FULL, LayerKind.SLIDING} <= set(on.spec.kinds)
        ),
        "this model's class raises where some of its layers slide and others do not",
        "models/qwen2.py:351-360",
        "serve a checkpoint whose use_sliding_window is off",
    ),
    Caution(
        Severity.SAID,
        lambda on: on.spec.model_type in WITHOUT_A_CLASS,
        "vLLM 0.32 has no class of its own for this model: the figures are its rules, applied to what the model keeps",
        "model_executor/models/registry.py:799-853",
        "an older release may have one",
    ),
    Caution(
        Severity.REFUSED,
        lambda on: _is_packed(on) and on.policy.is_native,
        "this model's class stores its cache in packed FP8 and refuses another dtype",
        "models/deepseek_v4/attention.py:106-117",
        "give --kv-cache-dtype fp8; a server with FLASHINFER_MLA_SPARSE_DSV4 can keep BF16, which is not modelled here",
    ),
    Caution(
        Severity.REFUSED,
        lambda on: (
            on.serving.cache_dtype == "fp8_e5m2"
            and on.serving.declared is not None
            and bool(on.serving.declared.scaling)
        ),
        "fp8_e5m2 is refused for a checkpoint with KV-cache scales",
        "model_executor/layers/attention/attention.py:205-219",
        "give --kv-cache-dtype fp8",
    ),
    Caution(
        Severity.WARNED,
        lambda on: on.serving.cache_dtype == "fp8_e5m2" and bool(on.fp8_layers),
        "E5M2 has 2 bits of mantissa and no calibrated scales; FP8 checkpoints are refused with it",
        "vllm#41343, #8409",
        "give --kv-cache-dtype fp8, which is E4M3",
    ),
    Caution(
        Severity.SAID,
        lambda on: (
            any(layer.kind is LayerKind.LATENT for layer in on.fp8_layers) and on.policy.scaling is Scaling.PER_HEAD
        ),
        "latent layers have one vector for all heads: scales per head are one scale there",
        "model_executor/layers/attention/mla_attention.py:483",
        "per_tensor says the same",
    ),
    Caution(
        Severity.WARNED,
        lambda on: bool(on.fp8_layers) and on.is_on(9) and on.uses("FLASH_ATTN_DIFFKV"),
        "with K and V of different width and attention sinks Hopper goes to FlashAttention 4, whose FP8 there is for "
        "heads of 512; nothing refuses it beforehand",
        "v1/attention/backends/flash_attn_diffkv.py:75-89, fa_utils.py:124-147",
        "try one request, or serve with TRITON_ATTN_DIFFKV, whose figures are not modelled here",
    ),
    Caution(
        Severity.WARNED,
        lambda on: on.uses("CUTLASS_MLA") and on.has_static_scales,
        "CUTLASS_MLA raises at the first request unless scales of Q and K are 1",
        "v1/attention/backends/mla/cutlass_mla.py:258-262",
        "leave --attention-backend out, or serve at scale 1",
    ),
    Caution(
        Severity.SAID,
        lambda on: (bool(on.fp8_layers) and on.uses("FLASHMLA_SPARSE")) or on.uses("FLASHINFER_MLA_SPARSE_SM120"),
        "the cache becomes fp8_ds_mla here (on sm120 under auto too): 656 bytes a position for a width of 576, with "
        "scales of its own, and the checkpoint's are not used",
        "model_executor/layers/attention/mla_attention.py:358-375",
        "FP8 is priced so; on sm120 ask for FP8 also where auto serves",
    ),
    Caution(
        Severity.WARNED,
        lambda on: _is_unit(on) and on.spec.model_type in NO_QK_NORM,
        "without calibrated scales the keys of this family pass 448, E4M3's largest number, and are cut off",
        "vllm#11906, HabanaAI/vllm-fork#1598, verl#4435, Avarok/atlas#136",
        "calibrate: per-tensor scales are enough for it",
    ),
    Caution(
        Severity.WARNED,
        lambda on: on.has_static_scales and on.spec.model_type.startswith(SCALES_NOT_LOADED),
        "the scales in the checkpoint were reported not to be loaded for this family: served at 1 without an error",
        "vllm#54623",
        "read the live scales back before you trust a figure",
    ),
    Caution(
        Severity.WARNED,
        _shares_scaled_cache,
        "layers that read another's cache keep scale 1, whatever scale the cache was written with",
        "model_executor/layers/attention/attention.py:133-153, vllm#55559",
        "serve at scale 1, or skip the layers whose cache is shared",
    ),
    Caution(
        Severity.WARNED,
        _on_ampere,
        "FP8 before sm89 rests on FLASHINFER alone: where it is not installed the engine refuses, and reports differ",
        "vllm#26431, #7714; model_executor/layers/attention/attention.py:207",
        "start it once before you plan with it",
    ),
    Caution(
        Severity.WARNED,
        _has_wide_heads_on_hopper,
        "with heads of 256 and more FP8 was slower on Hopper: the time to the first token grew 1.6 times",
        "vllm#48786",
        "measure the time to the first token as well as the time between tokens",
    ),
    Caution(
        Severity.SAID,
        lambda on: any(
            layer.kind is LayerKind.SLIDING and (layer.window_tokens or 0) <= SMALL_WINDOW for layer in on.fp8_layers
        ),
        "sliding layers of small windows have little to win from FP8 in what they hold, and may be the slower for it; "
        "in the engine's line they weigh more, for it reserves them room for the tokens in flight as well",
        "vllm#33695, v1/kv_cache_interface.py:859-885",
        "try --kv-cache-dtype-skip-layers sliding_window, and compare its speed and its line with these",
    ),
    Caution(
        Severity.WARNED,
        _drafts_on_sm89,
        "FP8 with this checkpoint's own drafter (MTP) was reported to end in an illegal access on sm89",
        "vllm#44879",
        "try one long request before you serve, or leave speculative decoding out",
    ),
    Caution(
        Severity.WARNED,
        lambda on: on.is_on_platform(Platform.XPU) and bool(on.fp8_layers),
        "FP8 was 30 to 46 % slower on Intel GPUs",
        "intel/llm-scaler#666",
        "measure; nothing is predicted for them here",
    ),
    Caution(
        Severity.WARNED,
        lambda on: on.is_on_platform(Platform.CPU) and bool(on.fp8_layers),
        "FP8 on a CPU needs AVX-512 or AMX, else the engine raises when it is built",
        "v1/attention/backends/cpu_attn.py:540-543",
        "look for avx512f in /proc/cpuinfo",
    ),
    Caution(
        Severity.WARNED,
        lambda on: (
            not on.is_on_platform(Platform.CUDA)
            and on.gpu is not None
            and on.policy.scaling is Scaling.PER_HEAD
            and any(layer.num_kv_heads > 1 for layer in on.fp8_layers)
        ),
        "scales per head are for CUDA's FlashAttention; kernels elsewhere read one scale",
        "v1/attention/backends/flash_attn.py:410-412, vllm#40444",
        "use per-tensor scales",
    ),
    Caution(
        Severity.SAID,
        lambda on: on.is_on_platform(Platform.ROCM) and on.has_static_scales,
        "on MI300 FP8 is e4m3fnuz: the engine doubles each scale, for stored numbers are half as large",
        "model_executor/layers/quantization/kv_cache.py:120-122, platforms/rocm.py:1188-1197",
        "scales are written as for other GPUs",
    ),
    Caution(
        Severity.SAID,
        _own_class,
        "layers of this model have an attention backend of their own class, which is not checked here",
        "models/deepseek_v4/nvidia/model.py:1013-1044, models/minimax_m3/common/sparse_attention.py:525-592",
        "start it once",
    ),
    Caution(
        Severity.SAID,
        lambda on: (
            on.spec.model_type.startswith(("gemma3", "gemma4")) and not on.serving.with_images and on.is_on(9, 10)
        ),
        "where this model is given images it attends to them in both directions and takes another backend",
        "transformers_utils/model_arch_config_convertor.py:364-386, platforms/cuda.py:136-165",
        "serve text alone (vLLM has --limit-mm-per-prompt for it): with images the backend is not checked here",
    ),
)
