"""The backend inside a real vLLM: see `against_vllm`, which is run there. KVTRIAGE_VLLM_PYTHON names its Python."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PYTHON = os.environ.get("KVTRIAGE_VLLM_PYTHON")

pytestmark = pytest.mark.skipif(PYTHON is None, reason="KVTRIAGE_VLLM_PYTHON names no Python with vLLM: make test-vllm")


@pytest.fixture(scope="module")
def found() -> Any:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [str(PYTHON), str(HERE / "against_vllm.py")], env=environment, capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_vllm_takes_it_for_its_own(found: Any) -> None:
    assert found["backend"] == "kvtriage_vllm_cpu.backend.Backend"


def test_only_caches_narrower_than_the_arithmetic_are_its_own(found: Any) -> None:
    assert found["ours"] == {"auto": False, "float16": True, "bfloat16": True, "fp8": True, "fp8_e4m3": True}


def test_unquantised_layers_are_stored_in_bf16_where_that_is_asked_for(found: Any) -> None:
    said = found["under_bf16"]
    assert said["is_ours"]
    assert said["dtypes"] == ["torch.bfloat16", "torch.uint8", "torch.float32"]
    assert said["difference"] < 1e-5


def test_what_it_does_not_store_is_refused_by_name(found: Any) -> None:
    assert found["refused"] == ["kvtriage-vllm-cpu stores fp8_e4m3, and not fp8_e5m2"]


def test_attention_over_e4m3_is_vllms_own_over_what_e4m3_keeps(found: Any) -> None:
    assert len(found["differences"]) == 10
    assert max(found["differences"].values()) < 1e-5, found["differences"]


def test_a_cpu_without_avx512_stores_fp8_all_the_same(found: Any) -> None:
    said = found["without_avx512"]
    assert "AVX-512" in said["vllm"]
    assert said["ours"] == "vec"
    assert said["cache_dtype afterwards"] == "fp8"


def test_a_server_of_another_release_does_not_start(found: Any) -> None:
    assert found["on_another_release"].startswith("kvtriage-vllm-cpu was tested with vLLM 0.32 and this is 0.33.0: ")
