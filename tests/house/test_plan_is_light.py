"""`kvtriage plan` answers at once, because it loads next to nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
code = main(["plan", sys.argv[1], "--context", "4096", "--json"])
heavy = {"torch", "transformers", "numpy", "scipy", "pydantic", "jinja2", "safetensors"} & set(sys.modules)
print(code, *sorted(heavy), file=sys.stderr)
"""


def test_plan_loads_neither_torch_nor_numpy_nor_pydantic(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    result = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True)
    assert result.stderr.splitlines()[-1] == "0"
    assert "worksheet" in json.loads(result.stdout)
