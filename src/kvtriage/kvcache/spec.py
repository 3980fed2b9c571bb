"""What a model must remember: the geometry of its KV cache, layer by layer.

Axes used throughout: L layers, H query heads, Hkv KV heads, T tokens, D head_dim.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

__all__ = ["CacheSpec", "Compressor", "IndexKeys", "LayerKind", "LayerSpec", "SideCache", "StateTensor"]


class LayerKind(enum.StrEnum):
    """How far back a layer looks, which is what decides how much it retains.

    FULL      every position before it
    SLIDING   the last W positions, its own included
    CHUNKED   its own aligned chunk of C positions (Llama 4)
    LATENT    every position, one latent vector for K and V of all heads together (MLA); or the last
              W positions, and of the rest a compressed memory (DeepSeek V4)
    CROSS     the encoder's output, however long the text
    STATE     no position: a recurrent state of fixed size stands for all of them
    NONE      nothing: the layer has no attention
    """

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    LATENT = "latent"
    CROSS = "cross"
    STATE = "state"
    NONE = "none"


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a recurrent state, kept once for a whole sequence; no cache dtype changes it.

    `shape` is that of the whole model. Tensor parallelism divides `sharded_axis`, or copies it to every
    rank where it has one entry only, as it does KV heads; each speculative token lengthens `grown_axis` by
    one (the tail of inputs that a convolution remembers).
    """

    name: str
    shape: tuple[int, ...]
    element_bytes: int
    sharded_axis: int | None = None
    grown_axis: int | None = None

    @property
    def sequence_bytes(self) -> int:
        """Bytes of one sequence, all ranks together, without speculative tokens."""
        return self.element_bytes * math.prod(self.shape)

    def rank_bytes(self, tensor_parallel: int, speculative_tokens: int = 0) -> int:
        """Bytes that one rank holds of one sequence. Raises ValueError where the ranks cannot share it evenly."""
        sizes = list(self.shape)
        if self.grown_axis is not None:
            sizes[self.grown_axis] += speculative_tokens
        if self.sharded_axis is not None and sizes[self.sharded_axis] > 1:
            sizes[self.sharded_axis], rest = divmod(sizes[self.sharded_axis], tensor_parallel)
            if rest:
                raise ValueError(f"{tensor_parallel} ranks cannot share {self.name} of shape {self.shape} evenly")
        return self.element_bytes * math.prod(sizes)


@dataclass(frozen=True)
class IndexKeys:
    """What a sparse layer keeps to choose positions by: bytes of each, whatever the cache dtype.

    Where it chooses among compressed positions there is one key for every `ratio` tokens. The engine
    copies the keys to every rank.
    """

    position_bytes: int
    ratio: int = 1


@dataclass(frozen=True)
class Compressor:
    """What waits to be compressed: bytes of each of the last `window_tokens` positions, whatever the cache dtype.

    The engine copies them to every rank.
    """

    window_tokens: int
    position_bytes: int


SideCache = StateTensor | IndexKeys | Compressor
"""What a layer holds beside its K and V. A cache policy does not reach it."""


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the model.

    `window_tokens` counts the positions that a sliding layer can see, its own included, and so the
    positions it must retain; in a chunked layer it is the chunk. `encoder_tokens` are the positions of
    a cross-attention layer. Both are None elsewhere.

    A latent layer has one KV head: `head_dim` is the latent rank and the rotary part together, and
    `head_dim_v` is 0, for V is read from the same vector. A layer without K and V has 0 heads.

    With a `compress_ratio` a layer retains, beside its window, one more position for every so many tokens
    of the whole text: compressed from them, as wide as the others and stored as they are.

    A layer that `shares_with` an earlier one reads its cache and retains nothing of its own.
    """

    layer_idx: int
    kind: LayerKind
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    window_tokens: int | None = None
    encoder_tokens: int | None = None
    compress_ratio: int | None = None
    shares_with: int | None = None
    beside: tuple[SideCache, ...] = ()

    @property
    def elements_per_position(self) -> int:
        """K and V elements of one retained position: Hkv × (D + Dv)."""
        return self.num_kv_heads * (self.head_dim + self.head_dim_v)

    @property
    def queries_per_kv_head(self) -> int:
        return self.num_attention_heads // self.num_kv_heads

    @property
    def holds_kv(self) -> bool:
        """True when the layer retains K and V of its own, which are what a cache policy can store otherwise."""
        return self.elements_per_position > 0 and self.shares_with is None

    def retained_positions(self, context_len: int) -> int:
        """Positions whose K and V are held after `context_len` tokens, at the most.

        T, or min(T, W) with a window or a chunk; the encoder's in a cross-attention layer. A `compress_ratio`
        adds its compressed positions, those of whole groups of tokens.
        """
        if not self.holds_kv:
            return 0
        if self.encoder_tokens is not None:
            return self.encoder_tokens
        seen = context_len if self.window_tokens is None else min(context_len, self.window_tokens)
        return seen if self.compress_ratio is None else seen + context_len // self.compress_ratio

    def side_bytes(self, context_len: int) -> int:
        """Bytes held beside K and V after `context_len` tokens of one sequence."""
        held = 0
        for cache in self.beside:
            match cache:
                case StateTensor():
                    held += cache.sequence_bytes
                case IndexKeys(position_bytes, ratio):
                    held += position_bytes * (context_len // ratio)
                case Compressor(window_tokens, position_bytes):
                    held += position_bytes * min(context_len, window_tokens)
        return held


@dataclass(frozen=True)
class CacheSpec:
    """The whole model. `assumed` lists every default that config.json did not state.

    `draft_layers` are those of the checkpoint's own drafter (MTP): they hold a cache only where the
    engine speculates. Their `layer_idx` goes on from L.

    `default_model_len` is the length that vLLM serves unless told otherwise, in tokens, where that is not
    `max_model_len`.
    """

    model_type: str
    layers: tuple[LayerSpec, ...]
    max_model_len: int
    assumed: tuple[str, ...] = ()
    draft_layers: tuple[LayerSpec, ...] = ()
    default_model_len: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds that are present, in the order of LayerKind."""
        present = {layer.kind for layer in self.layers}
        return tuple(kind for kind in LayerKind if kind in present)

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """Indices of the layers of one kind, ascending."""
        return tuple(layer.layer_idx for layer in self.layers if layer.kind is kind)

    @property
    def windows(self) -> tuple[int, ...]:
        """The sliding windows, in tokens, each once and ascending."""
        sliding = (layer.window_tokens for layer in self.layers if layer.kind is LayerKind.SLIDING)
        return tuple(sorted({window for window in sliding if window is not None}))

    @property
    def has_one_kv_head(self) -> bool:
        """Whether no layer has more than one KV head: a scale per head is then a scale per tensor."""
        return all(layer.num_kv_heads <= 1 for layer in self.layers)

    @property
    def is_hybrid(self) -> bool:
        """True when more than one kind of layer is present."""
        return len(self.kinds) > 1
