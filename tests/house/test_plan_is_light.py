"""`kvtriage plan` answers at once, because it loads next to nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 64,
    "hidden_size": 576,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "torch_dtype": "bfloat16",
}

SCRIPT = """
import sys
from kvtriage.cli.main import main
code = main(["plan", *sys.argv[1:]])
print(code, *sorted(sys.modules), file=sys.stderr)
"""
HEAVY = {"torch", "transformers", "numpy", "scipy", "pydantic", "jinja2", "safetensors", "rich", "msgspec"}
LOG = """\
INFO 11-02 09:14:09 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m', max_seq_len=4096
INFO 11-02 09:15:02 [gpu_worker.py:759] Available KV cache memory: 4.0 GiB
INFO 11-02 09:15:02 [kv_cache_utils.py:2327] GPU KV cache size: 186,400 tokens
"""


def modules_of(folder: Path, *arguments: str) -> tuple[int, set[str]]:
    """Exit code, and the modules that are loaded at the end."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-c", SCRIPT, str(folder), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    code, *modules = result.stderr.splitlines()[-1].split()
    return int(code), set(modules)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--context", "4096", "--json"),
        ("--memory", "4GiB", "--gpu", "h100", "--tp", "3"),
        ("--memory", "4GiB", "--markdown"),
        ("--memory", "4GiB", "--sweep"),
    ],
)
def test_plan_loads_neither_torch_nor_numpy_nor_pydantic(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code, modules = modules_of(tmp_path, *arguments)
    assert code == 0
    assert not modules & HEAVY


def test_a_comparison_loads_them_as_little(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(LOG)
    code, modules = modules_of(tmp_path, "--against", str(log))
    assert code in (0, 1, 3)
    assert not modules & HEAVY


def test_what_one_policy_does_not_need_is_not_loaded(tmp_path: Path) -> None:
    _, modules = modules_of(tmp_path, "--memory", "4GiB")
    assert "kvtriage.kvcache.prices.explain" in modules
    for name in ("kvcache.observed", "kvcache.prices.sweep", "cli.plan.sweep", "cli.plan.as_json"):
        assert f"kvtriage.{name}" not in modules
