"""What all families share: heads, and how a CacheSpec is put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtriage.errors import ModelError
from kvtriage.kvcache.readers.context import read_context_lengths
from kvtriage.kvcache.readers.fields import HINT, Fields
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec, SideCache

__all__ = [
    "Heads",
    "attention_layer",
    "build_spec",
    "grouped",
    "read_head_dim",
    "read_heads",
    "spec_of_layers",
]


@dataclass(frozen=True)
class Heads:
    """Head counts and width, of every layer or of all layers of one kind."""

    num_attention_heads: int
    num_kv_heads: int
    head_dim: int


def read_heads(fields: Fields, *, absent_kv_heads_mean_mha: bool = False) -> Heads:
    """H, Hkv and D. A null num_key_value_heads means H; an absent one only where documented so.

    Raises ModelError for a missing key, or for numbers that do not divide.
    """
    num_attention_heads = fields.require("num_attention_heads")
    if absent_kv_heads_mean_mha or "num_key_value_heads" in fields.config:
        num_kv_heads = fields.derive("num_key_value_heads", num_attention_heads, "num_attention_heads: no grouping")
    else:
        num_kv_heads = fields.require("num_key_value_heads")
    return grouped(num_attention_heads, num_kv_heads, read_head_dim(fields, num_attention_heads))


def grouped(num_attention_heads: int, num_kv_heads: int, head_dim: int) -> Heads:
    """H query heads that share Hkv KV heads. Raises ModelError when they cannot do so evenly."""
    if num_attention_heads % num_kv_heads:
        raise ModelError(
            f"config.json has {num_attention_heads} attention heads, which {num_kv_heads} KV heads cannot share evenly",
            hint=HINT,
        )
    return Heads(num_attention_heads, num_kv_heads, head_dim)


def read_head_dim(fields: Fields, num_attention_heads: int) -> int:
    """D: stated, or the hidden size shared out among the query heads. Raises ModelError when it does not divide."""
    stated = fields.stated("head_dim")
    if stated is not None:
        return stated
    hidden_size = fields.require("hidden_size")
    head_dim, rest = divmod(hidden_size, num_attention_heads)
    if rest or head_dim == 0:
        raise ModelError(
            f"config.json states no head_dim, and its hidden_size {hidden_size} "
            f"is not a multiple of its {num_attention_heads} attention heads",
            hint=HINT,
        )
    return fields.derive("head_dim", head_dim, "hidden_size / num_attention_heads")


def attention_layer(
    layer_idx: int,
    kind: LayerKind,
    heads: Heads,
    window_tokens: int | None = None,
    *,
    head_dim_v: int | None = None,
    shares_with: int | None = None,
    beside: tuple[SideCache, ...] = (),
) -> LayerSpec:
    """One layer with K and V. V is as wide as K unless `head_dim_v` says otherwise.

    `window_tokens` is what a sliding or chunked layer sees, and left out where the kind has no window.

    transformers and vLLM agree on what a window of W means: the token itself and the W − 1
    before it, so W positions are retained.
    """
    return LayerSpec(
        layer_idx=layer_idx,
        kind=kind,
        num_attention_heads=heads.num_attention_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        head_dim_v=heads.head_dim if head_dim_v is None else head_dim_v,
        window_tokens=window_tokens if kind in (LayerKind.SLIDING, LayerKind.CHUNKED) else None,
        shares_with=shares_with,
        beside=beside,
    )


def spec_of_layers(fields: Fields, layers: Iterable[LayerSpec], draft_layers: Iterable[LayerSpec] = ()) -> CacheSpec:
    """The layers, with what config.json says of the whole model. The last step of a reader: it takes `assumed`."""
    lengths = read_context_lengths(fields)
    return CacheSpec(
        model_type=fields.text("model_type"),
        layers=tuple(layers),
        max_model_len=lengths.max_model_len,
        assumed=tuple(fields.assumed),
        draft_layers=tuple(draft_layers),
        default_model_len=lengths.default_model_len,
    )


def build_spec(
    fields: Fields,
    heads: Heads,
    kinds: Sequence[LayerKind],
    window_tokens: int | None,
    draft_kinds: Sequence[LayerKind] = (),
) -> CacheSpec:
    """One LayerSpec per kind, L in all; `window_tokens` is that of every sliding layer.

    `draft_kinds` are those of the checkpoint's own drafter, whose layers are made like the model's.
    """
    layers = [
        attention_layer(layer_idx, kind, heads, window_tokens) for layer_idx, kind in enumerate((*kinds, *draft_kinds))
    ]
    return spec_of_layers(fields, layers[: len(kinds)], layers[len(kinds) :])
