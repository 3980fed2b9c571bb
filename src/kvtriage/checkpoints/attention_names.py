"""Where a checkpoint keeps its attention layers: the prefix is its own, not ours to guess."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from kvtriage.errors import ModelError

__all__ = ["attention_stacks", "scale_stacks", "text_stack"]

_ATTENTION = r"(?P<prefix>(?P<root>.*)\blayers\.(?P<layer>\d+)\.self_attn)\."
_PROJECTION = re.compile(_ATTENTION + r"(?:q_proj|k_proj|qkv_proj)\.\w+")
_SCALE = re.compile(_ATTENTION + r"[qkv]_scale")
_OTHER_MODALITY = ("vision", "visual", "image", "audio", "speech")

Stacks = dict[str, dict[int, str]]
"""Root ('model.') → layer_idx → prefix ('model.layers.3.self_attn')."""


def attention_stacks(tensor_names: Iterable[str]) -> Stacks:
    """Every stack of attention layers among the weights, towers of other modalities left out."""
    return _stacks(_PROJECTION, tensor_names)


def scale_stacks(tensor_names: Iterable[str]) -> Stacks:
    """The same, found by the scales that a checkpoint holds."""
    return _stacks(_SCALE, tensor_names)


def text_stack(tensor_names: Iterable[str], num_layers: int) -> dict[int, str]:
    """layer_idx → prefix of the text model, whose layers are 0 to `num_layers` − 1.

    Raises ModelError when no stack of the checkpoint fits, or more than one.
    """
    stacks = attention_stacks(tensor_names)
    fitting = [stack for stack in stacks.values() if [*stack] == [*range(num_layers)]]
    if len(fitting) > 1:
        raise ModelError(
            f"more than one stack of {num_layers} layers holds a self_attn: {_roots(stacks)}",
            hint="kvtriage cannot tell which of them is the text model; please report this architecture",
        )
    if not stacks:
        raise ModelError(
            f"the weights hold no self_attn projection, and the configuration means {num_layers} layers",
            hint="layers are found by names such as `model.layers.N.self_attn.k_proj.weight`",
        )
    if not fitting:
        raise ModelError(
            f"the configuration means {num_layers} layers, and the weights hold other attention layers: "
            + _roots(stacks),
            hint="config.json (num_hidden_layers) and weights are of different models, or the weights are incomplete",
        )
    return fitting[0]


def _stacks(pattern: re.Pattern[str], tensor_names: Iterable[str]) -> Stacks:
    stacks: Stacks = {}
    for name in tensor_names:
        found = pattern.fullmatch(name)
        if found and not any(word in found["root"] for word in _OTHER_MODALITY):
            stacks.setdefault(found["root"], {})[int(found["layer"])] = found["prefix"]
    return {root: dict(sorted(stack.items())) for root, stack in sorted(stacks.items())}


def _roots(stacks: Mapping[str, Mapping[int, str]]) -> str:
    return ", ".join(f"{len(stack)} in {root}layers ({min(stack)} to {max(stack)})" for root, stack in stacks.items())
