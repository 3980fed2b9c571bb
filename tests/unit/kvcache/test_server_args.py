from __future__ import annotations

from dataclasses import replace

import pytest

from kvtriage.kvcache.policy import CachePolicy, Fp8, Mantissa, Native, Scaling
from kvtriage.kvcache.server_args import skip_entries, vllm_args
from kvtriage.kvcache.skip_words import read_skip_words
from kvtriage.kvcache.spec import LayerKind
from tests.unit.kvcache.models import GPT_OSS_20B, layer, spec_of

SLIDING = GPT_OSS_20B.layers_of(LayerKind.SLIDING)


@pytest.mark.parametrize("scaling", [Scaling.UNIT, Scaling.PER_TENSOR])
def test_all_fp8(scaling: Scaling) -> None:
    assert vllm_args(CachePolicy.fp8(24, scaling), GPT_OSS_20B, None) == ("--kv-cache-dtype", "fp8")


def test_per_head_scales_name_the_one_backend_that_takes_them() -> None:
    args = vllm_args(CachePolicy.fp8(24, Scaling.PER_HEAD), GPT_OSS_20B, None)
    assert args == ("--kv-cache-dtype", "fp8", "--attention-backend", "FLASH_ATTN")


def test_with_one_kv_head_any_backend_serves() -> None:
    spec = spec_of(layer(0, kv_heads=1), layer(1, 4, kv_heads=1))
    assert vllm_args(CachePolicy.fp8(2, Scaling.PER_HEAD), spec, None) == ("--kv-cache-dtype", "fp8")
    spec = spec_of(layer(0, kv_heads=1), layer(1, 4, kv_heads=2))
    assert vllm_args(CachePolicy.fp8(2, Scaling.PER_HEAD), spec, None)[2:] == ("--attention-backend", "FLASH_ATTN")


def test_native_names_its_dtype_because_auto_follows_the_checkpoint() -> None:
    assert vllm_args(CachePolicy.native(24), GPT_OSS_20B, "model") == ("model", "--kv-cache-dtype", "bfloat16")
    assert vllm_args(CachePolicy.native(24), GPT_OSS_20B, None, "float16") == ("--kv-cache-dtype", "float16")


def test_some_layers_go_by_index() -> None:
    assert vllm_args(CachePolicy.fp8(24, Scaling.PER_HEAD, (5, 0)), GPT_OSS_20B, "model") == (
        "model",
        "--kv-cache-dtype",
        "fp8",
        "--kv-cache-dtype-skip-layers",
        "0",
        "5",
        "--attention-backend",
        "FLASH_ATTN",
    )


def test_exactly_the_sliding_layers_go_by_name() -> None:
    args = vllm_args(CachePolicy.fp8(24, Scaling.PER_TENSOR, SLIDING), GPT_OSS_20B, None)
    assert args[-2:] == ("--kv-cache-dtype-skip-layers", "sliding_window")


@pytest.mark.parametrize("skip", [SLIDING[1:], (*SLIDING, 1)])
def test_other_sets_never_go_by_that_name(skip: tuple[int, ...]) -> None:
    args = vllm_args(CachePolicy.fp8(24, Scaling.UNIT, skip), GPT_OSS_20B, None)
    assert args[3:] == tuple(str(idx) for idx in sorted(skip))


SHARED = spec_of(layer(0, 4), layer(1), replace(layer(2, 4), shares_with=0), replace(layer(3), shares_with=1))


@pytest.mark.parametrize(
    ("skip", "words"),
    [((0,), ("sliding_window",)), ((0, 2), ("sliding_window",)), ((1,), ("1", "3")), ((0, 3), ("sliding_window",))],
)
def test_a_layer_that_reads_anothers_cache_goes_with_it(skip: tuple[int, ...], words: tuple[str, ...]) -> None:
    entries = skip_entries(CachePolicy.fp8(4, Scaling.UNIT, skip), SHARED)
    assert entries == words
    assert read_skip_words(entries, SHARED).said == ()


def test_every_layer_sliding_and_skipped_is_native() -> None:
    spec = spec_of(layer(0, 4), layer(1, 4))
    assert vllm_args(CachePolicy.fp8(2, Scaling.UNIT, (0, 1)), spec, None) == ("--kv-cache-dtype", "bfloat16")


@pytest.mark.parametrize(
    "policy",
    [
        CachePolicy((Mantissa(), Native())),
        CachePolicy((Fp8(Scaling.UNIT), Mantissa())),
        CachePolicy((Fp8(Scaling.UNIT, (0,)), Native())),
        CachePolicy((Fp8(Scaling.UNIT), Fp8(Scaling.PER_HEAD))),
        CachePolicy.native(3),
    ],
)
def test_what_no_server_can_apply_is_refused(policy: CachePolicy) -> None:
    with pytest.raises(ValueError, match=r"cannot be served|layers and the model"):
        vllm_args(policy, spec_of(layer(0), layer(1)), None)
