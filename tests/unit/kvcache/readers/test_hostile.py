"""A config.json is a stranger's file: every answer is a spec that can be priced or one sentence, and quick."""

from __future__ import annotations

import copy
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtriage.errors import ModelError
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.readers import READERS, read_cache_spec
from kvtriage.kvcache.readers.fields import describe
from kvtriage.kvcache.spec import CacheSpec
from tests.unit.kvcache.readers.configs import GPT_OSS_20B, LLAMA, edited, read_or_refuse
from tests.unit.kvcache.readers.shapes import read_shapes, shape_of

NUMBERS = [True, False, "32", -1, 0, 1.0, float("nan"), float("inf"), 10**9, 10**30, 10**5000, [32], {"a": 1}]
SHAPES = read_shapes()
ARCHITECTURES = sorted(READERS)
Path = tuple[str | int, ...]


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def places(value: object, at: Path = ()) -> Iterator[Path]:
    """Where something stands, at any depth; of a long list its first and its last entry."""
    if at:
        yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list) and value:
        for index in {0, len(value) - 1}:
            yield from places(value[index], (*at, index))


def damaged(config: dict[str, Any], at: Path, value: object) -> dict[str, Any]:
    """A copy with another value at one place; with ... the place is taken out."""
    copied = copy.deepcopy(config)
    holder: Any = copied
    for step in at[:-1]:
        holder = holder[step]
    if value is ...:
        del holder[at[-1]]
    else:
        holder[at[-1]] = value
    return copied


def check_sane(answer: CacheSpec | ModelError) -> None:
    """One printable sentence and a hint; or a cache with sizes that are sizes, and a price."""
    if isinstance(answer, ModelError):
        assert answer.message.isprintable()
        assert answer.hint
        assert len(answer.message) < 600
        return
    assert 1 <= answer.num_layers <= 10_000
    assert type(answer.max_model_len) is int
    assert answer.max_model_len >= 1
    for layer in (*answer.layers, *answer.draft_layers):
        for number in (layer.num_attention_heads, layer.num_kv_heads, layer.head_dim, layer.head_dim_v):
            assert type(number) is int
            assert 0 <= number <= 2**24
        assert layer.num_kv_heads == 0 or layer.num_attention_heads % layer.num_kv_heads == 0
        assert not layer.holds_kv or layer.retained_positions(100) > 0
        assert layer.side_bytes(100) >= 0
        assert layer.shares_with is None or 0 <= layer.shares_with < layer.layer_idx
    check_prices(answer)


def check_prices(spec: CacheSpec) -> None:
    """FP8 saves at most half and never costs more; a longer text never holds less; a skip never saves."""
    native = CachePolicy.native(spec.num_layers)
    fp8 = CachePolicy.fp8(spec.num_layers, Scaling.PER_HEAD)
    first_skipped = CachePolicy.fp8(spec.num_layers, Scaling.PER_HEAD, skip=(0,))
    holds_something = any(layer.holds_kv or layer.beside for layer in spec.layers)
    before = 0
    for length in (1, 200, 32768):
        full, narrow, mixed = (
            price_policy(spec, policy, (length,)).policy_bytes for policy in (native, fp8, first_skipped)
        )
        assert full <= 2 * narrow
        assert narrow <= mixed <= full
        assert before <= full
        before = full
    assert (before > 0) == holds_something


# --- one thing wrong --------------------------------------------------------------------


@pytest.mark.parametrize("value", NUMBERS, ids=describe)
@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"])
def test_a_number_that_is_none_is_named_and_described(key: str, value: object) -> None:
    with pytest.raises(ModelError) as caught:
        read_cache_spec(edited(GPT_OSS_20B, **{key: value}))
    assert caught.value.message.startswith(f"{key} in config.json is ")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 150


def test_a_thousand_million_layers_are_refused_before_they_are_built() -> None:
    config = edited(LLAMA, num_hidden_layers=10**9)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"num_hidden_layers in config\.json is 1000000000"):
            read_cache_spec(config)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 2**20


