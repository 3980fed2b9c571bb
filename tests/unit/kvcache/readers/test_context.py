"""How long a context may be, and how long the engine serves it unless told otherwise."""

from __future__ import annotations

import pytest

from kvtriage.errors import ModelError
from kvtriage.kvcache.readers import read_cache_spec
from tests.unit.kvcache.readers.configs import GEMMA3_4B, LLAMA, edited


def lengths(rope: object, **changes: object) -> tuple[int, int | None]:
    spec = read_cache_spec(edited(LLAMA, max_position_embeddings=32768, rope_scaling=rope, **changes))
    return spec.max_model_len, spec.default_model_len


@pytest.mark.parametrize(
    ("rope", "longest", "served"),
    [
        (None, 32768, None),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 32768, None),
        # YaRN: a length stated without it is stretched, and vLLM 0.32 serves what is stated.
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072, 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768, None),
        # Linear and dynamic: vLLM 0.32 multiplies what is stated.
        ({"rope_type": "linear", "factor": 4.0}, 131072, None),
        ({"type": "dynamic", "factor": 2.0}, 65536, None),
        ({"rope_type": "dynamic", "factor": None}, 32768, None),
    ],
)
def test_what_the_rotary_embedding_makes_of_the_stated_length(rope: object, longest: int, served: int | None) -> None:
    assert lengths(rope) == (longest, served)


def test_longrope_is_served_at_its_original_length() -> None:
    assert lengths({"rope_type": "longrope"}, original_max_position_embeddings=4096) == (32768, 4096)
    assert lengths({"rope_type": "longrope"}) == (32768, None)


def test_parameters_may_differ_between_kinds_of_layers() -> None:
    rope = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    spec = read_cache_spec(edited(LLAMA, max_position_embeddings=8192, rope_parameters=rope))
    assert spec.max_model_len == 65536


def test_gemma_3_states_its_length_as_scaled() -> None:
    assert read_cache_spec(GEMMA3_4B).max_model_len == 131072


def test_a_factor_that_makes_no_sense_is_named() -> None:
    with pytest.raises(ModelError, match=r"rope_scaling\.factor"):
        lengths({"rope_type": "linear", "factor": -1})
