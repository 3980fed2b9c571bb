"""Live layers against policies: every difference ends the study with the layer's name."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest

from kvtriage.engines.base import Arm
from kvtriage.engines.info import EngineInfo
from kvtriage.engines.vllm.metrics import CacheConfig
from kvtriage.engines.vllm.observer import LiveLayer
from kvtriage.engines.vllm.readback import (
    applied_from_config,
    applied_from_layers,
    check_config,
    check_live,
    doubts,
    say_readback,
)
from kvtriage.errors import PolicyNotApplied
from kvtriage.fp8.scales import LayerScales, ScaleSet
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.stages.arms import check_applied
from tests.unit.stages.fake_case import hybrid

SPEC = hybrid(kv_heads=4)
COUNT = SPEC.num_layers
PER_HEAD = ScaleSet(
    Scaling.PER_HEAD,
    tuple(
        LayerScales(i, q=(0.5, 0.25, 0.75, 0.125), k=(0.1, 0.2, 0.3, 0.4), v=(0.5, 0.6, 0.7, 0.8)) for i in range(COUNT)
    ),
)
PER_TENSOR = ScaleSet(Scaling.PER_TENSOR, tuple(LayerScales(i, (0.5,), (0.25,), (0.125,)) for i in range(COUNT)))
INFO = EngineInfo("vllm", "0.32.0", "cpu", "fake.Backend", "storage", "float32", "bfloat16", 1, True)


def native(layer_idx: int) -> LiveLayer:
    return LiveLayer(
        name=f"model.layers.{layer_idx}",
        layer_idx=layer_idx,
        kv_cache_dtype="auto",
        cache_dtype="bfloat16",
        num_kv_heads=4,
        k_scale=(1.0,),
        v_scale=(1.0,),
        q_scale=(1.0,),
        backend="fake.Backend",
        heads=(0, 1, 2, 3),
        query_heads=(0, 1, 2, 3),
        per_head_scales=True,
    )


def fp8(layer_idx: int, scales: ScaleSet = PER_HEAD) -> LiveLayer:
    own = scales.layers[layer_idx]
    return msgspec.structs.replace(
        native(layer_idx), kv_cache_dtype="fp8", cache_dtype="uint8", k_scale=own.k, v_scale=own.v, q_scale=own.q
    )


def half(live: LiveLayer, rank: int) -> LiveLayer:
    """What one of two ranks holds."""
    own = slice(2 * rank, 2 * rank + 2)
    return msgspec.structs.replace(
        live,
        num_kv_heads=2,
        heads=(0, 1, 2, 3)[own],
        query_heads=(0, 1, 2, 3)[own],
        k_scale=live.k_scale[own] if len(live.k_scale) > 1 else live.k_scale,
        v_scale=live.v_scale[own] if len(live.v_scale) > 1 else live.v_scale,
        q_scale=live.q_scale[own] if len(live.q_scale) > 1 else live.q_scale,
    )


ARM = Arm("per head", CachePolicy.fp8(COUNT, Scaling.PER_HEAD, (2,)), PER_HEAD)
LAYERS = tuple(native(i) if i == 2 else fp8(i) for i in range(COUNT))


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_or_two_the_scales_are_those_of_the_file(ranks: int) -> None:
    split = [LAYERS] if ranks == 1 else [tuple(half(live, rank) for live in LAYERS) for rank in (1, 0)]
    check_live(ARM, SPEC, split)
    found = applied_from_layers(ARM, SPEC, split, None)
    check_applied(ARM, found, INFO, SPEC)
    assert found.k_scales[0] == (0.1, 0.2, 0.3, 0.4)
    assert found.dtypes[2] == "bfloat16"
    assert say_readback(ARM, found) == "per head: 5 of 6 layers carry the scales of the file, 1 are BF16 as planned"
    whole = Arm("all", CachePolicy.fp8(COUNT, Scaling.PER_HEAD), PER_HEAD)
    stored = applied_from_layers(whole, SPEC, [tuple(fp8(i) for i in range(COUNT))], None)
    assert say_readback(whole, stored) == "all: 6 of 6 layers carry the scales of the file"


def test_heads_that_are_on_several_ranks_count_once() -> None:
    one = tuple(msgspec.structs.replace(live, heads=(0, 1, 2, 3)) for live in LAYERS)
    found = applied_from_layers(ARM, SPEC, [one, one], None)
    check_applied(ARM, found, INFO, SPEC)


@pytest.mark.parametrize("first", [0, 1])
def test_copies_of_a_head_that_differ_are_found_whichever_comes_last(first: int) -> None:
    wrong = (msgspec.structs.replace(LAYERS[0], k_scale=(0.1, 0.2, 0.3, 0.41)), *LAYERS[1:])
    ranks = [LAYERS, wrong] if first == 0 else [wrong, LAYERS]
    with pytest.raises(PolicyNotApplied, match="k_scale of layer 0, head 3 differs between ranks"):
        applied_from_layers(ARM, SPEC, ranks, None)


def test_heads_on_ranks_of_their_own_may_have_one_scale() -> None:
    same = ScaleSet(
        Scaling.PER_HEAD, tuple(LayerScales(i, (0.5,) * 4, (0.25,) * 4, (0.125,) * 4) for i in range(COUNT))
    )
    arm = Arm("per head", CachePolicy.fp8(COUNT, Scaling.PER_HEAD), same)
    ranks = [
        tuple(
            msgspec.structs.replace(
                fp8(i), num_kv_heads=1, heads=(rank,), query_heads=(rank,), k_scale=(0.25,), v_scale=(0.125,)
            )
            for i in range(COUNT)
        )
        for rank in range(4)
    ]
    check_applied(arm, applied_from_layers(arm, SPEC, ranks, None), INFO, SPEC)
    whole = tuple(msgspec.structs.replace(fp8(i), k_scale=(0.25,), v_scale=(0.125,)) for i in range(COUNT))
    with pytest.raises(PolicyNotApplied, match="layer 0"):
        check_applied(arm, applied_from_layers(arm, SPEC, [whole], None), INFO, SPEC)


def test_a_scale_for_all_heads_is_one_number_however_it_is_held() -> None:
    arm = Arm("per tensor", CachePolicy.fp8(COUNT, Scaling.PER_TENSOR), PER_TENSOR)
    one = tuple(fp8(i, PER_TENSOR) for i in range(COUNT))
    spread = tuple(msgspec.structs.replace(live, k_scale=live.k_scale * 4, v_scale=live.v_scale * 4) for live in one)
    for layers in (one, spread):
        check_applied(arm, applied_from_layers(arm, SPEC, [layers], None), INFO, SPEC)


def test_query_scales_are_read_where_queries_are_quantised() -> None:
    layers = tuple(msgspec.structs.replace(live, quantizes_q=True) for live in LAYERS)
    found = applied_from_layers(ARM, SPEC, [layers], None)
    check_applied(ARM, found, dataclasses.replace(INFO, numerics="attention"), SPEC)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"k_scale": (1.0,), "v_scale": (1.0,)}, "layer 0 runs on default scales of 1.0"),
        ({"k_scale": (0.1, 0.2, 0.0, 0.4)}, "the live k_scale of layer 0"),
        ({"v_scale": (0.1, 0.2, math.nan, 0.4)}, "the live v_scale of layer 0"),
        ({"q_scale": ()}, "the live q_scale of layer 0"),
        ({"k_scale_float": 1.0}, "layer 0 has a k_scale of 0.4, and 1.0 for kernels that take one number"),
        ({"v_scale_float": 0.8000001}, "layer 0 has a v_scale of 0.8, and 0.8000001 for"),
        ({"cache_dtype": "bfloat16"}, "layer 0 says fp8 and its cache is bfloat16"),
        ({"per_head_scales": False}, "layer 0 holds scales per head, and its backend fake.Backend reads a single one"),
        ({"shares_with": 1, "k_scale": (0.9, 0.9, 0.9, 0.8)}, "layer 0 reads the cache of layer 1"),
        ({"unsupported": "latent attention"}, "latent attention"),
        ({"layer_idx": 99}, "the server has a layer 99"),
    ],
)
def test_every_difference_is_named(change: dict[str, object], says: str) -> None:
    layers = (msgspec.structs.replace(LAYERS[0], **change), *LAYERS[1:])
    with pytest.raises(PolicyNotApplied, match="arm 'per head'") as caught:
        check_live(ARM, SPEC, [layers])
    assert says in caught.value.message


def test_a_scale_that_is_not_the_files_is_found() -> None:
    layers = (*LAYERS[:4], msgspec.structs.replace(LAYERS[4], k_scale=(0.1, 0.2, 0.3, 0.41)), LAYERS[5])
    with pytest.raises(PolicyNotApplied, match="layer 4"):
        check_applied(ARM, applied_from_layers(ARM, SPEC, [layers], None), INFO, SPEC)


def test_fp8_of_vllms_own_cpu_backend_is_doubted() -> None:
    stock = {"backend": "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"}
    layers = [msgspec.structs.replace(live, **stock) for live in LAYERS]
    assert ["towards zero" in doubt for doubt in doubts([layers])] == [True]
    assert list(doubts([[layers[2]], LAYERS])) == [], "BF16 is not rounded to E4M3, and no other backend truncates"


def test_a_layer_that_is_not_there_is_named() -> None:
    with pytest.raises(PolicyNotApplied, match="no attention layer 5"):
        applied_from_layers(ARM, SPEC, [LAYERS[:5]], None)


def test_ranks_that_differ_are_refused() -> None:
    other = (msgspec.structs.replace(LAYERS[0], cache_dtype="bfloat16"), *LAYERS[1:])
    with pytest.raises(PolicyNotApplied, match="layer 0 is stored differently"):
        applied_from_layers(ARM, SPEC, [LAYERS, other], None)


def test_without_the_extension_the_flags_tell_the_dtypes() -> None:
    config = CacheConfig("fp8", ("sliding_window",), None)
    found = applied_from_config(ARM, SPEC, config, "bfloat16")
    assert found.dtypes == tuple("float8_e4m3fn" if i % 3 == 2 else "bfloat16" for i in range(COUNT))
    assert say_readback(ARM, found).endswith("their scales could not be read back")


@pytest.mark.parametrize(("dtype", "native_arm"), [("auto", False), ("bfloat16", False), ("fp8", True)])
def test_flags_of_another_arm_are_refused(dtype: str, native_arm: bool) -> None:
    arm = Arm("bf16", CachePolicy.native(COUNT)) if native_arm else ARM
    with pytest.raises(PolicyNotApplied, match=f"the server's cache dtype is {dtype}"):
        check_config(arm, CacheConfig(dtype, (), None))
