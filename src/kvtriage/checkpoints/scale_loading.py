"""What vLLM 0.32 makes of the scales of a checkpoint: which number will act in each layer, and when it stops.

Three loaders, chosen by quant_method:

    compressed-tensors   k, v and q begin as 1.0. Under strategy attn_head a value for each head is taken, one alone
                         is spread over all heads, what is too many is cut off; q is reduced to the largest of each
                         KV head's group. Under strategy tensor anything but one number stops the server.
                         (compressed_tensors.py:1145-1300)
    one number           modelopt, fp8, quark: k, v and q begin as -1, in the dtype the model is served in, to which
                         each number is rounded (kv_cache.py:29-31). Where only k is there, v gets its number; where
                         neither is, both are 1.0; where k is not positive, an assertion stops the server. q is 1.0
                         unless it is there. (model_executor/layers/quantization/kv_cache.py:85-195)
    none                 every other method, and no method: the model has no place for a scale. Its loader stops
                         over such a tensor, or leaves it out with a warning, as the model's class has it.
                         (model_executor/models/utils.py:370-448, model_loader/weight_utils.py:1599-1709)

Nobody looks at the values but for the sign. These are the numbers that act where the cache is in FP8.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvtriage.checkpoints.bf16 import narrow, widen
from kvtriage.checkpoints.scale_names import Form
from kvtriage.checkpoints.stored_scales import HeldScales, StoredScale
from kvtriage.kvcache.declared import read_model_dtype
from kvtriage.kvcache.policy import Scaling

__all__ = ["Fate", "Heads", "LayerLoad", "LoadedScale", "Loader", "choose_loader", "predict_loading"]

_ONE_NUMBER = ("fp8", "quark")
_OUTPUT_METHODS = ("fp8", "quark")


class Loader(enum.StrEnum):
    """See the module."""

    COMPRESSED_TENSORS = "compressed-tensors"
    ONE_NUMBER = "one number"
    NONE = "none"


class Fate(enum.StrEnum):
    """What becomes of one scale, best first."""

    STORED = "as stored"
    ROUNDED = "rounded to the dtype the model is served in"
    SPREAD = "one number for all heads"
    COPIED = "the number of the other one of K and V"
    CUT = "the first ones of too many"
    DEFAULT = "1.0, for want of any"
    NO_PLACE = "no place for it: the server stops, or warns and runs with 1.0"
    REFUSED = "the server stops"


@dataclass(frozen=True)
class Heads:
    """Of one layer; None where config.json is not read."""

    queries: int | None
    kv: int | None

    @property
    def group(self) -> int | None:
        return None if self.queries is None or not self.kv else self.queries // self.kv


@dataclass(frozen=True)
class LoadedScale:
    """`values` act: [1], or one for each KV head; empty where the server stops or nobody can know."""

    fate: Fate
    values: tuple[float, ...]


@dataclass(frozen=True)
class LayerLoad:
    layer_idx: int
    k: LoadedScale
    v: LoadedScale
    q: LoadedScale


_DEFAULT = LoadedScale(Fate.DEFAULT, (1.0,))
_REFUSED = LoadedScale(Fate.REFUSED, ())
_NO_PLACE = LoadedScale(Fate.NO_PLACE, ())


def choose_loader(held: HeldScales) -> Loader:
    if held.method.startswith("modelopt") or held.method in _ONE_NUMBER:
        return Loader.ONE_NUMBER
    return Loader.COMPRESSED_TENSORS if held.method == "compressed-tensors" else Loader.NONE


def predict_loading(
    held: HeldScales, layers: Mapping[int, Heads], served_dtype: str | None = None
) -> tuple[LayerLoad, ...]:
    """Each of `layers`, on one rank: tensor parallelism shares the heads and changes no number.

    served_dtype: the model's on a server, 'bfloat16'; None for what config.json makes of `--dtype auto`.
    """
    loader, found = choose_loader(held), _by_layer(held)
    dtype = read_model_dtype(held.config).served if served_dtype is None else served_dtype
    return tuple(
        _load(held, loader, dtype, found.get(index, {}), index, heads) for index, heads in sorted(layers.items())
    )


def _by_layer(held: HeldScales) -> dict[int, dict[str, StoredScale]]:
    """Those that the engine opens and whose names it knows, under the names of the attention's own layers."""
    found: dict[int, dict[str, StoredScale]] = {}
    for scale in held.scales:
        known = scale.form is not Form.OUTPUTS or held.method in _OUTPUT_METHODS
        at_home = not held.attention_roots or scale.root in held.attention_roots
        if scale.indexed and known and at_home:
            tensor = "k" if scale.tensor == "kv" else scale.tensor
            found.setdefault(scale.layer_idx, {}).setdefault(tensor, scale)
    return found


