from __future__ import annotations

from dataclasses import replace

import pytest

from kvtriage.errors import UnsupportedModel
from kvtriage.kvcache.allocator.from_spec import stack_of_spec
from kvtriage.kvcache.allocator.layers import (
    MAX_LAYERS,
    ChunkedLayer,
    CrossLayer,
    FullLayer,
    IndexLayer,
    LayerStack,
    MlaLayer,
    SlidingLayer,
    StateLayer,
)
from kvtriage.kvcache.allocator.refusal import EngineRefused, Reason
from kvtriage.kvcache.readers.latent import Latent, latent_layer
from kvtriage.kvcache.spec import Compressor, IndexKeys, LayerKind, LayerSpec, StateTensor
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


STATE = StateTensor("recurrent", (4, 16, 16), 2, sharded_axis=0)


def test_each_kind_of_layer_has_its_place() -> None:
    layers = (
        layer(0),
        replace(layer(1, 8192), kind=LayerKind.CHUNKED),
        replace(layer(2), kind=LayerKind.CROSS, encoder_tokens=1500),
        LayerSpec(3, LayerKind.STATE, 0, 0, 0, 0, beside=(STATE,)),
        LayerSpec(4, LayerKind.NONE, 0, 0, 0, 0),
        replace(layer(5), shares_with=0),
        layer(6),
    )
    stack = stack_of_spec(spec_of(*layers), 2)
    kinds = (FullLayer(1, 16, 16), ChunkedLayer(1, 16, 16, 8192), CrossLayer(1, 16, 16), StateLayer(1024))
    assert stack.kinds == kinds
    assert stack.places == ((0, 6), (1,), (2,), (3,))
    assert stack.num_layers == 7


def test_a_layer_with_attention_and_a_state_has_two_caches_in_one_place() -> None:
    both = replace(layer(0), beside=(STATE,)), replace(layer(1), beside=(STATE,))
    stack = stack_of_spec(replace(spec_of(*both), model_type="falcon_h1"))
    assert stack.kinds == (FullLayer(2, 16, 16), StateLayer(2048, checkpoint_blocks=1))
    assert stack.places == ((0, 1), (0, 1))


def test_latents_are_whole_on_every_rank() -> None:
    latent = LayerSpec(0, LayerKind.LATENT, 128, 1, 576, 0)
    assert stack_of_spec(spec_of(latent), 8).kinds == (MlaLayer(576),)


@pytest.mark.parametrize(
    "compressed",
    [
        LayerSpec(0, LayerKind.LATENT, 64, 1, 512, 0, window_tokens=128),
        LayerSpec(0, LayerKind.LATENT, 64, 1, 512, 0, compress_ratio=4),
        LayerSpec(0, LayerKind.LATENT, 64, 1, 576, 0, beside=(IndexKeys(132, ratio=4),)),
        LayerSpec(0, LayerKind.LATENT, 64, 1, 576, 0, beside=(Compressor(8, 4096),)),
    ],
)
def test_compressed_caches_are_refused_by_name(compressed: LayerSpec) -> None:
    with pytest.raises(UnsupportedModel, match="does not model the pages of"):
        stack_of_spec(spec_of(compressed))


def test_a_drafters_layers_stand_behind_the_models() -> None:
    drafted = stack_of_spec(spec_of(layer(0), layer(1)), draft_layers=(layer(2), layer(3)), num_speculative_tokens=1)
    assert drafted.places == ((0, 1, 2, 3),)
    assert (drafted.num_layers, drafted.first_draft_index) == (2, 2)
