"""Published config.json files of models with latent attention, where a folder of them lies beside the checkout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.readers import read_cache_spec

FOLDER = Path(__file__).resolve().parents[5] / "shared" / "configs"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no published configs at {FOLDER}")

DENSE = 61 * 576 * 2
V32 = DENSE + 61 * 132
GLM_5 = 78 * (576 * 2 + 132)
GLM_52 = 78 * 576 * 2 + 21 * 132


@pytest.mark.parametrize(
    ("name", "token_bytes", "draft_layers", "max_model_len"),
    [
        ("deepseek-ai--DeepSeek-R1", DENSE, 1, 163_840),
        ("deepseek-ai--DeepSeek-V3", DENSE, 1, 163_840),
        ("nvidia--DeepSeek-V3.1-NVFP4", DENSE, 1, 163_840),
        ("infsim--deepseek-v2-lite", 27 * 576 * 2, 0, 163_840),
        ("moonshotai--Kimi-K2-Instruct", DENSE, 0, 131_072),
        ("moonshotai--Kimi-K2-Instruct_rtp", DENSE, 0, 131_072),
        ("moonshotai--Kimi-K2.5", DENSE, 0, 262_144),
        ("nvidia--Kimi-K2.5-NVFP4", DENSE, 0, 262_144),
        ("nvidia--Kimi-K2.6-NVFP4", DENSE, 0, 262_144),
        ("nvidia--Kimi-K2.7-Code-NVFP4", DENSE, 0, 262_144),
        ("deepseek-ai--DeepSeek-V3.2", V32, 1, 163_840),
        ("nvidia--DeepSeek-V3.2-NVFP4", V32, 1, 163_840),
        ("nvidia--GLM-5-NVFP4", GLM_5, 1, 202_752),
        ("nvidia--GLM-5.1-NVFP4", GLM_5, 1, 202_752),
        ("zai-org--GLM-5-FP8", GLM_5, 1, 202_752),
        ("zai-org--GLM-5.1", GLM_5, 1, 202_752),
        ("zai-org--GLM-5.1-FP8", GLM_5, 1, 202_752),
        ("infsim--glm-5.2-fp8", GLM_5, 1, 1_048_576),  # states no frequency of its index
        ("nvidia--GLM-5.2-NVFP4", GLM_52, 1, 1_048_576),
        ("zai-org--GLM-5.2", GLM_52, 1, 1_048_576),
        ("zai-org--GLM-5.2-FP8", GLM_52, 1, 1_048_576),
        ("sophgo--MiniCPM3-4B", 62 * 40 * 192 * 2, 0, 32_768),
    ],
)
def test_bytes_of_a_token(name: str, token_bytes: int, draft_layers: int, max_model_len: int) -> None:
    spec = read_cache_spec(published(name))
    for context_len in (1, 32_768):
        worksheet = price_policy(spec, CachePolicy.native(spec.num_layers), (context_len,))
        assert worksheet.bf16_bytes == token_bytes * context_len
    assert len(spec.draft_layers) == draft_layers
    assert spec.max_model_len == max_model_len


@pytest.mark.parametrize(
    ("names", "window_only", "fine", "coarse"),
    [
        (
            ("deepseek-ai--DeepSeek-V4-Flash", "nvidia--DeepSeek-V4-Flash-NVFP4", "sgl-project--DeepSeek-V4-Flash-FP8"),
            2,
            21,
            20,
        ),
        (
            ("deepseek-ai--DeepSeek-V4-Pro", "nvidia--DeepSeek-V4-Pro-NVFP4", "sgl-project--DeepSeek-V4-Pro-FP8"),
            0,
            30,
            31,
        ),
    ],
    ids=["flash", "pro"],
)
def test_deepseek_v4(names: tuple[str, ...], window_only: int, fine: int, coarse: int) -> None:
    """Of one sequence of 32,768 tokens: a window of 128 everywhere, 8,192 and 256 compressed positions."""
    layers = window_only + fine + coarse
    vectors = 1_024 * (layers * 128 + fine * 8_192 + coarse * 256)
    waiting = fine * 8 * (8_192 + 2_048) + coarse * 128 * 4_096
    keys = fine * 8_192 * 132
    for name in names:
        spec = read_cache_spec(published(name))
        assert (spec.num_layers, len(spec.draft_layers), spec.max_model_len) == (layers, 1, 1_048_576)
        worksheet = price_policy(spec, CachePolicy.native(layers), (32_768,))
        assert worksheet.bf16_bytes == vectors + waiting + keys


def published(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_bytes())
    return config
