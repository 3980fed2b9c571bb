"""A list of kinds and a period for the same layers."""

from __future__ import annotations

import pytest

from kvtriage.errors import UnsupportedModel
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import LayerKind
from tests.unit.kvcache.readers.configs import LLAMA, edited


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Cohere2ForCausalLM", "Exaone4ForCausalLM"])
def test_a_list_and_a_period_must_agree(architecture: str) -> None:
    types = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = edited(LLAMA, architectures=[architecture], sliding_window=64, layer_types=types, sliding_window_pattern=4)
    spec = read_cache_spec(config)
    assert spec.layers_of(LayerKind.FULL) == (3,)
    assert not any("layer_types" in line for line in spec.assumed)
    with pytest.raises(UnsupportedModel, match="contradicts sliding_window_pattern, which is 2"):
        read_cache_spec(edited(config, sliding_window_pattern=2))
