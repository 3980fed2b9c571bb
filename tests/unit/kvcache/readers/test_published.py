"""Published config.json files, where a folder of them lies beside the checkout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtriage.errors import UnsupportedModel
from kvtriage.kvcache.readers import READERS, read_cache_spec
from kvtriage.kvcache.spec import CacheSpec
from tests.unit.kvcache.readers.configs import read_or_refuse

FOLDER = Path(__file__).resolve().parents[5] / "shared" / "configs"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no published configs at {FOLDER}")


def published() -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))}


def test_each_is_read_or_refused_by_its_architecture() -> None:
    answers = {name: read_or_refuse(config) for name, config in published().items()}
    for name, config in published().items():
        (architecture,) = config["architectures"]
        answer = answers[name]
        if architecture in READERS:
            assert isinstance(answer, CacheSpec), name
            assert answer.num_layers == config.get("text_config", config)["num_hidden_layers"], name
        else:
            assert isinstance(answer, UnsupportedModel), name
            assert architecture in answer.message, name
    assert sum(isinstance(answer, CacheSpec) for answer in answers.values()) >= 50


@pytest.mark.parametrize(
    ("name", "layers", "sliding", "kv_heads", "head_dim"),
    [
        ("openai--gpt-oss-20b.json", 24, 12, 8, 64),
        ("openai--gpt-oss-120b.json", 36, 18, 8, 64),
        ("google--gemma-3-27b-it.json", 62, 52, 16, 128),
        ("sophgo--gemma-3-4b-it.json", 34, 29, 4, 256),
        ("Olmo-3.1-32B-Instruct.json", 64, 48, 8, 128),
        ("EXAONE-4.0-32B.json", 64, 48, 8, 128),
        ("infsim--llama-3.1-8b-instruct.json", 32, 0, 8, 128),
        ("infsim--qwen2.5-7b-instruct.json", 28, 0, 4, 128),
        ("Qwen--Qwen3-235B-A22B.json", 94, 0, 4, 128),
        ("phi-4.json", 40, 0, 10, 128),
    ],
)
def test_known_geometries(name: str, layers: int, sliding: int, kv_heads: int, head_dim: int) -> None:
    spec = read_cache_spec(json.loads((FOLDER / name).read_bytes()))
    found = spec.layers[0]
    windowed = sum(layer.window_tokens is not None for layer in spec.layers)
    assert (spec.num_layers, windowed, found.num_kv_heads, found.head_dim) == (layers, sliding, kv_heads, head_dim)
