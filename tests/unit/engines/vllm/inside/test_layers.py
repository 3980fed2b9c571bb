"""Which heads a rank holds, and what is read off a layer."""

from __future__ import annotations

import json
import math

import pytest
import torch
from kvtriage_layers import find_places
from torch import nn

from tests.unit.engines.vllm.inside.worker import Backend, Worker


def test_what_acts_on_the_data_is_told() -> None:
    worker = Worker()
    layer = worker.attention(1)
    layer.kv_cache_dtype, layer.kv_cache = "fp8", torch.zeros(2, 3, dtype=torch.uint8)
    layer._k_scale, layer._v_scale = torch.tensor([0.1, 0.2]), torch.tensor([[0.3], [0.4]])
    found = worker.kvtriage_layers()[1]
    assert (found["layer_idx"], found["kv_cache_dtype"], found["cache_dtype"]) == (1, "fp8", "uint8")
    assert found["k_scale"] == torch.tensor([0.1, 0.2]).tolist()
    assert found["v_scale"] == torch.tensor([0.3, 0.4]).tolist()
    assert found["q_scale"] == [1.0]
    assert found["backend"].endswith("worker.Backend")
    assert (found["backend_name"], found["per_head_scales"]) == (f"FAKE_ATTN ({found['backend']})", False)
    assert found["unsupported"] is None


def test_scales_that_are_no_numbers_go_as_words() -> None:
    worker = Worker()
    layer = worker.attention(0)
    layer._k_scale, layer._v_scale = torch.tensor([math.nan, 0.5]), torch.tensor([math.inf])
    layer._k_scale_float = math.nan
    found = worker.kvtriage_layers()[0]
    assert (found["k_scale"], found["v_scale"], found["k_scale_float"]) == (["nan", 0.5], ["inf"], "nan")
    json.dumps(found, allow_nan=False)


def test_whether_q_is_quantised_and_whether_it_would_be_are_two_things() -> None:
    worker = Worker()
    first, second = worker.attention(0), worker.attention(1)
    first.impl.supports_quant_query_input = second.impl.supports_quant_query_input = True
    second.query_quant = torch.nn.Identity()
    found = [(live["takes_quantized_q"], live["quantizes_q"]) for live in worker.kvtriage_layers()]
    assert found == [(True, False), (True, True)]
    assert not Worker().kvtriage_layers()[0]["takes_quantized_q"]


def test_a_backend_of_vllms_own_goes_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "__module__", "vllm.v1.attention.backends.fake")
    worker = Worker()
    worker.attention(1).impl.vllm_flash_attn_version = 4
    assert [live["backend_name"] for live in worker.kvtriage_layers()[:2]] == ["FAKE_ATTN", "FAKE_ATTN, FA4"]


@pytest.mark.parametrize("has_projection", [True, False], ids=["projection", "configuration"])
@pytest.mark.parametrize(
    ("heads", "ranks", "held"),
    [
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 2, [[0], [0]]),
    ],
)
def test_heads_are_global_and_each_kv_head_has_one_rank_that_answers(
    heads: int, ranks: int, held: list[list[int]], has_projection: bool
) -> None:
    answered: list[int] = []
    queries: list[int] = []
    for rank, expected in enumerate(held):
        worker = Worker(8, heads, (None,), rank=rank, ranks=ranks)
        if not has_projection:
            worker.model.get_submodule("layers.0").qkv_proj = nn.Identity()
        (found,) = worker.kvtriage_layers()
        assert found["heads"] == expected
        assert [place.total_kv_heads for place in find_places(worker)] == [heads]
        queries += found["query_heads"]
        worker.kvtriage_observe(True)
        answered += worker.kvtriage_ranges()["0"]["heads"]
    assert queries == list(range(8))
    assert answered == list(range(heads))


def test_a_layer_that_reads_anothers_cache_names_it() -> None:
    assert [layer["shares_with"] for layer in Worker(layers=(None, None, 0)).kvtriage_layers()] == [None, None, 0]


def test_latent_and_cross_attention_are_unsupported_by_name() -> None:
    worker = Worker(layers=(None, None, None))
    worker.attention(0).kv_lora_rank = 512
    worker.attention(1).attn_type = "encoder_decoder"
    latent, cross, plain = worker.kvtriage_layers()
    assert "MLA" in latent["unsupported"]
    assert "model.layers.0.attn" in latent["unsupported"]
    assert "cross-attention" in cross["unsupported"]
    assert plain["unsupported"] is None
    with pytest.raises(RuntimeError, match="MLA"):
        worker.kvtriage_observe(True)


def test_layers_without_a_cache_or_with_a_state_are_none() -> None:
    worker = Worker()
    worker.context["model.layers.7.mixer"] = nn.Identity()
    worker.attention(0).attn_type = "encoder_only"
    assert [layer["layer_idx"] for layer in worker.kvtriage_layers()] == [1]
