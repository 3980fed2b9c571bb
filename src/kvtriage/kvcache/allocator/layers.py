"""What the engine sees of a model: one small record per layer, as it stands on one GPU.

Head counts are those of one rank, after tensor parallelism. A stack keeps equal layers together, so
that a price costs as much as the model has *kinds* of layers, not layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "MAX_LAYERS",
    "AttentionLayer",
    "CachelessLayer",
    "ChunkedLayer",
    "CrossLayer",
    "EngineLayer",
    "FullLayer",
    "IndexLayer",
    "LayerStack",
    "MlaLayer",
    "SlidingLayer",
    "StateLayer",
]

MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class FullLayer:
    """Attention to everything before: K and V of every token."""

    num_kv_heads: int
    head_size: int
    head_size_v: int


@dataclass(frozen=True, slots=True)
class SlidingLayer:
    """Attention to the last `window` tokens, the token itself among them."""

    num_kv_heads: int
    head_size: int
    head_size_v: int
    window: int


@dataclass(frozen=True, slots=True)
class ChunkedLayer:
    """Attention within aligned chunks of `chunk` tokens (Llama 4)."""

    num_kv_heads: int
    head_size: int
    head_size_v: int
    chunk: int


@dataclass(frozen=True, slots=True)
class CrossLayer:
    """A decoder's attention to the encoder's output."""

    num_kv_heads: int
    head_size: int
    head_size_v: int


@dataclass(frozen=True, slots=True)
class MlaLayer:
    """Latent attention: one vector of `head_size` (latent rank + rope) for K and V together; not sharded.

    A `sparse` one attends to a few tokens that an index chooses. Its backend packs FP8 rows with their scales.
    """

    head_size: int
    sparse: bool = False

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def head_size_v(self) -> int:
        """Nothing is stored for V."""
        return 0


@dataclass(frozen=True, slots=True)
class IndexLayer:
    """The keys by which a sparse layer chooses: `token_bytes` for each token, whatever the cache dtype; not sharded."""

    token_bytes: int


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A recurrent state (Mamba, gated delta net): as many bytes for 1 token as for a million.

    `checkpoint_blocks` are what a request holds with prefix caching beyond the state it is at and the one before:
    Mamba-2 layers export one more from inside a prefill (model_executor/layers/mamba/mamba_mixer2.py:1098).
    """

    state_bytes: int
    checkpoint_blocks: int = 0


@dataclass(frozen=True, slots=True)
class CachelessLayer:
    """Has no cache: it reads another layer's, or it only encodes."""


AttentionLayer = FullLayer | SlidingLayer | ChunkedLayer | CrossLayer | MlaLayer
EngineLayer = AttentionLayer | IndexLayer | StateLayer | CachelessLayer


@dataclass(frozen=True, slots=True)
class LayerStack:
    """`kinds` in the order they first appear; `places[i]` are the places of all layers of kind i, ascending.

    A place is the model's own layer index, so one layer with two caches stands in it twice. The model has
    `num_layers`; a drafter's layers have the places from there on, and a skip list knows them by the indices from
    `first_draft_index` on.
    """

    kinds: tuple[EngineLayer, ...]
    places: tuple[tuple[int, ...], ...]
    num_layers: int
    first_draft_index: int

    @classmethod
    def of_runs(cls, runs: Iterable[tuple[int, EngineLayer]]) -> LayerStack:
        """Layers as runs of equal ones: (count, layer). Raises ValueError for more than MAX_LAYERS."""
        places: dict[EngineLayer, list[int]] = {}
        num_layers = 0
        for count, layer in runs:
            if num_layers + count > MAX_LAYERS:
                raise ValueError(f"a model of more than {MAX_LAYERS:,} layers is not priced")
            places.setdefault(layer, []).extend(range(num_layers, num_layers + count))
            num_layers += count
        return cls(tuple(places), tuple(map(tuple, places.values())), num_layers, num_layers)

    @classmethod
    def of_places(
        cls, layers: Iterable[tuple[int, EngineLayer]], num_layers: int, first_draft_index: int | None = None
    ) -> LayerStack:
        """Layers with their places, ascending. Raises ValueError for a place beyond MAX_LAYERS.

        `first_draft_index` None says that the drafter goes on counting where the model ends.
        """
        places: dict[EngineLayer, list[int]] = {}
        for place, layer in layers:
            if place >= MAX_LAYERS:
                raise ValueError(f"a model of more than {MAX_LAYERS:,} layers is not priced")
            places.setdefault(layer, []).append(place)
        first = num_layers if first_draft_index is None else first_draft_index
        return cls(tuple(places), tuple(map(tuple, places.values())), num_layers, first)

    @property
    def first_attention(self) -> tuple[int, AttentionLayer] | None:
        """Place and layer whose geometry stands for the model's where the engine asks for just one."""
        for kind, places in zip(self.kinds, self.places, strict=True):
            if not isinstance(kind, IndexLayer | StateLayer | CachelessLayer):
                return places[0], kind
        return None

    @property
    def is_latent(self) -> bool:
        found = self.first_attention
        return found is not None and isinstance(found[1], MlaLayer)

    @property
    def is_sparse(self) -> bool:
        """Whether some layer chooses by an index what it attends to."""
        return any(isinstance(kind, IndexLayer) for kind in self.kinds)

    @property
    def largest_state_bytes(self) -> int:
        """0 without recurrent layers."""
        return max([kind.state_bytes for kind in self.kinds if isinstance(kind, StateLayer)], default=0)

    def places_named(self, indices: set[int]) -> set[int]:
        """The places that a skip list names by these indices, whether or not there is a layer."""
        if self.first_draft_index == self.num_layers:
            return indices
        ahead = self.num_layers - self.first_draft_index
        return {index for index in indices if index < self.num_layers} | {
            index + ahead for index in indices if index >= self.first_draft_index
        }
