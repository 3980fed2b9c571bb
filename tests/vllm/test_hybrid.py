"""A small hybrid model through real servers: four arms, each as the embedded engine has it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean

import pytest

from kvtriage.checkpoints.model_folder import load_model_folder
from kvtriage.checkpoints.overlay import write_overlay
from kvtriage.engines.base import Arm, Engine, ScoreRequest
from kvtriage.engines.embedded.engine import open_engine
from kvtriage.engines.embedded.tokenizer import load_tokenizer
from kvtriage.engines.vllm.attach import AttachedFleet
from kvtriage.engines.vllm.engine import VllmEngine
from kvtriage.engines.vllm.fleet import LaunchedFleet
from kvtriage.engines.vllm.recipe import ServerOptions, cpu_environment
from kvtriage.engines.vllm.server import Launch
from kvtriage.errors import PolicyNotApplied
from kvtriage.fp8.scales import ScaleSet, fit_scales
from kvtriage.kvcache.policy import CachePolicy, Fp8, Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from kvtriage.stages.arms import check_applied
from tests.unit.engines import tiny
from tests.vllm.conftest import KEY, START_S, Serve

REQUESTS = [ScoreRequest(f"text {seed}", tiny.prompt(120, seed=seed), 20) for seed in range(3)]
"""Seven times as long as the window of 16 tokens."""
BACKEND = "CPU_ATTN (kvtriage_vllm_cpu.backend.Backend)"
TOLERANCE_NATS = 0.02
"""Between the engines' means over 300 tokens."""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CacheSpec]:
    folder = tmp_path_factory.mktemp("hybrid")
    config = tiny.gemma3(num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    return folder / "model", tiny.save(config, folder / "model")


@pytest.fixture(scope="module")
def arms(embedded: Engine) -> list[Arm]:
    spec = embedded.spec
    stats = embedded.observe([request.token_ids for request in REQUESTS], (0, 64), lambda done, total: None)
    scales, count = fit_scales(stats, spec, Scaling.PER_HEAD), spec.num_layers
    sliding = spec.layers_of(LayerKind.SLIDING)
    return [
        Arm("bf16", CachePolicy.native(count)),
        Arm("fp8_unit", CachePolicy.fp8(count, Scaling.UNIT)),
        Arm("fp8_per_head", CachePolicy.fp8(count, Scaling.PER_HEAD), scales),
        Arm("fp8_per_head_skip", CachePolicy.fp8(count, Scaling.PER_HEAD, sliding), scales),
    ]


@pytest.fixture(scope="module")
def embedded(spec: tuple[Path, CacheSpec]) -> Iterator[Engine]:
    with open_engine(*spec, numerics="storage", device="cpu", threads=1) as engine:
        yield engine


@pytest.fixture
def vllm(
    vllm_python: str,
    vllm_environment: Mapping[str, str],
    spec: tuple[Path, CacheSpec],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Engine]:
    folder, geometry = spec
    for name, value in vllm_environment.items():
        monkeypatch.setenv(name, value)

    def checkpoint(scales: ScaleSet) -> Path:
        overlay = tmp_path / scales.scaling
        if not overlay.exists():
            write_overlay(load_model_folder(folder, trust_remote_code=False), scales, overlay)
        return overlay

    command = (vllm_python, "-m", "vllm.entrypoints.openai.api_server")
    words = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256")
    environment = cpu_environment(words, "auto", {}, sorted(os.sched_getaffinity(0)), nodes=1)
    options = ServerOptions(command, words, "auto", environment)
    how = Launch(tmp_path / "servers", print, START_S)
    with LaunchedFleet(geometry, folder, options, how, checkpoint) as fleet:
        yield VllmEngine(geometry, load_tokenizer(folder, False), fleet, print)


def mean_nll(engine: Engine, arm: Arm) -> tuple[float, list[int]]:
    """Over all requests, nats per token; and the most likely token at each scored position."""
    with engine.open(arm) as session:
        answers = [session.score(request) for request in REQUESTS]
    return fmean(nll for answer in answers for nll in answer.nll), [t for answer in answers for t in answer.top1]


def test_four_arms_do_what_they_do_in_the_embedded_engine(vllm: Engine, embedded: Engine, arms: list[Arm]) -> None:
    info = vllm.info()
    assert (info.backend, info.native_dtype, info.compute_dtype) == (BACKEND, "bfloat16", "float32")
    assert info.per_head_scales
    pools = []
    for arm in arms:
        with vllm.open(arm) as session:
            applied = session.applied()
            check_applied(arm, applied, info, vllm.spec)
            made = session.generate([REQUESTS[0].token_ids], 4)
            assert len(made.token_ids[0]) == 4
            assert len(made.token_s) == 3
        assert applied.pool is not None
        pools.append(applied.pool.tokens)
        (here, here_top1), (there, there_top1) = mean_nll(embedded, arm), mean_nll(vllm, arm)
        assert there == pytest.approx(here, abs=TOLERANCE_NATS), arm.name
        assert fmean(map(int.__eq__, here_top1, there_top1)) > 0.9, arm.name
    native, unit, per_head, skipped = pools
    assert native < skipped < unit
    assert per_head == unit


def test_servers_that_run_already_are_attached_to_and_left_running(
    serve: Serve, spec: tuple[Path, CacheSpec], embedded: Engine, arms: list[Arm]
) -> None:
    folder, geometry = spec
    with serve(folder) as server:
        urls = {"bf16": server.client.url, "fp8_unit": server.client.url}
        with AttachedFleet(urls, (folder.name,), KEY) as fleet:
            engine = VllmEngine(geometry, load_tokenizer(folder, False), fleet, print)
            assert engine.info().server == ("attached",)
            here, there = mean_nll(embedded, arms[0])[0], mean_nll(engine, arms[0])[0]
            assert there == pytest.approx(here, abs=TOLERANCE_NATS)
            probe = Arm("one layer", CachePolicy.only(geometry.num_layers, (2,), Fp8(Scaling.UNIT)))
            answers = engine.probe(REQUESTS[:1], [probe], lambda done, total: None)
            assert answers[0][0] == pytest.approx(
                embedded.probe(REQUESTS[:1], [probe], lambda done, total: None)[0][0], rel=0.5
            )
            with pytest.raises(PolicyNotApplied, match="the server's cache dtype is auto"), engine.open(arms[1]):
                pass
        assert server.is_running
