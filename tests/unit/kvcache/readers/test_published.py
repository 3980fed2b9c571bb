"""Published config.json files, where a folder of them lies beside the checkout: each is read, and priced by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec
from tests.unit.kvcache.readers.published_caches import PUBLISHED, Held

FOLDER = Path(__file__).resolve().parents[5] / "shared" / "configs"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no published configs at {FOLDER}")

BY_NAME: dict[str, Held] = {name: held for names, held in PUBLISHED for name in names.split()}


def published(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_bytes())
    return config


def bf16_bytes(spec: CacheSpec, context_len: int) -> int:
    return price_policy(spec, CachePolicy.native(spec.num_layers), (context_len,)).bf16_bytes


def test_every_file_is_in_the_list_and_once() -> None:
    names = [name for listed, _ in PUBLISHED for name in listed.split()]
    assert len(names) == len(set(names))
    assert set(names) == {path.stem for path in FOLDER.glob("*.json")}


@pytest.mark.parametrize("context_len", [1, 7, 32768])
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_sequence_holds_what_the_list_says(name: str, context_len: int) -> None:
    spec = read_cache_spec(published(name))
    assert bf16_bytes(spec, context_len) == BY_NAME[name].sequence_bytes(context_len)


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("openai--gpt-oss-20b", 131072),
        ("google--gemma-3-27b-it", 131072),
        ("infsim--llama-3.1-8b-instruct", 131072),
        ("sophgo--Qwen-7B-Chat", 8192),
        ("sophgo--chatglm3-6b-32k", 16384),
        ("sophgo--glm-4-9b-chat", 512),
        ("sophgo--WizardCoder-15B-V1.0", 8192),
        ("gpt2-1p5B", 1024),
        ("mosaicml--mpt-7b", 2048),
        ("tiiuae--falcon-40b", 2048),
        ("sophgo--LWM-Text-Chat-1M", 2048),
        ("Qwen--Qwen3-VL-2B-Instruct", 262144),
    ],
)
def test_the_longest_context_is_the_one_that_the_file_states(name: str, length: int) -> None:
    """Some files differ from the model's card: one who cut a copy down for a small device has published that."""
    assert read_cache_spec(published(name)).max_model_len == length
