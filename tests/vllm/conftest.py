"""Real servers of vLLM on the CPU. KVTRIAGE_VLLM_PYTHON names the Python of the environment that it is in."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtriage.checkpoints.model_folder import load_model_folder
from kvtriage.checkpoints.overlay import write_overlay
from kvtriage.engines.base import Arm, Engine, ScoreRequest
from kvtriage.engines.embedded.engine import open_engine
from kvtriage.engines.embedded.tokenizer import load_tokenizer
from kvtriage.engines.vllm.engine import VllmEngine
from kvtriage.engines.vllm.fleet import LaunchedFleet
from kvtriage.engines.vllm.observer import EXTENSION, INSIDE
from kvtriage.engines.vllm.recipe import ServerOptions, cpu_environment
from kvtriage.engines.vllm.server import Launch, Recipe, Server, launch
from kvtriage.fp8.scales import ScaleSet, fit_scales
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from tests.unit.engines import tiny
from tests.vllm.kept import KeptFleet

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "packages" / "kvtriage-vllm-cpu"

START_S = 1800.0
"""A server takes half a minute to start on two quiet cores."""
CACHE = ("--kv-cache-memory-bytes", str(64 * 30 * 128 * 768))
"""64 blocks of SmolLM2 in BF16, 30 layers of 128 tokens of 768 bytes: 180 MiB, for servers that stand side by side."""

TEXTS = [ScoreRequest(f"text {seed}", tiny.prompt(120, seed=seed), 20) for seed in range(3)]
"""Seven times as long as the hybrid model's window of 16 tokens."""

KEY = "the-key-of-servers-that-tests-attach-to"
"""Of every server of `serve`, so that another process may be given it as its token."""

Serve = Callable[..., Any]
"""(model folder, *arguments, ranks, max_model_len, stores_bf16) → a context of a server that is ready."""


def put_where_vllm_finds_it(folder: Path) -> None:
    """The plug-in's entry points, as its installation would leave them: what is tested is this working tree."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    name = f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    (folder / name).mkdir(parents=True)
    (folder / name / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in points.items()))
    ]
    (folder / name / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("KVTRIAGE_VLLM_PYTHON")
    if python is None:
        pytest.skip("KVTRIAGE_VLLM_PYTHON names no Python with vLLM: make test-vllm")
    if not Path(python).is_file():
        pytest.fail(f"KVTRIAGE_VLLM_PYTHON names {python}, which is no file")
    return python


@pytest.fixture(scope="session")
def vllm_environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Small servers with the plug-in and without a compiler."""
    found_here = tmp_path_factory.mktemp("entry_points")
    put_where_vllm_finds_it(found_here)
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (PLUGIN / "src", found_here))),
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture(scope="session")
def serve(vllm_python: str, vllm_environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Small servers with the extension and the CPU plug-in, computing in float32."""
    logs = tmp_path_factory.mktemp("logs")

    @contextmanager
    def served(
        model: Path, *arguments: str, ranks: int = 1, max_model_len: int = 256, stores_bf16: bool = True
    ) -> Iterator[Server]:
        native = "auto" if stores_bf16 else "float32"
        parallel = ("--tensor-parallel-size", str(ranks))
        command = (
            *(vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(max_model_len)),
            *(*CACHE, *parallel, "--worker-extension-cls", EXTENSION),
            *arguments,
        )
        environment = {
            **vllm_environment,
            **cpu_environment(parallel, native, {}, sorted(os.sched_getaffinity(0)), nodes=1),
            "PYTHONPATH": os.pathsep.join((str(INSIDE), vllm_environment["PYTHONPATH"])),
            "VLLM_SERVER_DEV_MODE": "1",
        }
        how = Launch(logs, lambda text: None, START_S, new_key=lambda: KEY)
        with launch(Recipe(command, environment), "server", how) as server:
            yield server

    return served


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CacheSpec]:
    """A small model of sliding and full layers: its folder and geometry."""
    folder = tmp_path_factory.mktemp("hybrid")
    config = tiny.gemma3(num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    return folder / "model", tiny.save(config, folder / "model")


@pytest.fixture(scope="session")
def embedded(hybrid: tuple[Path, CacheSpec]) -> Iterator[Engine]:
    with open_engine(*hybrid, numerics="storage", device="cpu", threads=1) as engine:
        yield engine


@pytest.fixture(scope="session")
def hybrid_scales(embedded: Engine) -> dict[Scaling, ScaleSet]:
    stats = embedded.observe([request.token_ids for request in TEXTS], (0, 64), lambda done, total: None)
    return {s: fit_scales(stats, embedded.spec, s) for s in (Scaling.PER_TENSOR, Scaling.PER_HEAD)}


@pytest.fixture(scope="session")
def four_arms(embedded: Engine, hybrid_scales: dict[Scaling, ScaleSet]) -> list[Arm]:
    spec, scales = embedded.spec, hybrid_scales[Scaling.PER_HEAD]
    count = spec.num_layers
    return [
        Arm("bf16", CachePolicy.native(count)),
        Arm("fp8_unit", CachePolicy.fp8(count, Scaling.UNIT)),
        Arm("fp8_per_head", CachePolicy.fp8(count, Scaling.PER_HEAD), scales),
        Arm("fp8_per_head_skip", CachePolicy.fp8(count, Scaling.PER_HEAD, spec.layers_of(LayerKind.SLIDING)), scales),
    ]


@pytest.fixture(scope="session")
def vllm(
    vllm_python: str,
    vllm_environment: Mapping[str, str],
    hybrid: tuple[Path, CacheSpec],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    """The hybrid model on servers that are started for the arms asked of it, and kept."""
    folder, geometry = hybrid
    place = tmp_path_factory.mktemp("vllm")

    def checkpoint(scales: ScaleSet) -> Path:
        overlay = place / scales.scaling
        if not overlay.exists():
            write_overlay(load_model_folder(folder, trust_remote_code=False), scales, overlay)
        return overlay

    command = (vllm_python, "-m", "vllm.entrypoints.openai.api_server")
    words = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", *CACHE)
    environment = cpu_environment(words, "auto", {}, sorted(os.sched_getaffinity(0)), nodes=1)
    paths = {"PYTHONPATH": os.pathsep.join((str(INSIDE), vllm_environment["PYTHONPATH"]))}
    options = ServerOptions(command, words, "auto", {**vllm_environment, **environment, **paths})
    how = Launch(place / "servers", print, START_S)
    with KeptFleet(lambda: LaunchedFleet(geometry, folder, options, how, checkpoint)) as fleet:
        yield VllmEngine(geometry, load_tokenizer(folder, False), fleet, print)
