"""Hybrids of attention and recurrence: how their layers are told apart and put together.

A recurrent layer has no K and V. It keeps a state (see `states`), whose bytes neither the context nor the
cache dtype changes. A layer of experts or of an MLP alone keeps nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtriage.errors import ModelError
from kvtriage.kvcache.readers.fields import HINT, Fields, describe
from kvtriage.kvcache.readers.geometry import Heads, attention_layer, read_heads, spec_of_layers
from kvtriage.kvcache.readers.states import FLOAT32_BYTES, MODEL_BYTES
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec, StateTensor

__all__ = [
    "State",
    "build_hybrid",
    "kinds_of_words",
    "layer_without_kv",
    "read_plain_heads",
    "read_state_bytes",
]

State = tuple[StateTensor, ...]

_DTYPE_BYTES: Mapping[str, int] = {
    "auto": MODEL_BYTES,
    "bfloat16": MODEL_BYTES,
    "float16": MODEL_BYTES,
    "float32": FLOAT32_BYTES,
}


def kinds_of_words(
    fields: Fields, key: str, words: Sequence[str], meaning: Mapping[str, LayerKind], num_layers: int
) -> tuple[LayerKind, ...]:
    """The kind that each word under `key` means, L in all.

    Raises ModelError for another length and UnsupportedModel for a word without a meaning here.
    """
    if len(words) != num_layers:
        raise ModelError(
            f"{fields.prefix}{key} in config.json has {len(words)} entries for {num_layers} layers", hint=HINT
        )
    for word in words:
        if word not in meaning:
            raise fields.unsupported(f"{fields.prefix}{key} has {describe(word)}, which kvtriage does not read")
    return tuple(meaning[word] for word in words)


def read_state_bytes(fields: Fields, key: str, absent: int) -> int:
    """Bytes of an element of the recurrent state, from the dtype named under `key`; `absent`, and assumed, without it.

    Raises UnsupportedModel for a dtype that the engine has no such state in (config/cache.py:62).
    """
    if fields.config.get(key) is None:
        word = "float32" if absent == FLOAT32_BYTES else "the model's dtype"
        fields.assume(key, word, f"the engine's default for {fields.architecture}")
        return absent
    word = fields.text(key)
    if word not in _DTYPE_BYTES:
        raise fields.unsupported(f"{fields.prefix}{key} is {describe(word)}, in which the engine keeps no state")
    return _DTYPE_BYTES[word]


def read_plain_heads(fields: Fields) -> Heads:
    """Heads whose width is hidden_size / num_attention_heads, as the engine's model code has it.

    Raises ModelError where head_dim states another width.
    """
    heads = read_heads(fields, absent_kv_heads_mean_mha=True)
    hidden_size = fields.require("hidden_size")
    if heads.num_attention_heads * heads.head_dim != hidden_size:
        raise ModelError(
            f"{fields.prefix}head_dim {heads.head_dim} in config.json contradicts hidden_size {hidden_size} "
            f"and {heads.num_attention_heads} attention heads",
            hint=HINT,
        )
    return heads


def layer_without_kv(layer_idx: int, kind: LayerKind, beside: State = ()) -> LayerSpec:
    """A recurrent layer with its state, or a layer that keeps nothing."""
    return LayerSpec(layer_idx, kind, num_attention_heads=0, num_kv_heads=0, head_dim=0, head_dim_v=0, beside=beside)


def build_hybrid(
    fields: Fields, heads: Heads, kinds: Sequence[LayerKind], state: State, draft_kinds: Sequence[LayerKind] = ()
) -> CacheSpec:
    """Layers that are FULL, STATE or NONE, all states alike; those of the drafter go on from layer L."""

    def layer(layer_idx: int, kind: LayerKind) -> LayerSpec:
        if kind is LayerKind.FULL:
            return attention_layer(layer_idx, kind, heads)
        return layer_without_kv(layer_idx, kind, state if kind is LayerKind.STATE else ())

    layers = [layer(layer_idx, kind) for layer_idx, kind in enumerate((*kinds, *draft_kinds))]
    return spec_of_layers(fields, layers[: len(kinds)], layers[len(kinds) :])
