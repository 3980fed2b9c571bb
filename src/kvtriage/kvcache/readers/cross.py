"""Layers that attend to an image and not to the text: Llama 3.2 Vision.

A cross-attention layer keeps K and V of what the vision encoder made of the image, and not one position
more however long the text becomes. Without an image it keeps nothing; the price is that of one, at its largest.
"""

from __future__ import annotations

from dataclasses import replace

from kvtriage.errors import ModelError
from kvtriage.kvcache.readers.fields import HINT, Fields
from kvtriage.kvcache.readers.geometry import Heads, read_heads, spec_of_layers
from kvtriage.kvcache.readers.refusals import refuse_window
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec

__all__ = ["read_mllama"]

_DOCUMENTED_TEXT = {
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
}
_DOCUMENTED_VISION = {"image_size": 448, "patch_size": 14, "max_num_tiles": 4}
_DOCUMENTED_CROSS = frozenset(range(3, 40, 5))


def read_mllama(fields: Fields) -> CacheSpec:
    """cross_attention_layers are counted among all layers (transformers, modeling_mllama.py:1028).

    Raises ModelError for one that does not exist.
    """
    text = _text_model(fields)
    refuse_window(text)
    encoder_tokens = _image_tokens(fields)
    cross = _cross_attention_layers(text)
    num_layers = _num_layers(text, cross)
    heads = read_heads(text)
    layers = tuple(_layer(idx, heads, encoder_tokens if idx in cross else None) for idx in range(num_layers))
    return spec_of_layers(text, layers)


def _text_model(fields: Fields) -> Fields:
    """The keys of text_config under the name of the whole model: not every file names the text model by itself."""
    text = fields.inside("text_config").with_documented(_DOCUMENTED_TEXT)
    return replace(text, config={**text.config, "model_type": fields.text("model_type")})


def _image_tokens(fields: Fields) -> int:
    """Positions of one image: each tile gives its patches and one class token."""
    vision = fields.inside("vision_config").with_documented(_DOCUMENTED_VISION)
    tiles, image_size, patch_size = (vision.require(key) for key in ("max_num_tiles", "image_size", "patch_size"))
    if image_size % patch_size:
        raise ModelError(
            f"vision_config in config.json cuts an image of {image_size} pixels into patches of {patch_size}", hint=HINT
        )
    tokens = tiles * ((image_size // patch_size) ** 2 + 1)
    fields.assume("encoder_tokens", tokens, "one image: max_num_tiles * ((image_size / patch_size)^2 + 1)")
    return tokens


def _cross_attention_layers(text: Fields) -> frozenset[int]:
    stated = text.indices("cross_attention_layers")
    if stated is not None:
        return stated
    text.assume("cross_attention_layers", sorted(_DOCUMENTED_CROSS), f"the default of {text.architecture}")
    return _DOCUMENTED_CROSS


def _num_layers(text: Fields, cross: frozenset[int]) -> int:
    """Files in Meta's own words count the layers of the text model alone, and say how many cross it."""
    num_layers = text.require("num_hidden_layers")
    apart = text.stated("vision_num_cross_attention_layers")
    if apart is not None and apart != len(cross):
        raise ModelError(
            f"config.json contradicts itself: vision_num_cross_attention_layers is {apart}, "
            f"and cross_attention_layers names {len(cross)}",
            hint=HINT,
        )
    if apart is not None:
        num_layers += apart
        text.assume("num_hidden_layers", num_layers, "with the layers of vision_num_cross_attention_layers")
    if cross and max(cross) >= num_layers:
        raise ModelError(
            f"cross_attention_layers in config.json names layer {max(cross)} of {num_layers} layers", hint=HINT
        )
    return num_layers


def _layer(layer_idx: int, heads: Heads, encoder_tokens: int | None) -> LayerSpec:
    return LayerSpec(
        layer_idx=layer_idx,
        kind=LayerKind.FULL if encoder_tokens is None else LayerKind.CROSS,
        num_attention_heads=heads.num_attention_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        head_dim_v=heads.head_dim,
        encoder_tokens=encoder_tokens,
    )