def _load(
    held: HeldScales, loader: Loader, dtype: str, own: Mapping[str, StoredScale], layer_idx: int, heads: Heads
) -> LayerLoad:
    k, v, q = own.get("k"), own.get("v"), own.get("q")
    match loader:
        case Loader.NONE:
            return LayerLoad(layer_idx, *(_DEFAULT if scale is None else _NO_PLACE for scale in (k, v, q)))
        case Loader.ONE_NUMBER:
            return LayerLoad(layer_idx, *_pair(k, v, dtype), _single(q, dtype))
        case Loader.COMPRESSED_TENSORS if held.declared.scaling is Scaling.PER_HEAD:
            return LayerLoad(layer_idx, _heads(k, heads.kv), _heads(v, heads.kv), _queries(q, heads))
        case Loader.COMPRESSED_TENSORS:
            return LayerLoad(layer_idx, _one(k), _one(v), _one(q))


def _one(scale: StoredScale | None) -> LoadedScale:
    if scale is None:
        return _DEFAULT
    return LoadedScale(Fate.STORED, scale.values) if scale.values is not None and scale.count == 1 else _REFUSED


def _heads(scale: StoredScale | None, count: int | None) -> LoadedScale:
    """A [n] or [n, 1, 1] tensor into a place of [count]."""
    if scale is None:
        return LoadedScale(Fate.DEFAULT, (1.0,) * (count or 1))
    return _REFUSED if scale.values is None else _fitted(scale.values, count)


def _fitted(values: tuple[float, ...], count: int | None) -> LoadedScale:
    if count is None or len(values) == count:
        return LoadedScale(Fate.STORED, values)
    if len(values) == 1:
        return LoadedScale(Fate.SPREAD, values * count)
    return LoadedScale(Fate.CUT, values[:count]) if len(values) > count else _REFUSED


def _queries(scale: StoredScale | None, heads: Heads) -> LoadedScale:
    """The largest of each group, as fits the KV heads."""
    if scale is None or scale.values is None or heads.group is None:
        return _heads(scale, heads.kv)
    values, group = scale.values, heads.group
    if not values or len(values) % group:
        return _REFUSED
    return _fitted(tuple(_largest(values[i : i + group]) for i in range(0, len(values), group)), heads.kv)


def _largest(values: Sequence[float]) -> float:
    """NaN where there is one, as torch.amax."""
    return next((value for value in values if value != value), max(values))


def _pair(k: StoredScale | None, v: StoredScale | None, dtype: str) -> tuple[LoadedScale, LoadedScale]:
    if k is None and v is None:
        return _DEFAULT, _DEFAULT
    if any(scale is not None and (scale.values is None or scale.count != 1) for scale in (k, v)):
        return _REFUSED, _REFUSED
    loaded_k, loaded_v = (_rounded(scale, dtype) for scale in (k, v))
    (k_value,), (v_value,) = loaded_k.values, loaded_v.values
    if k_value > 0 and v_value > 0:
        return loaded_k, loaded_v
    if k_value < 0 and v_value < 0:
        return _DEFAULT, _DEFAULT
    if not k_value > 0:
        return _REFUSED, _REFUSED
    return loaded_k, LoadedScale(Fate.COPIED, (k_value,))


def _single(q: StoredScale | None, dtype: str) -> LoadedScale:
    if q is None:
        return _DEFAULT
    if q.values is None or q.count != 1:
        return _REFUSED
    loaded = _rounded(q, dtype)
    return loaded if loaded.values[0] > 0 else _DEFAULT


def _rounded(scale: StoredScale | None, dtype: str) -> LoadedScale:
    """One number; -1 where there is none."""
    value = np.float32(-1.0 if scale is None or not scale.values else scale.values[0])
    match dtype:
        case "bfloat16":
            kept = float(widen(narrow(np.array([value])))[0])
        case "float16":
            with np.errstate(over="ignore"):
                kept = float(np.float16(value))
        case _:
            kept = float(value)
    return LoadedScale(Fate.STORED if kept == value else Fate.ROUNDED, (kept,))
