from __future__ import annotations

from pathlib import Path

import pytest

from kvtriage.checkpoints.tensorrt_llm import write_tensorrt_llm_config
from kvtriage.errors import BadInput


@pytest.mark.parametrize(("scaling", "skip", "dtype"), [("unit", (), "fp8"), ("native", (0, 1), "auto")])
def test_one_dtype_for_all_layers(tmp_path: Path, scaling: str, skip: tuple[int, ...], dtype: str) -> None:
    write_tensorrt_llm_config(scaling, skip, tmp_path / "x.yaml")
    assert (tmp_path / "x.yaml").read_text() == f"kv_cache_config:\n  dtype: {dtype}\n"


@pytest.mark.parametrize(
    ("scaling", "skip", "says"),
    [
        ("per_tensor", (), "this case needs per-tensor scales"),
        ("per_head", (3,), "this case needs per-head scales"),
        ("unit", (3, 4), "keeps 2 of them in BF16"),
    ],
)
def test_what_it_cannot_serve_is_refused(tmp_path: Path, scaling: str, skip: tuple[int, ...], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        write_tensorrt_llm_config(scaling, skip, tmp_path / "x.yaml")
    assert not (tmp_path / "x.yaml").exists()
