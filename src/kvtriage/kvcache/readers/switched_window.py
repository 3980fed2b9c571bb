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

KindsWhenOn = Callable[[Fields, int], tuple[LayerKind, ...]]
"""The kinds of all L layers with the switch on and no layer_types stated."""


def read_qwen2(fields: Fields) -> CacheSpec:
    """Switched on, layers from max_window_layers upwards slide."""
    return _read(fields, _from_max_window_layers)


def read_mimo(fields: Fields) -> CacheSpec:
    """Qwen2, and a drafter whose layers are made like the model's (vLLM 0.32: models/mimo_mtp.py:95-116)."""
    num_draft_layers = fields.count("num_nextn_predict_layers")
    return _read(fields, _from_max_window_layers, num_draft_layers)


def read_qwen3(fields: Fields) -> CacheSpec:
    """As Qwen2; head_dim is documented as 128."""
    return read_qwen2(fields.with_documented({"head_dim": 128}))


def read_qwen3_moe(fields: Fields) -> CacheSpec:
    """Switched on, every layer slides."""
    return _read(fields, _all_sliding)


def read_qwen2_moe(fields: Fields) -> CacheSpec:
    """Switched on, engines differ about which layers slide unless layer_types says so."""
    return _read(fields, _refuse_unstated)


def read_smollm3(fields: Fields) -> CacheSpec:
    """Switched on, layer_types must say which layers slide."""
    return _read(fields, _refuse_unstated)


def _read(fields: Fields, kinds_when_on: KindsWhenOn, num_draft_layers: int = 0) -> CacheSpec:
    num_layers = fields.require("num_hidden_layers")
    window_tokens = _window(fields)
    stated = fields.layer_types(num_layers)
    if window_tokens is not None:
        kinds = kinds_when_on(fields, num_layers) if stated is None else stated
    elif stated is None or LayerKind.SLIDING not in stated:
        kinds = (LayerKind.FULL,) * num_layers
    else:
        raise fields.unsupported("layer_types in config.json has sliding layers, and use_sliding_window is off")
    return build_spec(fields, read_heads(fields), kinds, window_tokens, kinds[-1:] * num_draft_layers)


def _window(fields: Fields) -> int | None:
    """None with the switch off."""
    if "use_sliding_window" not in fields.config:
        fields.assume("use_sliding_window", "false", f"the default of {fields.architecture}")
    return fields.stated("sliding_window") if fields.flag("use_sliding_window") else None


def _from_max_window_layers(fields: Fields, num_layers: int) -> tuple[LayerKind, ...]:
    first = fields.require("max_window_layers")
    return tuple(LayerKind.SLIDING if idx >= first else LayerKind.FULL for idx in range(num_layers))


def _all_sliding(fields: Fields, num_layers: int) -> tuple[LayerKind, ...]:
    fields.assume("layer_types", "every layer slides", f"the default of {fields.architecture}")
    return (LayerKind.SLIDING,) * num_layers


def _refuse_unstated(fields: Fields, num_layers: int) -> tuple[LayerKind, ...]:
    raise fields.unsupported(f"use_sliding_window is on and layer_types does not name the kind of all {num_layers}")
