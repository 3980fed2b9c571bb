from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.kvcache.policy import CachePolicy, Format, Fp8, Mantissa, Native, Scaling

HEADS = st.none() | st.lists(st.integers(0, 63), min_size=1, max_size=4).map(tuple)
FORMATS: st.SearchStrategy[Format] = (
    st.just(Native()) | st.builds(Fp8, st.sampled_from(Scaling), HEADS) | st.builds(Mantissa, HEADS)
)


@given(st.lists(FORMATS, max_size=8))
def test_words_decode_to_the_policy_they_came_from(formats: list[Format]) -> None:
    policy = CachePolicy(tuple(formats))
    assert CachePolicy.decode(policy.encode()) == policy


def test_the_words_are_stable() -> None:
    formats = (Native(), Fp8(Scaling.PER_HEAD), Fp8(Scaling.UNIT, (0, 2)), Mantissa(), Mantissa((1,)))
    assert CachePolicy(formats).encode() == ("native", "fp8:per_head", "fp8:unit@0,2", "mantissa", "mantissa@1")


@pytest.mark.parametrize("word", ["", "fp8", "fp8:per_token", "native@0", "mantissa@", "fp8:unit@x", "int8"])
def test_unknown_words_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        CachePolicy.decode([word])


def test_skip_layers_are_the_native_ones_ascending() -> None:
    policy = CachePolicy.fp8(5, Scaling.PER_HEAD, skip=(4, 1, 1))
    assert policy.skip_layers == (1, 4)
    assert policy.first_quantized_layer == 0
    assert policy.scaling is Scaling.PER_HEAD
    assert not policy.is_native


def test_native_quantizes_nothing() -> None:
    policy = CachePolicy.native(3)
    assert policy.is_native
    assert policy.skip_layers == (0, 1, 2)
    assert policy.first_quantized_layer == 3
    assert policy.scaling is None


def test_only_leaves_the_rest_native() -> None:
    policy = CachePolicy.only(4, (2,), Mantissa((0,)))
    assert policy.formats == (Native(), Native(), Mantissa((0,)), Native())
    assert policy.first_quantized_layer == 2


def test_mixed_scalings_have_no_common_one() -> None:
    assert CachePolicy((Fp8(Scaling.UNIT), Fp8(Scaling.PER_HEAD))).scaling is None


@pytest.mark.parametrize("layer_idx", [-1, 4])
def test_a_layer_that_does_not_exist_is_named(layer_idx: int) -> None:
    with pytest.raises(IndexError, match=f"layer {layer_idx} does not exist"):
        CachePolicy.fp8(4, Scaling.UNIT, skip=(layer_idx,))
    with pytest.raises(IndexError, match=f"layer {layer_idx} does not exist"):
        CachePolicy.only(4, (layer_idx,), Native())
