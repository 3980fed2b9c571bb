from __future__ import annotations

from dataclasses import replace

import pytest

from kvtriage.kvcache.allocator.from_spec import stack_of_spec
from kvtriage.kvcache.allocator.layers import MAX_LAYERS, FullLayer, IndexLayer, LayerStack, MlaLayer, SlidingLayer
from kvtriage.kvcache.allocator.refusal import EngineRefused, Reason
from kvtriage.kvcache.readers.latent import Latent, latent_layer
from kvtriage.kvcache.spec import IndexKeys
from tests.unit.kvcache.models import GPT_OSS_20B, layer, spec_of


def test_one_gpu_holds_every_head() -> None:
    stack = stack_of_spec(GPT_OSS_20B)
    assert stack.kinds == (SlidingLayer(8, 64, 64, 128), FullLayer(8, 64, 64))
    assert stack.places == (tuple(range(0, 24, 2)), tuple(range(1, 24, 2)))


@pytest.mark.parametrize(("ranks", "held"), [(2, 4), (8, 1), (16, 1)])
def test_heads_are_shared_out_and_copied_beyond_their_number(ranks: int, held: int) -> None:
    kinds = stack_of_spec(GPT_OSS_20B, ranks).kinds
    assert kinds == (SlidingLayer(held, 64, 64, 128), FullLayer(held, 64, 64))


def test_query_heads_must_divide() -> None:
    with pytest.raises(EngineRefused) as caught:
        stack_of_spec(spec_of(layer(heads=9, kv_heads=3)), 2)
    assert caught.value.refusal.reason is Reason.HEADS
    assert caught.value.refusal.error_type == "ValidationError"


def test_cohere_windows_are_one_token_wider_in_the_engine() -> None:
    spec = replace(spec_of(layer(window_tokens=4096)), model_type="cohere2")
    assert stack_of_spec(spec).kinds == (SlidingLayer(2, 16, 16, 4097),)


def test_absurd_depths_are_refused_before_they_are_built() -> None:
    with pytest.raises(ValueError, match="10,000 layers"):
        LayerStack.of_runs([(MAX_LAYERS + 1, FullLayer(1, 1, 1))])


def test_every_latent_layer_of_a_sparse_model_is_sparse() -> None:
    """A layer without an index of its own reads what another one chose, and packs its FP8 rows as that one does."""
    latent = Latent(64, 576)
    layers = latent_layer(0, latent, (IndexKeys(132),)), latent_layer(1, latent)
    assert stack_of_spec(spec_of(*layers)).kinds == (MlaLayer(576, sparse=True), IndexLayer(132))
