"""Real servers of vLLM on the CPU. KVTRIAGE_VLLM_PYTHON names the Python of the environment that it is in."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvtriage.engines.vllm.server import Server

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "packages" / "kvtriage-vllm-cpu"

START_S = 900.0
"""A server takes half a minute to start on two quiet cores."""

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
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture(scope="session")
def serve(vllm_python: str, vllm_environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Small servers with the extension and the CPU plug-in, computing in float32."""
    from kvtriage.engines.vllm.observer import EXTENSION, INSIDE
    from kvtriage.engines.vllm.recipe import cpu_environment
    from kvtriage.engines.vllm.server import Launch, Recipe, launch

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
            *(*parallel, "--worker-extension-cls", EXTENSION),
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
