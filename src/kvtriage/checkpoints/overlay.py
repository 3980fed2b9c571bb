"""The overlay: a model folder with KV-cache scales, made of links and a few kilobytes.

    every file of the base        hard-linked, or symlinked across file systems; never rewritten
    model-kv-scales.safetensors   float32, `<prefix>.{q,k,v}_scale` of each attention layer
    model.safetensors.index.json  every tensor of the base, and every scale
    config.json                   the base's, with `quantization_config.kv_cache_scheme`
    kvtriage_overlay.json         what it was made from

That is the form vLLM's compressed-tensors loader takes (vLLM 0.32). It is silent about what is
missing: an absent layer or q_scale loads as 1.0 and a single value is spread over all heads,
so the overlay is complete or it is not written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvtriage.checkpoints.attention_names import attention_stacks, scale_stacks, text_stack
from kvtriage.checkpoints.json_file import encode_object, read_object
from kvtriage.checkpoints.links import followed, link_file, model_files
from kvtriage.checkpoints.model_folder import INDEX_NAME, ModelFolder
from kvtriage.checkpoints.safetensors_file import RawTensor, build_index, read_header, read_raw, write_shard
from kvtriage.checkpoints.stored_scales import decode_scale
from kvtriage.errors import BadInput, EngineError, ModelError, StorageError
from kvtriage.files import new_folder, write_atomic
from kvtriage.fp8.scales import LayerScales, ScaleSet
from kvtriage.kvcache.policy import Scaling
from kvtriage.units import MIB

__all__ = ["OVERLAY_NAME", "SCALES_NAME", "check_base", "check_overlay", "read_scales", "write_overlay"]

SCALES_NAME = "model-kv-scales.safetensors"
OVERLAY_NAME = "kvtriage_overlay.json"

_STRATEGIES = {Scaling.PER_HEAD: "attn_head", Scaling.PER_TENSOR: "tensor"}
_TENSORS = ("q", "k", "v")
_LIMIT = 256 * MIB
_REWRITE = "remove this folder, then write it again with `kvtriage calibrate`"
_SHAPES = "k and v scales are [num_kv_heads] and q scales [num_heads] for attn_head, [1] each for tensor"


def check_base(model: ModelFolder, num_layers: int) -> None:
    """Whether an overlay of `model` can be written, scales aside: for those who measure for hours first.

    Raises ModelError when the weights hold other layers than `num_layers`, for scales that are
    there already and for weights quantised in a way that carries none.
    """
    prefixes = text_stack(model.weight_map, num_layers)
    _with_scheme(model, _STRATEGIES[Scaling.PER_TENSOR])
    for prefix in prefixes.values():
        for tensor in _TENSORS:
            _refuse_scale(model, f"{prefix}.{tensor}_scale")


def write_overlay(model: ModelFolder, scales: ScaleSet, out: Path) -> None:
    """Make `out` an overlay of `model` that carries `scales`, whole or not at all.

    `out` may not exist yet. What was written is read back and compared bit for bit. Raises
    ModelError, BadInput, StorageError.
    """
    if os.path.lexists(out):
        raise BadInput(f"{out} already exists", hint="choose a new folder; nothing is overwritten")
    tensors = _scale_tensors(model, scales)
    files = _small_files(model, scales.scaling, tensors)
    with new_folder(out) as scratch:
        for name in model_files(model.path).keys() - {*files, SCALES_NAME, OVERLAY_NAME}:
            link_file(model.path / name, scratch / name)
        write_shard(scratch / SCALES_NAME, tensors, {"format": "pt"})
        for name, data in files.items():
            write_atomic(scratch / name, data)
        record = {"base": str(model.path), "base_fingerprint": model.fingerprint}
        write_atomic(scratch / OVERLAY_NAME, encode_object(record))
        try:
            check_overlay(model, scales, scratch)
        except ModelError as error:
            raise StorageError(
                f"the overlay for {model.path} did not read back as it was written: {error.message}",
                hint="the disk is not to be trusted; choose another folder",
            ) from error


def check_overlay(model: ModelFolder, scales: ScaleSet, folder: Path) -> None:
    """Whether `folder` still is what `write_overlay` makes of `model` and `scales`: scales bit for bit,
    configuration and index byte for byte, weights by their size.

    Raises ModelError, naming what differs.
    """
    if _as_bits(read_scales(folder)) != _as_bits(scales):
        raise ModelError(f"{folder} holds other scales", hint=_REWRITE)
    for name, data in _small_files(model, scales.scaling, _scale_tensors(model, scales)).items():
        if read_object(followed(folder, name), _LIMIT, _REWRITE)[1] != data:
            raise ModelError(f"{folder / name} was changed", hint=_REWRITE)
    for shard in sorted(set(model.weight_map.values())):
        linked = followed(folder, shard)
        if not linked.is_file() or linked.stat().st_size != followed(model.path, shard).stat().st_size:
            raise ModelError(f"{folder / shard} is not the model's own file", hint=_REWRITE)


def read_scales(folder: Path) -> ScaleSet:
    """The scales in a checkpoint folder, in any of the shapes [n], [n, 1, 1], [1] or scalar.

    Raises ModelError, naming the layer and tensor that is missing, of another length than the
    others, or not positive and finite.
    """
    config, _ = read_object(followed(folder, "config.json"), _LIMIT, _REWRITE)
    scaling = _declared_scaling(folder, config)
    index, _ = read_object(followed(folder, INDEX_NAME), _LIMIT, _REWRITE)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or SCALES_NAME not in weight_map.values():
        raise ModelError(f"{folder / INDEX_NAME} does not name {SCALES_NAME}", hint=_REWRITE)
    scales_file = followed(folder, SCALES_NAME)
    header = read_header(scales_file)
    roots = scale_stacks(header.tensors)
    if len(roots) != 1:
        raise ModelError(f"{scales_file} does not hold the scales of one stack of layers", hint=_REWRITE)
    stack = attention_stacks(weight_map).get(next(iter(roots)), {})
    layers = []
    for layer_idx, prefix in stack.items():
        values = {}
        for tensor in _TENSORS:
            name = f"{prefix}.{tensor}_scale"
            if name not in header.tensors:
                raise ModelError(
                    f"{folder} has no {tensor}_scale for layer {layer_idx}, which vLLM would silently take as 1.0",
                    hint=_REWRITE,
                )
            values[tensor] = _decode(read_raw(scales_file, header, name), scales_file, name)
        layers.append(LayerScales(layer_idx, values["q"], values["k"], values["v"]))
    _check_lengths(folder, scaling, layers)
    try:
        return ScaleSet(scaling, tuple(layers))
    except EngineError as error:
        raise ModelError(f"{scales_file}: {error.message}", hint=_REWRITE) from error


# --- what is written --------------------------------------------------------------------


def _strategy(scaling: Scaling) -> str:
    if scaling not in _STRATEGIES:
        raise BadInput(
            "scale 1 is never written into a checkpoint",
            hint="serve the original model with --kv-cache-dtype fp8: that is scale 1",
        )
    return _STRATEGIES[scaling]


def _with_scheme(model: ModelFolder, strategy: str) -> dict[str, object]:
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True}
    if model.already_fp8 is not None:
        raise ModelError(
            f"{model.path} already declares a KV-cache scheme ({model.already_fp8})",
            hint="give the checkpoint that it was made from",
        )
    existing = model.config.get("quantization_config")
    if existing is None:
        existing = {"quant_method": "compressed-tensors"}
    if not isinstance(existing, dict) or existing.get("quant_method") != "compressed-tensors":
        raise ModelError(
            f"{model.path} is quantized by another method than compressed-tensors, which alone carries KV scales",
            hint="give the BF16 checkpoint, or one quantized with compressed-tensors",
        )
    quantization = {"config_groups": {}, **existing, "kv_cache_scheme": scheme}
    return model.config | {"quantization_config": quantization}


def _scale_tensors(model: ModelFolder, scales: ScaleSet) -> dict[str, RawTensor]:
    prefixes = text_stack(model.weight_map, 1 + max(layer.layer_idx for layer in scales.layers))
    given = {layer.layer_idx: layer for layer in scales.layers}
    unmatched = sorted(given.keys() ^ prefixes.keys())
    if unmatched:
        found, missing = ("the weights", "scales") if unmatched[0] in prefixes else ("the scales", "weights")
        raise ModelError(
            f"layer {unmatched[0]} is in {found} and has no {missing}",
            hint="scales belong to the model they were calibrated on; calibrate this one",
        )
    tensors = {}
    for layer_idx, prefix in prefixes.items():
        layer = given[layer_idx]
        for tensor, values in (("q", layer.q), ("k", layer.k), ("v", layer.v)):
            name = f"{prefix}.{tensor}_scale"
            _refuse_scale(model, name)
            tensors[name] = _encode(values, scales.scaling)
    return tensors


def _refuse_scale(model: ModelFolder, name: str) -> None:
    if name in model.weight_map:
        raise ModelError(f"{model.path} already holds {name!r}", hint="give the checkpoint that it was made from")


def _small_files(model: ModelFolder, scaling: Scaling, tensors: Mapping[str, RawTensor]) -> dict[str, bytes]:
    """The two JSON files of the base that an overlay replaces."""
    return {
        "config.json": encode_object(_with_scheme(model, _strategy(scaling))),
        INDEX_NAME: encode_object(_index(model, tensors)),
    }


def _encode(values: tuple[float, ...], scaling: Scaling) -> RawTensor:
    data = np.asarray(values, dtype="<f4")
    shape = (len(values), 1, 1) if scaling is Scaling.PER_HEAD else (len(values),)
    return RawTensor("F32", shape, data.view(np.uint8))


def _index(model: ModelFolder, tensors: Mapping[str, RawTensor]) -> dict[str, object]:
    headers = {shard: read_header(followed(model.path, shard)) for shard in set(model.weight_map.values())}
    return build_index(model.weight_map | dict.fromkeys(tensors, SCALES_NAME), headers, tensors)


def _as_bits(scales: ScaleSet) -> list[tuple[int, bytes, bytes, bytes]]:
    return sorted((layer.layer_idx, _bits(layer.q), _bits(layer.k), _bits(layer.v)) for layer in scales.layers)


def _bits(values: tuple[float, ...]) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


# --- what is read -----------------------------------------------------------------------


def _declared_scaling(folder: Path, config: Mapping[str, object]) -> Scaling:
    match config.get("quantization_config"):
        case {"kv_cache_scheme": {"strategy": "attn_head"}}:
            return Scaling.PER_HEAD
        case {"kv_cache_scheme": {"strategy": "tensor"}}:
            return Scaling.PER_TENSOR
        case _:
            raise ModelError(
                f"{folder / 'config.json'} declares no kv_cache_scheme of strategy attn_head or tensor", hint=_REWRITE
            )


def _decode(tensor: RawTensor, file: Path, name: str) -> tuple[float, ...]:
    match tensor.shape:
        case () | (_,) | (_, 1, 1):
            pass
        case shape:
            raise ModelError(f"{name!r} in {file} has shape {list(shape)}", hint=_SHAPES)
    values = decode_scale(tensor)
    if values is None:
        raise ModelError(f"{name!r} in {file} is stored as {tensor.dtype}", hint="scales are F32, F16 or BF16")
    return values


def _check_lengths(folder: Path, scaling: Scaling, layers: list[LayerScales]) -> None:
    for layer in layers:
        n_q, n_k, n_v = len(layer.q), len(layer.k), len(layer.v)
        fits = n_q == n_k == n_v == 1 if scaling is Scaling.PER_TENSOR else 0 < n_k == n_v and n_q % n_k == 0
        if not fits:
            raise ModelError(
                f"layer {layer.layer_idx} of {folder} has {n_q} q, {n_k} k and {n_v} v scales, "
                f"which is not what strategy {_STRATEGIES[scaling]} means",
                hint=_SHAPES,
            )
