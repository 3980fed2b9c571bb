"""Which backend vLLM takes, for the models and GPUs that people have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvtriage.kvcache.declared import DeclaredCache
from kvtriage.kvcache.policy import CachePolicy, Mantissa, Scaling
from kvtriage.kvcache.spec import CacheSpec, Compressor, IndexKeys, LayerKind, LayerSpec
from kvtriage.kvcache.support.backend_choice import BackendChoice, Serving, pick_backend
from kvtriage.kvcache.support.gpus import GPUS, find_gpu
from tests.unit.kvcache.models import GPT_OSS_20B, layer, spec_of

LLAMA = spec_of(*(layer(idx, heads=32, kv_heads=8, head_dim=128) for idx in range(4)))
GPT_OSS = replace(GPT_OSS_20B, model_type="gpt_oss")


def heads_of(head_dim: int, head_dim_v: int | None = None) -> CacheSpec:
    return spec_of(layer(0, heads=32, kv_heads=8, head_dim=head_dim, head_dim_v=head_dim_v))


def latent(head_dim: int = 576, *, sparse: bool = False) -> CacheSpec:
    beside = (IndexKeys(132),) if sparse else ()
    return spec_of(LayerSpec(0, LayerKind.LATENT, 128, 1, head_dim, 0, beside=beside))


def pick(spec: CacheSpec, gpu: str, scaling: Scaling | None = Scaling.PER_TENSOR, **serving: object) -> BackendChoice:
    layers = spec.num_layers
    policy = CachePolicy.native(layers) if scaling is None else CachePolicy.fp8(layers, scaling)
    return pick_backend(spec, policy, find_gpu(gpu), replace(Serving(), **serving))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpu", "native", "fp8"),
    [
        ("v100", "TRITON_ATTN", "TRITON_ATTN raises"),
        ("t4", "TRITON_ATTN", "TRITON_ATTN raises"),
        ("a100", "FLASH_ATTN", "FLASHINFER"),
        ("a10g", "FLASH_ATTN", "FLASHINFER"),
        ("l4", "FLASH_ATTN", "FLASHINFER"),
        ("h100", "FLASH_ATTN", "FLASH_ATTN"),
        ("b200", "FLASHINFER", "FLASHINFER"),
        ("rtx-5090", "FLASH_ATTN", "FLASHINFER"),
        ("mi300x", "ROCM_ATTN", "ROCM_ATTN"),
        ("xpu", "FLASH_ATTN", "FLASH_ATTN"),
        ("cpu", "CPU_ATTN", "CPU_ATTN"),
    ],
)
def test_full_attention_with_heads_of_128(gpu: str, native: str, fp8: str) -> None:
    assert told(pick(LLAMA, gpu, None)) == native
    assert told(pick(LLAMA, gpu)) == fp8


def told(choice: BackendChoice) -> str:
    (only,) = choice.by_layer
    return f"{only.backend} raises" if only.fails else str(only.backend)


@pytest.mark.parametrize(
    ("gpu", "serves"),
    [("a100", False), ("l40s", False), ("h100", True), ("h200", True), ("b200", True), ("rtx-5090", False)],
)
def test_one_scale_per_head_is_for_flash_attention_3_and_4(gpu: str, serves: bool) -> None:
    assert pick(LLAMA, gpu).serves_per_head is serves
    per_head = pick(LLAMA, gpu, Scaling.PER_HEAD)
    assert per_head.serves is serves
    assert per_head.name == ("FLASH_ATTN" if serves else None)


@pytest.mark.parametrize(
    ("gpu", "head_dim", "per_tensor", "per_head"),
    [
        ("h100", 96, "FLASH_ATTN", True),
        ("h100", 256, "FLASH_ATTN", True),
        ("h100", 512, "FLASH_ATTN", True),
        ("h100", 320, "TRITON_ATTN", False),
        ("b200", 96, "FLASH_ATTN", True),
        ("b200", 256, "FLASHINFER", False),
        ("l4", 96, "TRITON_ATTN", False),
        ("a100", 96, "TRITON_ATTN raises", False),
    ],
)
def test_head_dims(gpu: str, head_dim: int, per_tensor: str, per_head: bool) -> None:
    choice = pick(heads_of(head_dim), gpu)
    assert told(choice) == per_tensor
    assert choice.serves_per_head is per_head


@pytest.mark.parametrize(
    ("head_dim", "gpu", "fp8", "version"),
    [(128, "h100", False, 3), (512, "h100", True, 4), (128, "a100", False, 2), (96, "b200", True, 4)],
)
def test_flash_attention_version(head_dim: int, gpu: str, fp8: bool, version: int) -> None:
    (only,) = pick(heads_of(head_dim), gpu, Scaling.UNIT if fp8 else None).by_layer
    assert (only.backend, only.flash_attn_version) == ("FLASH_ATTN", version)


@pytest.mark.parametrize(
    ("gpu", "fp8"),
    [
        ("a100", "TRITON_ATTN raises"),
        ("l4", "TRITON_ATTN"),
        ("h100", "FLASH_ATTN"),
        ("b200", "FLASHINFER"),
        ("rtx-pro-6000", "FLASHINFER"),
    ],
)
def test_attention_sinks(gpu: str, fp8: str) -> None:
    choices = pick(GPT_OSS, gpu).by_layer
    assert {f"{each.backend} raises" if each.fails else each.backend for each in choices} == {fp8}


@pytest.mark.parametrize(
    ("gpu", "native", "fp8"),
    [
        ("a100", "TRITON_MLA", "TRITON_MLA raises"),
        ("l4", "TRITON_MLA", "TRITON_MLA"),
        ("h100", "FLASH_ATTN_MLA", "FLASHMLA"),
        ("b200", "FLASHINFER_MLA", "FLASHINFER_MLA"),
        ("rtx-5090", "TRITON_MLA", "TRITON_MLA"),
    ],
)
def test_latent_attention(gpu: str, native: str, fp8: str) -> None:
    assert told(pick(latent(), gpu, None)) == native
    assert told(pick(latent(), gpu)) == fp8
    assert not pick(latent(), gpu).serves_per_head


def test_latents_of_another_width_go_to_triton() -> None:
    assert told(pick(latent(288), "h100")) == "TRITON_MLA"


@pytest.mark.parametrize(
    ("gpu", "native", "fp8", "fp8_e4m3"),
    [
        ("a100", "None", "None", "None"),
        ("h100", "FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM90"),
        ("b200", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE"),
        ("rtx-5090", *["FLASHINFER_MLA_SPARSE_SM120"] * 3),
    ],
)
def test_latent_attention_with_an_index(gpu: str, native: str, fp8: str, fp8_e4m3: str) -> None:
    spec = latent(sparse=True)
    assert told(pick(spec, gpu, None)) == native
    assert told(pick(spec, gpu)) == fp8
    assert told(pick(spec, gpu, cache_dtype="fp8_e4m3")) == fp8_e4m3


def test_a_skipped_layer_may_get_another_backend() -> None:
    policy = CachePolicy.fp8(4, Scaling.PER_TENSOR, skip=[2])
    choice = pick_backend(LLAMA, policy, find_gpu("l4"))
    assert {each.layers: each.backend for each in choice.by_layer} == {(0, 1, 3): "FLASHINFER", (2,): "FLASH_ATTN"}
    assert choice.name == "FLASHINFER"


def test_images_in_both_directions() -> None:
    assert told(pick(heads_of(128), "h100", with_images=True)) == "TRITON_ATTN"
    assert told(pick(heads_of(256), "h100", with_images=True)) == "TRITON_FLASH_ATTN"
    assert told(pick(heads_of(256), "b200", with_images=True)) == "TRITON_FLASHINFER"
    assert not pick(heads_of(128), "h100", with_images=True).serves_per_head


@pytest.mark.parametrize(
    ("gpu", "fp8"),
    [
        ("a100", "TRITON_ATTN_DIFFKV raises"),
        ("l4", "TRITON_ATTN_DIFFKV"),
        ("h100", "FLASH_ATTN_DIFFKV"),
        ("b200", "FLASH_ATTN_DIFFKV raises"),
        ("mi300x", "TRITON_ATTN_DIFFKV"),
    ],
)
def test_k_and_v_of_different_width(gpu: str, fp8: str) -> None:
    assert told(pick(heads_of(192, 128), gpu)) == fp8


def test_e5m2_is_for_flashinfer_and_triton() -> None:
    assert told(pick(LLAMA, "h100", cache_dtype="fp8_e5m2")) == "FLASHINFER"
    assert told(pick(latent(), "h100", cache_dtype="fp8_e5m2")) == "None"


def test_a_backend_that_is_asked_for_is_the_only_one_tried() -> None:
    (refused,) = pick(LLAMA, "l4", backend="FLASH_ATTN").by_layer
    assert (refused.backend, [each.backend for each in refused.passed_over]) == (None, ["FLASH_ATTN"])
    assert told(pick(LLAMA, "l4", backend="TRITON_ATTN")) == "TRITON_ATTN"
    assert told(pick(LLAMA, "cpu", backend="TRITON_ATTN")) == "CPU_ATTN"
    assert told(pick(heads_of(192, 128), "h100", backend="TRITON_ATTN")) == "FLASH_ATTN_DIFFKV"


def test_a_backend_for_the_other_kind_of_attention_is_refused() -> None:
    assert not pick(latent(), "h100", backend="FLASH_ATTN").serves
    assert not pick(LLAMA, "h100", backend="FLASHMLA").serves
    assert not pick(latent(), "h100", backend="FLASHMLA_SPARSE").serves


def test_a_checkpoint_with_scales_per_head_needs_the_backend_under_bf16_too() -> None:
    declared = DeclaredCache("fp8", "a scheme", Scaling.PER_HEAD)
    assert not pick(LLAMA, "a100", None, declared=declared).serves
    assert pick(LLAMA, "h100", None, declared=declared).serves


def test_classes_with_a_backend_of_their_own_are_left_out() -> None:
    indexed = replace(layer(1), beside=(IndexKeys(128),))
    assert pick(spec_of(layer(0), indexed), "h100").by_layer[0].layers == (0,)
    packed = replace(latent().layers[0], compress_ratio=4, beside=(Compressor(4, 512),))
    choice = pick(replace(latent(), layers=(packed,)), "h100")
    assert (choice.by_layer, choice.name, choice.serves_per_head) == ((), None, False)


@pytest.mark.parametrize("scaling", [None, Scaling.PER_TENSOR, Scaling.PER_HEAD])
def test_a_layer_does_not_look_through_all_others(scaling: Scaling | None) -> None:
    passes = []

    class Counted(tuple[LayerSpec, ...]):
        def __iter__(self) -> Iterator[LayerSpec]:
            passes.append(len(self))
            return super().__iter__()

    for count in (4, 400):
        plain = heads_of(128).layers[0]
        layers = Counted(replace(plain, layer_idx=idx) for idx in range(count))
        pick(CacheSpec("llama", layers, 8_192), "H100", scaling)
    assert passes.count(4) == passes.count(400) > 0


def test_layers_without_attention_ask_for_nothing() -> None:
    spec = spec_of(layer(0), LayerSpec(1, LayerKind.STATE, 0, 0, 0, 0))
    assert [each.layers for each in pick(spec, "h100").by_layer] == [(0,)]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_bf16_is_served_everywhere_but_for_an_index_before_hopper(gpu: object) -> None:
    name = next(known.name for known in GPUS if known is gpu)
    assert pick(LLAMA, name, None).serves
    assert pick(GPT_OSS, name, None).serves
    assert pick(latent(), name, None).serves


def test_a_probe_cannot_be_served() -> None:
    with pytest.raises(ValueError, match="probe"):
        pick_backend(LLAMA, CachePolicy.only(4, [0], Mantissa()), find_gpu("h100"))