@pytest.mark.parametrize("config", [None, [], "x", 3, [LLAMA]])
def test_not_an_object(config: Any) -> None:
    with pytest.raises(ModelError, match=r"config\.json is .*, not an object"):
        read_cache_spec(config)


@pytest.mark.parametrize("text", ["", "\ud800", "a\nb", "x" * 10**6, "\x1b[31m"], ids=lambda text: describe(text)[:20])
def test_text_that_cannot_be_printed_is_not(text: str) -> None:
    for key in ("model_type", "architectures", "layer_types"):
        value: object = text if key == "model_type" else [text] * (1 if key == "architectures" else 24)
        with pytest.raises(ModelError) as caught:
            read_cache_spec(edited(GPT_OSS_20B, **{key: value}))
        assert caught.value.message.isprintable()
        assert len(caught.value.message.encode("ascii")) < 200


# --- every architecture, every place ----------------------------------------------------

HOSTILE: list[object] = [
    ...,
    None,
    True,
    False,
    -1,
    0,
    1.5,
    1e308,
    float("nan"),
    float("-inf"),
    10**9,
    10**5000,
    "",
    "\ud800",
    "x\n" * 1000,
    [],
    {},
    [[]],
    nested(100_000),
    ["full_attention"] * 10**6,
    [10**9],
    {"a": {}},
]


@pytest.mark.parametrize("architecture", sorted(SHAPES))
def test_each_hostile_value_at_each_place(architecture: str) -> None:
    shape = shape_of(architecture, SHAPES)
    for at in places(shape.config):
        holder: Any = shape.config
        for step in at[:-1]:
            holder = holder[step]
        kept = holder[at[-1]]
        for value in HOSTILE[1:]:
            holder[at[-1]] = value
            check_sane(read_or_refuse(shape.config))
        holder[at[-1]] = kept
        check_sane(read_or_refuse(damaged(shape.config, at, ...)))


@pytest.mark.parametrize("architecture", sorted(SHAPES))
def test_the_worst_is_answered_without_a_hang(architecture: str) -> None:
    """A million entries and a nesting without end, wherever they stand. The limit is on the processor's time."""
    shape = shape_of(architecture, SHAPES)
    deep, long = nested(100_000), ["full_attention"] * 10**6
    start = time.process_time()
    for key in list(shape.config):
        for value in (deep, long, {"a": deep}):
            kept, shape.config[key] = shape.config[key], value
            check_sane(read_or_refuse(shape.config))
            shape.config[key] = kept
    assert time.process_time() - start < 10


# --- anything ---------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-5, 5000)
    | st.integers()
    | st.sampled_from([10**9, 2**20, 2**40, 2**63, 10**400])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["yarn", "full_attention", "sliding_attention", "linear_attention", "MEM*", "LLLG", *READERS])
)
KEYS = st.sampled_from(sorted({str(at[-1]) for name in SHAPES for at in places(SHAPES[name].config)}))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=10,
)


@settings(max_examples=400)
@given(st.data())
def test_damage_to_a_real_config_gives_a_cache_or_one_sentence(data: st.DataObject) -> None:
    """Up to three values swapped, at any depth, and keys of other architectures added."""
    config = shape_of(data.draw(st.sampled_from(ARCHITECTURES)), SHAPES).config
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.sampled_from(sorted(places(config), key=str)))
        config = damaged(config, at, data.draw(VALUES | st.just(...)))
        if not config:
            break
    check_sane(read_or_refuse({**config, **data.draw(st.dictionaries(KEYS, VALUES, max_size=2))}))


@settings(max_examples=200)
@given(st.sampled_from(ARCHITECTURES), st.sampled_from(ARCHITECTURES))
def test_one_architectures_config_under_the_name_of_another(architecture: str, other: str) -> None:
    check_sane(read_or_refuse({**shape_of(architecture, SHAPES).config, "architectures": [other]}))


@settings(max_examples=200)
@given(st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=6)))
def test_any_json_at_all(value: Any) -> None:
    check_sane(read_or_refuse(value))
