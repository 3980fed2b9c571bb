"""Sliding layers between full ones, spelled in letters: EXAONE 4 and 4.5, K-EXAONE, and their drafters.

LLLG repeats over the layers: L looks at the window (local), G at everything (global).
"""

from __future__ import annotations

from kvtriage.kvcache.readers.fields import Fields, describe
from kvtriage.kvcache.readers.geometry import build_spec, read_heads
from kvtriage.kvcache.readers.interleaved import read_interleaved_kinds
from kvtriage.kvcache.spec import CacheSpec, LayerKind

__all__ = ["read_exaone4", "read_exaone4_5", "read_exaone_moe"]


def read_exaone4(fields: Fields) -> CacheSpec:
    """`layer_types`, or else `sliding_window_pattern`: letters, or a number n for every n-th layer full.

    A null sliding_window means full attention; an absent one means the documented 4,096.
    """
    return _read(fields, num_draft_layers=0)


def read_exaone4_5(fields: Fields) -> CacheSpec:
    """The language model is in text_config; images become tokens of the same cache."""
    text = fields.inside("text_config")
    return _read(text, num_draft_layers=text.count("num_nextn_predict_layers"))


def read_exaone_moe(fields: Fields) -> CacheSpec:
    """As EXAONE 4, with one window for all sliding layers, those of the drafter among them."""
    for key in ("sliding_windows", "mtp_layer_types", "mtp_sliding_windows"):
        if fields.config.get(key) is not None:
            raise fields.unsupported(f"{key} in config.json is {describe(fields.config[key])}, which is not read yet")
    return _read(fields, num_draft_layers=fields.count("num_nextn_predict_layers"))


def _read(fields: Fields, num_draft_layers: int) -> CacheSpec:
    """The engine makes the drafter's i-th layer like the model's i-th (models/exaone4_5_mtp.py:76, exaone4.py:172)."""
    fields = fields.with_documented({"sliding_window": 4096})
    num_layers = fields.require("num_hidden_layers")
    window_tokens = fields.window()
    kinds = _kinds(fields, num_layers, window_tokens)
    if num_draft_layers > num_layers:
        raise fields.unsupported(f"num_nextn_predict_layers is {num_draft_layers}, more than the {num_layers} layers")
    return build_spec(fields, read_heads(fields), kinds, window_tokens, kinds[:num_draft_layers])


def _kinds(fields: Fields, num_layers: int, window_tokens: int | None) -> tuple[LayerKind, ...]:
    listed = fields.layer_types(num_layers)
    if window_tokens is None:
        if listed is not None and LayerKind.SLIDING in listed:
            raise fields.unsupported("layer_types in config.json has sliding layers, and sliding_window is null")
        return (LayerKind.FULL,) * num_layers
    if not isinstance(fields.config.get("sliding_window_pattern"), str):
        return read_interleaved_kinds(fields, num_layers, period=4, pattern_key="sliding_window_pattern")
    spelled = _from_letters(fields, num_layers)
    if listed is None:
        fields.assume("layer_types", "the letters repeated, the last layer full", "sliding_window_pattern")
    elif listed != spelled:
        raise fields.unsupported("layer_types in config.json contradicts sliding_window_pattern")
    return spelled


def _from_letters(fields: Fields, num_layers: int) -> tuple[LayerKind, ...]:
    """The letters repeated. The last layer is full, whatever its letter."""
    letters = fields.text("sliding_window_pattern")
    if not set(letters) <= {"L", "G"}:
        raise fields.unsupported(f"sliding_window_pattern is {describe(letters)}, which has other letters than L and G")
    repeated = (letters * (num_layers // len(letters) + 1))[: num_layers - 1]
    return (*(LayerKind.SLIDING if letter == "L" else LayerKind.FULL for letter in repeated), LayerKind.FULL)
