"""What an architecture can carry: a fault is planted only where the function is known to stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvtriage.checkpoints.model_folder import ModelFolder
from kvtriage.errors import ModelError

__all__ = ["Family", "UnsupportedFault", "family_of"]


class UnsupportedFault(ModelError):
    """A fault that this architecture cannot carry without changing its function."""


@dataclass(frozen=True)
class Family:
    """Two facts of a modelling file that the weights alone do not tell."""

    model_type: str
    gain_plus_one: bool
    """Its RMS norms multiply by 1 + w."""
    bias_switch: bool
    """`attention_bias: true` gives q, k, v and o projections a bias."""


_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            Family("llama", gain_plus_one=False, bias_switch=True),
            Family("mistral", gain_plus_one=False, bias_switch=False),
            Family("qwen2", gain_plus_one=False, bias_switch=False),
            Family("qwen3", gain_plus_one=False, bias_switch=True),
            Family("gemma", gain_plus_one=True, bias_switch=True),
            Family("gemma2", gain_plus_one=True, bias_switch=True),
            Family("gemma3_text", gain_plus_one=True, bias_switch=True),
        )
    }
)
"""As read in transformers' modeling_*.py: `attention_bias` in q, k, v and o, and the norm's form."""


def family_of(model: ModelFolder) -> Family:
    model_type = _text_config(model.config).get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise UnsupportedFault(
            f"kvtriage does not know how to plant faults in a model of type {model_type!r}",
            hint=f"it knows {', '.join(sorted(_FAMILIES))}",
        )
    return _FAMILIES[model_type]


def _text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config
