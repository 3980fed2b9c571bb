"""Under which names checkpoints keep the scales of K, V and Q: every form that vLLM 0.32 takes.

    form                 name below `….layers.N.`                  written by
    compressed-tensors   self_attn.{q,k,v}_scale                   llm-compressor, auto-round, kvtriage
    projections          self_attn.{k,v}_proj.{k,v}_scale          ModelOpt; mixer. instead of self_attn. too
    fused projection     self_attn.qkv_proj.{k,v}_scale            conversions of either
    outputs              self_attn.{q,k,v}_proj.output_scale       Quark; for quant_method quark and fp8 alone
    caches               self_attn.{k,v}_cache.scale, q.scale      HunYuan V3
    engine               self_attn.attn.{q,k,v}_scale              dumps of a running engine
    fused scale          self_attn.kv_scale                        old FP8 checkpoints: one number for K and V

Source: `get_cache_scale_mapper` in model_executor/layers/quantization/{base_config,fp8,quark/quark}.py.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

__all__ = ["Form", "ScaleName", "read_scale_name"]


class Form(enum.StrEnum):
    """See the module."""

    COMPRESSED_TENSORS = "compressed-tensors"
    PROJECTIONS = "projections"
    FUSED_PROJECTION = "fused projection"
    OUTPUTS = "outputs"
    CACHES = "caches"
    ENGINE = "engine"
    FUSED_SCALE = "fused scale"


@dataclass(frozen=True)
class ScaleName:
    """`root` is what stands before `layers.`; `tensor` is q, k, v, or kv where one number stands for both."""

    root: str
    layer_idx: int
    tensor: str
    form: Form


_LAYER = re.compile(r"(?P<root>(?:.*\.)?)(?:layers|h|blocks)\.(?P<layer>\d{1,6})\.(?P<inner>.+)")
_INNER = (
    (re.compile(r"(?:self_attn|mixer)\.[kv]_proj\.(?P<tensor>[kv])_scale"), Form.PROJECTIONS),
    (re.compile(r"self_attn\.qk(?:qk)?v_proj\.(?P<tensor>[kv])_scale"), Form.FUSED_PROJECTION),
    (re.compile(r".*\b(?P<tensor>[qkv])_proj\.output_scale"), Form.OUTPUTS),
    (re.compile(r"self_attn\.(?P<tensor>[kv])_cache\.scale"), Form.CACHES),
    (re.compile(r"self_attn\.(?P<tensor>q)\.scale"), Form.CACHES),
    (re.compile(r".*\battn\.(?P<tensor>[qkv])_scale"), Form.ENGINE),
    (re.compile(r".*\b(?P<tensor>kv)_scale"), Form.FUSED_SCALE),
    (re.compile(r"(?:\w*attn\w*|attention|self_attention|mixer)\.(?P<tensor>[qkv])_scale"), Form.COMPRESSED_TENSORS),
)
_LONGEST = 512
"""Characters of a name; longer ones are a stranger's joke."""
_OTHER_MODALITY = ("vision", "visual", "image", "audio", "speech")


def read_scale_name(name: str) -> ScaleName | None:
    """None for every other tensor, and for towers of other modalities, which have no cache."""
    if len(name) > _LONGEST or not name.endswith("scale") or (found := _LAYER.fullmatch(name)) is None:
        return None
    if any(word in found["root"] for word in _OTHER_MODALITY):
        return None
    for pattern, form in _INNER:
        if inner := pattern.fullmatch(found["inner"]):
            return ScaleName(found["root"], int(found["layer"]), inner["tensor"], form)
    return None
