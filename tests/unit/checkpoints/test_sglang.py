from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtriage.checkpoints.sglang import READ_BY, shared_octaves, write_sglang_scales
from kvtriage.errors import BadInput
from kvtriage.fp8.scales import LayerScales, ScaleSet
from kvtriage.kvcache.policy import Scaling

SCALES = ScaleSet(
    Scaling.PER_TENSOR, (LayerScales(0, (1.0,), (0.25,), (0.125,)), LayerScales(1, (1.0,), (0.5,), (2.0,)))
)


def test_the_page_of_engines_names_the_models_whose_class_reads_the_file() -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "engines.md"
    assert f"Model classes that have it: {', '.join(sorted(READ_BY))}." in " ".join(page.read_text().split())


def test_the_larger_of_k_and_v_for_each_rank_and_layer(tmp_path: Path) -> None:
    write_sglang_scales(SCALES, "llama", tmp_path / "scales.json", tp_size=2)
    assert json.loads((tmp_path / "scales.json").read_text()) == {
        "model_type": "llama",
        "kv_cache": {
            "dtype": "float8_e4m3fn",
            "scaling_factor": {"0": {"0": 0.25, "1": 2.0}, "1": {"0": 0.25, "1": 2.0}},
        },
    }


def test_what_sharing_costs() -> None:
    assert [shared_octaves(layer) for layer in SCALES.layers] == [1.0, 2.0]


@pytest.mark.parametrize("scaling", [Scaling.PER_HEAD, Scaling.UNIT])
def test_only_per_tensor_scales(tmp_path: Path, scaling: Scaling) -> None:
    with pytest.raises(BadInput, match=f"not {scaling.replace('_', '-')} scales"):
        write_sglang_scales(ScaleSet(scaling, SCALES.layers), "llama", tmp_path / "scales.json")
    assert not (tmp_path / "scales.json").exists()


def test_every_layer_and_at_least_one_rank(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="every layer"):
        write_sglang_scales(ScaleSet(Scaling.PER_TENSOR, SCALES.layers[1:]), "llama", tmp_path / "scales.json")
    with pytest.raises(BadInput, match="0 tensor-parallel ranks"):
        write_sglang_scales(SCALES, "llama", tmp_path / "scales.json", tp_size=0)
