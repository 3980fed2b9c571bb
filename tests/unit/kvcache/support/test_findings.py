"""Refusals and cautions, in the words a user gets."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kvtriage.kvcache.declared import DeclaredCache
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.spec import CacheSpec, Compressor, IndexKeys, LayerKind, LayerSpec
from kvtriage.kvcache.support.backend_choice import Serving
from kvtriage.kvcache.support.backend_table import RULES
from kvtriage.kvcache.support.cautions import CAUTIONS, Severity
from kvtriage.kvcache.support.findings import Finding, check_support
from kvtriage.kvcache.support.gpus import GPUS, Gpu, find_gpu
from kvtriage.kvcache.versions import EngineVersion
from tests.unit.kvcache.models import GPT_OSS_20B, layer, spec_of

LLAMA = spec_of(*(layer(idx, heads=32, kv_heads=8, head_dim=128) for idx in range(4)))
GPT_OSS = replace(GPT_OSS_20B, model_type="gpt_oss")
LATENT = spec_of(LayerSpec(0, LayerKind.LATENT, 128, 1, 576, 0))
SPARSE = spec_of(LayerSpec(0, LayerKind.LATENT, 128, 1, 576, 0, beside=(IndexKeys(132),)))
PACKED = spec_of(
    LayerSpec(0, LayerKind.LATENT, 64, 1, 512, 0, window_tokens=128, compress_ratio=4, beside=(Compressor(4, 512),))
)
SHARED = spec_of(layer(0, head_dim=64), replace(layer(1, head_dim=64), shares_with=0))


def check(
    spec: CacheSpec, gpu: str | None, scaling: Scaling | None = Scaling.PER_TENSOR, serving: Serving | None = None
) -> tuple[Finding, ...]:
    layers = spec.num_layers
    policy = CachePolicy.native(layers) if scaling is None else CachePolicy.fp8(layers, scaling)
    return check_support(spec, policy, None if gpu is None else find_gpu(gpu), serving)


def refusals(findings: tuple[Finding, ...]) -> list[Finding]:
    return [finding for finding in findings if finding.severity is Severity.REFUSED]


def test_nothing_is_said_of_what_is_known_to_work() -> None:
    assert check(LLAMA, "h100") == ()
    assert check(LLAMA, "a100", None) == ()


def test_fp8_on_turing_is_refused_with_the_dtype_to_take() -> None:
    (refusal,) = refusals(check(LLAMA, "t4"))
    assert (
        refusal.sentence
        == "TRITON_ATTN is taken for layers 0, 1, 2 and 1 more on T4 (sm75) and raises: its FP8 needs sm89"
    )
    assert refusal.hint == "give --kv-cache-dtype float16, or use a GPU of sm89 or later"
    assert "triton_attn.py" in refusal.source


def test_fp8_with_sinks_on_ampere_is_refused() -> None:
    found = refusals(check(GPT_OSS, "a100"))
    assert len(found) == 1
    assert "sm80" in found[0].sentence
    assert "bfloat16" in found[0].hint


def test_scales_per_head_without_flash_attention_3_are_refused_by_every_backend() -> None:
    (refusal,) = refusals(check(LLAMA, "l40s", Scaling.PER_HEAD))
    together = (
        "(FLASH_ATTN, FLASHINFER, TRITON_ATTN, FLEX_ATTENTION: scales per head are for FlashAttention 3 and 4 alone)"
    )
    assert together in refusal.sentence
    assert refusal.hint.startswith("use per-tensor scales; a checkpoint of strategy attn_head does not start there")


def test_what_refuses_all_layers_alike_is_said_once_and_the_hint_helps() -> None:
    """Neither the skipped layers nor the others are served; per tensor they would not be either."""
    policy = CachePolicy.fp8(GPT_OSS.num_layers, Scaling.PER_HEAD, GPT_OSS.layers_of(LayerKind.SLIDING))
    (refusal,) = refusals(check_support(GPT_OSS, policy, find_gpu("a100")))
    assert refusal.sentence.startswith("no attention backend serves layers 0, 1, 2 and 21 more on A100 80 GB (sm80) (")
    assert refusal.sentence.count("scales per head") == 1
    assert len(refusal.sentence) < 3 * 80
    assert refusal.hint == "give --kv-cache-dtype bfloat16, or use a GPU of sm89 or later"


def test_each_backend_has_one_reason() -> None:
    (refusal,) = refusals(check(SPARSE, "a100", Scaling.UNIT))
    assert refusal.sentence.count("it is for Hopper") == 2
    assert refusal.sentence.count("FLASHMLA_SPARSE:") == 1


def test_scales_per_head_for_heads_of_256_on_blackwell() -> None:
    wide = spec_of(layer(0, heads=8, kv_heads=4, head_dim=256))
    (refusal,) = refusals(check(wide, "b200", Scaling.PER_HEAD))
    assert refusal.hint == "use per-tensor scales"


def test_a_backend_that_was_asked_for_and_cannot() -> None:
    (refusal,) = refusals(check(LLAMA, "l4", serving=Serving(backend="FLASH_ATTN")))
    assert refusal.hint == "leave --attention-backend out"
    assert "FlashAttention 3 on Hopper" in refusal.sentence


def test_an_index_before_hopper_is_refused() -> None:
    (refusal,) = refusals(check(SPARSE, "a100", None))
    assert refusal.sentence.startswith("no attention backend serves layer 0 on A100 80 GB (sm80)")
    assert refusal.hint.startswith("use another GPU")


def test_without_a_gpu_that_is_said() -> None:
    (said,) = check(LLAMA, None)
    assert (said.severity, said.hint) == (Severity.SAID, "name one: --gpu h100-80g")


def test_another_version_is_said() -> None:
    (said,) = check(LLAMA, "h100", serving=Serving(version=EngineVersion(0, 25, 0)))
    assert (said.severity, "0.25.0" in said.sentence) == (Severity.SAID, True)


def of_type(model_type: str, spec: CacheSpec = LLAMA) -> CacheSpec:
    return replace(spec, model_type=model_type)


WIDE = spec_of(layer(0, heads=8, kv_heads=4, head_dim=256))
DIFFERENT = spec_of(layer(0, heads=64, kv_heads=4, head_dim=192, head_dim_v=128))
E5M2 = Serving(cache_dtype="fp8_e5m2")
WITH_SCALES = replace(E5M2, declared=DeclaredCache("fp8", "a scheme", Scaling.PER_TENSOR))
CUTLASS = Serving(backend="CUTLASS_MLA")
DRAFTED = replace(LLAMA, draft_layers=(layer(4),))


@pytest.mark.parametrize(
    ("spec", "gpu", "scaling", "serving", "words"),
    [
        (PACKED, "h100", None, None, "packed FP8"),
        (LLAMA, "h100", Scaling.UNIT, WITH_SCALES, "refused for a checkpoint with KV-cache scales"),
        (LLAMA, "h100", Scaling.UNIT, E5M2, "2 bits of mantissa"),
        (LATENT, "h100", Scaling.PER_HEAD, None, "one vector for all heads"),
        (DIFFERENT, "h100", Scaling.UNIT, None, "K and V of different width"),
        (LATENT, "b200", Scaling.PER_TENSOR, CUTLASS, "unless scales of Q and K are 1"),
        (SPARSE, "h100", Scaling.UNIT, None, "fp8_ds_mla"),
        (SPARSE, "rtx-5090", None, None, "under auto too"),
        (of_type("qwen2"), "h100", Scaling.UNIT, None, "pass 448"),
        (of_type("qwen3_5_text"), "h100", Scaling.PER_TENSOR, None, "not to be loaded"),
        (SHARED, "h100", Scaling.PER_TENSOR, None, "keep scale 1"),
        (LLAMA, "a100", Scaling.UNIT, None, "FLASHINFER alone"),
        (WIDE, "h100", Scaling.UNIT, None, "slower on Hopper"),
        (GPT_OSS, "h100", Scaling.UNIT, None, "small windows"),
        (DRAFTED, "l4", Scaling.UNIT, None, "illegal access"),
        (LLAMA, "xpu", Scaling.UNIT, None, "Intel"),
        (LLAMA, "cpu", Scaling.UNIT, None, "AVX-512"),
        (LLAMA, "cpu", Scaling.PER_HEAD, None, "kernels elsewhere read one scale"),
        (LLAMA, "mi300x", Scaling.PER_TENSOR, None, "doubles each scale"),
        (PACKED, "h100", Scaling.UNIT, None, "of their own class"),
        (of_type("gemma3_text"), "h100", Scaling.UNIT, None, "both directions"),
        (of_type("qwen3", GPT_OSS_20B), "h100", None, None, "raises where some of its layers slide"),
        (of_type("baichuan"), "h100", None, None, "no class of its own"),
    ],
)
def test_each_caution(spec: CacheSpec, gpu: str, scaling: Scaling | None, serving: Serving | None, words: str) -> None:
    assert any(words in finding.sentence for finding in check(spec, gpu, scaling, serving))


@pytest.mark.parametrize(
    ("spec", "gpu", "scaling", "words"),
    [
        (of_type("qwen2"), "h100", Scaling.PER_TENSOR, "pass 448"),
        (of_type("qwen3"), "h100", Scaling.UNIT, "pass 448"),
        (SHARED, "h100", Scaling.UNIT, "keep scale 1"),
        (WIDE, "h100", None, "slower on Hopper"),
        (WIDE, "b200", Scaling.UNIT, "slower on Hopper"),
        (GPT_OSS, "h100", None, "small windows"),
        (LATENT, "h100", Scaling.UNIT, "heads of 256"),
        (SPARSE, "h100", Scaling.UNIT, "heads of 256"),
        (SPARSE, "h100", None, "fp8_ds_mla"),
        (PACKED, "h100", Scaling.UNIT, "refuses another dtype"),
        (of_type("qwen3"), "h100", None, "raises where some of its layers slide"),
        (GPT_OSS, "h100", None, "raises where some of its layers slide"),
    ],
)
def test_cautions_stay_away_where_they_do_not_apply(
    spec: CacheSpec, gpu: str, scaling: Scaling | None, words: str
) -> None:
    assert not any(words in finding.sentence for finding in check(spec, gpu, scaling))


def test_refusals_come_first() -> None:
    severities = [finding.severity for finding in check(of_type("qwen2"), "t4", Scaling.UNIT)]
    assert severities == [Severity.REFUSED, Severity.WARNED]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_gpu_is_answered(gpu: Gpu) -> None:
    for spec in (LLAMA, GPT_OSS, LATENT, SPARSE, PACKED, SHARED, DIFFERENT):
        for scaling in (None, *Scaling):
            for finding in check(spec, gpu.name, scaling):
                assert finding.sentence
                assert finding.hint


def test_every_row_has_a_source() -> None:
    place = re.compile(r"\.py:\d+|#\d+")
    assert all(place.search(rule.source) for rule in RULES)
    assert all(place.search(caution.source) for caution in CAUTIONS)
