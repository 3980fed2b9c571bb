"""Extension and overlay in real servers: ranges as the embedded engine sees them, scales as the file has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtriage.checkpoints.model_folder import load_model_folder
from kvtriage.checkpoints.overlay import read_scales, write_overlay
from kvtriage.fp8.scales import LayerScales, ScaleSet, fit_scales
from kvtriage.fp8.stats import KVStats
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.server_args import vllm_args
from kvtriage.kvcache.spec import CacheSpec
from tests.unit.engines import tiny
from tests.vllm.conftest import Serve

EDGES = (0, 16, 64)
PROMPTS = [tiny.prompt(150, seed=1), tiny.prompt(40, seed=2)]
TOLERANCE = 1e-4
"""Of a scale, relative: two implementations of the same float32 arithmetic."""
BACKEND = "kvtriage_vllm_cpu.backend.Backend"


def complete(server: Any, prompt: tuple[int, ...], new_tokens: int = 1) -> list[int]:
    models = server.client.get_json("/v1/models")
    body = {
        "model": models["data"][0]["id"],
        "prompt": list(prompt),
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = server.client.post_json("/v1/completions", body)
    return list(answer["choices"][0]["token_ids"])


def observe_here(folder: Path, spec: CacheSpec) -> KVStats:
    from kvtriage.engines.embedded.engine import open_engine

    with open_engine(folder, spec, numerics="storage", device="cpu", threads=1) as engine:
        return engine.observe(PROMPTS, EDGES, lambda done, total: None)


def random_scales(spec: CacheSpec, scaling: Scaling) -> ScaleSet:
    generator = np.random.default_rng(0)

    def draw(count: int) -> tuple[float, ...]:
        numbers = generator.uniform(0.01, 0.1, count if scaling is Scaling.PER_HEAD else 1)
        return tuple(float(np.float32(number)) for number in numbers)

    return ScaleSet(
        scaling,
        tuple(
            LayerScales(
                layer.layer_idx, draw(layer.num_attention_heads), draw(layer.num_kv_heads), draw(layer.num_kv_heads)
            )
            for layer in spec.layers
        ),
    )


@pytest.mark.parametrize(("kv_heads", "ranks"), [(4, 1), (4, 2), (1, 2)], ids=["whole", "split", "replicated"])
def test_scales_calibrated_inside_vllm_equal_the_embedded_engines(
    serve: Serve, tmp_path: Path, ranks: int, kv_heads: int
) -> None:
    from kvtriage.engines.vllm.observer import Observer

    spec = tiny.save(tiny.llama(num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=32), tmp_path / "model")
    expected = observe_here(tmp_path / "model", spec)
    tokens = sum(map(len, PROMPTS))
    with serve(tmp_path / "model", ranks=ranks, stores_bf16=False) as server:
        observer = Observer(server.client)
        observer.start(EDGES)
        for prompt in PROMPTS:
            complete(server, prompt)
        observer.stop()
        found = observer.ranges(spec, EDGES, tokens)
        assert observer.nonfinite() == dict.fromkeys(range(spec.num_layers), 0)
    for key, seen in found.tensors.items():
        np.testing.assert_allclose(seen.amax_by_position, expected.tensors[key].amax_by_position, rtol=TOLERANCE)
    for scaling in (Scaling.PER_TENSOR, Scaling.PER_HEAD):
        for one, other in zip(
            fit_scales(found, spec, scaling).layers, fit_scales(expected, spec, scaling).layers, strict=True
        ):
            np.testing.assert_allclose((*one.q, *one.k, *one.v), (*other.q, *other.k, *other.v), rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "scaling", "skip", "ranks"),
    [
        ("llama", Scaling.PER_HEAD, (), 2),
        ("llama", Scaling.PER_TENSOR, (1,), 2),
        ("gemma2", Scaling.PER_HEAD, (0, 1), 1),
        ("qwen3", Scaling.PER_TENSOR, (), 1),
    ],
)
def test_the_overlay_loads_and_its_scales_are_live_to_the_bit(
    serve: Serve, tmp_path: Path, family: str, scaling: Scaling, skip: tuple[int, ...], ranks: int
) -> None:
    from kvtriage.engines.vllm.observer import Observer

    config = getattr(tiny, family)(num_attention_heads=8, num_key_value_heads=4, head_dim=32)
    spec = tiny.save(config, tmp_path / "model")
    model = load_model_folder(tmp_path / "model", trust_remote_code=False)
    write_overlay(model, random_scales(spec, scaling), tmp_path / "overlay")
    flags = vllm_args(CachePolicy.fp8(spec.num_layers, scaling, skip), spec, None)
    with serve(tmp_path / "overlay", *flags, ranks=ranks) as server:
        observer = Observer(server.client)
        live = observer.layers()
        observer.watch(True)
        tokens = complete(server, PROMPTS[0], 4)
        assert sum(observer.nonfinite().values()) == 0
    assert len(tokens) == 4
    file = {layer.layer_idx: layer for layer in read_scales(tmp_path / "overlay").layers}
    heads_seen: dict[int, list[int]] = {}
    for layer in (layer for rank in live for layer in rank):
        assert layer.backend == BACKEND
        assert layer.cache_dtype == ("bfloat16" if layer.layer_idx in skip else "uint8")
        heads = layer.heads or ()
        heads_seen.setdefault(layer.layer_idx, []).extend(heads)
        own = file[layer.layer_idx]
        if scaling is Scaling.PER_HEAD:
            assert layer.k_scale == tuple(own.k[head] for head in heads)
            assert layer.v_scale == tuple(own.v[head] for head in heads)
            assert layer.q_scale == tuple(max(own.q[2 * head : 2 * head + 2]) for head in heads)
        else:
            assert (layer.k_scale, layer.v_scale, layer.q_scale) == (own.k, own.v, own.q)
    assert heads_seen == {layer_idx: list(range(4)) for layer_idx in range(spec.num_layers)}
