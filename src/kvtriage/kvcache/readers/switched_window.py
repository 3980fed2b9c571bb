"""Windows behind a switch, `use_sliding_window`: Qwen 1.5 to 3, dense and MoE, SmolLM3 and MiMo-7B.

Nearly every published file leaves the switch off, and then a sliding_window that is stated all
the same means nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtriage.kvcache.readers.fields import Fields
from kvtriage.kvcache.readers.geometry import build_spec, read_heads
from kvtriage.kvcache.spec import CacheSpec, LayerKind

__all__ = ["read_mimo", "read_qwen2", "read_qwen2_moe", "read_qwen3", "read_qwen3_moe", "read_smollm3"]

Kinds = tuple[LayerKind, ...]
KindsWhenOn = Callable[[Fields, int, Kinds | None], Kinds]
"""The kinds of all L layers with the switch on, given what layer_types states."""


def read_qwen2(fields: Fields) -> CacheSpec:
    """Switched on, layers from max_window_layers upwards slide, and layer_types may only say the same."""
    return _read(fields, _from_max_window_layers)


def read_mimo(fields: Fields) -> CacheSpec:
    """Qwen2, and a drafter whose layers are made like the model's (vLLM 0.32: models/mimo_mtp.py:95-116)."""
    num_draft_layers = fields.count("num_nextn_predict_layers")
    return _read(fields, _from_max_window_layers, num_draft_layers)


def read_qwen3(fields: Fields) -> CacheSpec:
    """As Qwen2; head_dim is documented as 128."""
    return read_qwen2(fields.with_documented({"head_dim": 128}))


def read_qwen3_moe(fields: Fields) -> CacheSpec:
    """Switched on, every layer slides, and layer_types may only say the same."""
    return _read(fields, _all_sliding)


def read_qwen2_moe(fields: Fields) -> CacheSpec:
    """Switched on, layer_types must say that all layers slide: of some, engines make different things."""
    return _read(fields, _all_as_stated)


def read_smollm3(fields: Fields) -> CacheSpec:
    """Switched on, layer_types must say which layers slide."""
    return _read(fields, _as_stated)


def _read(fields: Fields, kinds_when_on: KindsWhenOn, num_draft_layers: int = 0) -> CacheSpec:
    num_layers = fields.require("num_hidden_layers")
    window_tokens = _window(fields)
    stated = fields.layer_types(num_layers)
    if window_tokens is not None:
        kinds = kinds_when_on(fields, num_layers, stated)
    elif stated is None or LayerKind.SLIDING not in stated:
        kinds = (LayerKind.FULL,) * num_layers
    else:
        raise fields.unsupported("layer_types in config.json has sliding layers, and use_sliding_window is off")
    return build_spec(fields, read_heads(fields), kinds, window_tokens, kinds[-1:] * num_draft_layers)


def _window(fields: Fields) -> int | None:
    """None with the switch off."""
    return fields.window() if fields.switch("use_sliding_window", absent=False) else None


def _from_max_window_layers(fields: Fields, num_layers: int, stated: Kinds | None) -> Kinds:
    if stated is not None and "max_window_layers" not in fields.config:
        return stated
    first = fields.require("max_window_layers")
    kinds = tuple(LayerKind.SLIDING if idx >= first else LayerKind.FULL for idx in range(num_layers))
    if stated not in (None, kinds):
        raise fields.unsupported(f"layer_types in config.json contradicts max_window_layers, which is {first}")
    return kinds


def _all_sliding(fields: Fields, num_layers: int, stated: Kinds | None) -> Kinds:
    if stated is None:
        fields.assume("layer_types", "every layer slides", f"the default of {fields.architecture}")
        return (LayerKind.SLIDING,) * num_layers
    return _all_as_stated(fields, num_layers, stated)


def _all_as_stated(fields: Fields, num_layers: int, stated: Kinds | None) -> Kinds:
    """vLLM gives every layer the whole context where layer_types has one that does not slide
    (engine/arg_utils.py:2248), and transformers obeys it or not."""
    kinds = _as_stated(fields, num_layers, stated)
    if LayerKind.FULL in kinds:
        raise fields.unsupported("use_sliding_window is on and layer_types has full layers: engines differ about both")
    return kinds


def _as_stated(fields: Fields, num_layers: int, stated: Kinds | None) -> Kinds:
    if stated is None:
        raise fields.unsupported(f"use_sliding_window is on and layer_types does not name the kind of all {num_layers}")
    return stated
