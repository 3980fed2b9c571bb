"""Published files of models whose layers differ in kind, width or owner: which layers there are, and who drafts.

Expected are the numbers of model cards, written out; bytes are compared in test_published.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec, LayerSpec

FOLDER = Path(__file__).resolve().parents[5] / "shared" / "configs"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no published configs at {FOLDER}")

LLAMA_4 = "36 chunked 8192 8x128+128, 12 full 8x128+128"
GEMMA_26B = "25 sliding 1024 8x256+256, 5 full 2x512+512"
EXAONE = "48 sliding 4096 8x128+128, 16 full 8x128+128"
MINIMAX_M2 = "62 full 8x128+128"
MINIMAX_M3 = "3 full 4x128+128, 57 full 4x128+128 beside"
STEP = "12 full 8x128+128, 33 sliding 512 8x128+128"


@pytest.mark.parametrize(
    ("name", "layers", "draft", "max_model_len"),
    [
        ("meta-llama--Llama-4-Scout-17B-16E-Instruct", LLAMA_4, "", 10_485_760),
        ("meta-llama--Llama-4-Maverick-17B-128E-Instruct", LLAMA_4, "", 1_048_576),
        ("infsim--llama-4-scout-17b-16e-instruct-fp8-dynamic", LLAMA_4, "", 10_485_760),
        ("google--gemma-4-26B-A4B", GEMMA_26B, "", 262_144),
        ("nvidia--Gemma-4-26B-A4B-NVFP4", GEMMA_26B, "", 262_144),
        ("nvidia--Gemma-4-31B-IT-NVFP4", "50 sliding 1024 16x256+256, 10 full 4x512+512", "", 262_144),
        (
            "sophgo--gemma-4-E2B",
            "12 sliding 512 1x256+256, 3 full 1x512+512, 16 sliding 512 1x256+256 of 13, 4 full 1x512+512 of 14",
            "",
            131_072,
        ),
        ("XiaomiMiMo--MiMo-7B-Base", "36 full 8x128+128", "1 full 8x128+128", 32_768),
        (
            "XiaomiMiMo--MiMo-V2-Flash",
            "9 full 4x192+128, 39 sliding 128 8x192+128",
            "1 sliding 128 8x192+128",
            262_144,
        ),
        ("stepfun-ai--Step-3.7-Flash", STEP, "3 full 8x128+128", 65_536),
        ("stepfun-ai--Step-3.7-Flash-FP8", STEP, "3 full 8x128+128", 65_536),
        ("MiniMaxAI--MiniMax-M2.5", MINIMAX_M2, "", 196_608),
        ("MiniMaxAI--MiniMax-M2.7", MINIMAX_M2, "", 204_800),
        ("nvidia--MiniMax-M2.5-NVFP4", MINIMAX_M2, "", 196_608),
        ("nvidia--MiniMax-M2.7-NVFP4", MINIMAX_M2, "", 196_608),
        ("MiniMaxAI--MiniMax-M3", MINIMAX_M3, "7 full 4x128+128 beside", 1_048_576),
        ("nvidia--MiniMax-M3-NVFP4", MINIMAX_M3, "1 full 4x128+128 beside", 1_048_576),
        ("tencent--Hunyuan-A13B", "32 full 8x128+128", "", 32_768),
        ("nvidia--Llama-3_3-Nemotron-Super-49B-v1", "49 full 8x128+128, 31 none 0x0+0", "", 131_072),
        ("databricks--dbrx-16x13b", "40 full 8x128+128", "", 32_768),
        ("microsoft--Phi-mini-MoE-instruct", "32 sliding 2047 8x128+128", "", 4_096),
        ("EXAONE-4.0-32B", EXAONE, "", 131_072),
        ("EXAONE-4.5-33B", EXAONE, "1 sliding 4096 8x128+128", 262_144),
        ("Olmo-3.1-32B-Instruct", EXAONE, "", 65_536),
        ("Devstral-2-123B-Instruct", "88 full 8x128+128", "", 262_144),
        ("zai-org--GLM-4.5", "92 full 8x128+128", "1 full 8x128+128", 131_072),
        ("phi-4", "40 full 10x128+128", "", 16_384),
    ],
)
def test_layers_and_drafters(name: str, layers: str, draft: str, max_model_len: int) -> None:
    spec = published(name)
    assert counted(spec.layers) == parsed(layers)
    assert counted(spec.draft_layers) == parsed(draft)
    assert [layer.layer_idx for layer in (*spec.layers, *spec.draft_layers)] == list(
        range(spec.num_layers + len(spec.draft_layers))
    )
    assert spec.max_model_len == max_model_len


def test_what_a_file_leaves_out_is_listed() -> None:
    assert any("no_rope_layers" in line for line in published("meta-llama--Llama-4-Scout-17B-16E-Instruct").assumed)
    assert any("draft layers = 3" in line for line in published("stepfun-ai--Step-3.7-Flash").assumed)
    assert any("draft layers = 7" in line for line in published("MiniMaxAI--MiniMax-M3").assumed)
    assert published("nvidia--Gemma-4-31B-IT-NVFP4").assumed == ()


def published(name: str) -> CacheSpec:
    return read_cache_spec(json.loads((FOLDER / f"{name}.json").read_bytes()))


def counted(layers: tuple[LayerSpec, ...]) -> Counter[str]:
    return Counter(map(described, layers))


def described(layer: LayerSpec) -> str:
    """'sliding 512 1x256+256 of 13': kind, window, KV heads × width of K + width of V, and whose cache it is."""
    words = [layer.kind.value]
    if layer.window_tokens is not None:
        words.append(str(layer.window_tokens))
    words.append(f"{layer.num_kv_heads}x{layer.head_dim}+{layer.head_dim_v}")
    if layer.beside:
        words.append("beside")
    if layer.shares_with is not None:
        words.append(f"of {layer.shares_with}")
    return " ".join(words)


def parsed(text: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for run in filter(None, text.split(", ")):
        count, _, layer = run.partition(" ")
        found[layer] = int(count)
    return found
