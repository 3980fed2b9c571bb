"""What a KV cache costs: the worksheet, derived here and computed below.

**Positions.** A cache does not hold tokens, it holds *retained positions*: one entry of K and V
for one token in one layer. After T tokens a full layer has retained T of them, and a sliding
layer with window W has retained min(T, W): what has left the window can never be read again and
is dropped. Summed over all layers, and over all sequences of a batch,

    A = Σ retained positions of every layer
    S = Σ retained positions of the layers that stay in BF16 (the skipped ones; S ≤ A)

Window and context decide how the two compare. In gpt-oss-20b half of the 24 layers slide over
128 tokens, yet at T = 32,768 they retain 12·128 = 1,536 of A = 394,752 positions: 0.4 %.
(A layer that compresses its past retains one position more for every r tokens: min(T, W) + ⌊T/r⌋.)

**Bytes.** One position has num_kv_heads × (head_dim + head_dim_v) elements, K and V together. Let
C be that many bytes: one position at one byte per element. E4M3 takes one byte and BF16 two, so

    all BF16     2·C·A
    all FP8        C·A
    mixed          C·(A − S) + 2·C·S  =  C·(A + S)

Every skipped position is paid for twice, and that is the whole price of a skip. Layers of
different geometry have different C; the sums below run over C·positions, layer by layer.

**Ratio.** BF16 over the policy, 2·C·A / C·(A + S), that is

    ratio = 2A / (A + S)

It is 2 with nothing skipped and 1 with everything skipped. Skip half of the layers, all retaining
the same, and S = A/2 gives 4/3. Skip gpt-oss's sliding half, and S = 1,536 gives 1.99225: the
skip costs C·S = 1,024·1,536 bytes, 1.5 MiB.

**What no policy reaches.** A recurrent state, the keys of a sparse layer's index, what waits to be
compressed: bytes that a layer holds beside K and V, and that stay as they are. They are in all three sums
alike, so a model with many of them gains less than 2, and a state the less the shorter the context.

**Scales.** Static scales are float32, four bytes each. A layer with H query heads and Hkv KV heads
holds one for every head of Q, K and V, or three scalars when they are per tensor. Scale 1
saves nothing here: the engine holds its three scalars too, they are merely all 1.

    per head                 4·(H + 2·Hkv)
    per tensor, and scale 1  12
    difference               4·(H + 2·Hkv − 3)

With 64 and 8 heads that is 320 bytes against 12 a layer. A skipped layer's scales are counted with the
others: skipping is a server flag, and the checkpoint holds the scales of every layer all the same.
These bytes do not grow with context, batch or blocks. (Scales that are computed while serving, one per
token and head, are another scheme: they do grow, and this formula is not theirs.)

**What this is not.** The worksheet is what sequences *hold* in steady decode. A server rounds it up
to blocks, holds a little more than the window while it prefills, and reserves by its own rules at
admission; the number of tokens that it logs at start-up follows from those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.kvcache.policy import CachePolicy, Format, Fp8, Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerSpec

__all__ = [
    "SCALARS_PER_LAYER",
    "SCALE_BYTES",
    "LayerPrice",
    "Worksheet",
    "capacity_tokens",
    "per_head_scale_bytes",
    "price_layers",
    "price_policy",
]

BF16_BYTES = 2
SCALE_BYTES = 4
SCALARS_PER_LAYER = 3


@dataclass(frozen=True)
class LayerPrice:
    """One layer under one policy, all sequences of the batch together. Bytes are exact.

    `side_bytes`, which no policy changes, are in each of the three sums.
    """

    layer_idx: int
    retained_positions: int
    skipped_positions: int
    bf16_bytes: int
    fp8_bytes: int
    policy_bytes: int
    side_bytes: int


@dataclass(frozen=True)
class Worksheet:
    """The whole cache under one policy. Integers are exact; the ratio is BF16 over the policy.

    `fp8_bytes` is every layer in FP8, whatever the policy. `side_bytes`, which no policy changes, are in
    all three. `scale_bytes` are those of every layer with K and V under the policy's scaling, 0 when
    nothing is in FP8.
    """

    retained_positions: int
    skipped_positions: int
    bf16_bytes: int
    fp8_bytes: int
    policy_bytes: int
    side_bytes: int
    ratio_vs_bf16: float
    scale_bytes: int
    scale_bytes_over_per_tensor: int


def price_policy(spec: CacheSpec, policy: CachePolicy, contexts: Sequence[int]) -> Worksheet:
    """The worksheet of a batch: `contexts` holds the length of each sequence, in tokens.

    Raises ValueError for a policy of another model, and for contexts that are empty or below 1.
    """
    layers = price_layers(spec, policy, contexts)
    bf16_bytes = sum(layer.bf16_bytes for layer in layers)
    policy_bytes = sum(layer.policy_bytes for layer in layers)
    scale_bytes = _scale_bytes(spec, policy)
    scalar_bytes = SCALE_BYTES * SCALARS_PER_LAYER * len(_scaled_layers(spec))
    return Worksheet(
        retained_positions=sum(layer.retained_positions for layer in layers),
        skipped_positions=sum(layer.skipped_positions for layer in layers),
        bf16_bytes=bf16_bytes,
        fp8_bytes=sum(layer.fp8_bytes for layer in layers),
        policy_bytes=policy_bytes,
        side_bytes=sum(layer.side_bytes for layer in layers),
        ratio_vs_bf16=bf16_bytes / policy_bytes if policy_bytes else 1.0,
        scale_bytes=scale_bytes,
        scale_bytes_over_per_tensor=scale_bytes - scalar_bytes if scale_bytes else 0,
    )


def price_layers(spec: CacheSpec, policy: CachePolicy, contexts: Sequence[int]) -> tuple[LayerPrice, ...]:
    """The rows that `price_policy` sums, one per layer, L in all. Raises ValueError as it does."""
    if policy.num_layers != spec.num_layers:
        raise ValueError(f"the policy has {policy.num_layers} layers and the model {spec.num_layers}")
    if not contexts or min(contexts) < 1:
        raise ValueError("a price needs at least one sequence, and at least one token in each")
    return tuple(_price_layer(layer, fmt, contexts) for layer, fmt in zip(spec.layers, policy.formats, strict=True))


def capacity_tokens(spec: CacheSpec, policy: CachePolicy, context_len: int, memory_bytes: int) -> int:
    """Tokens of whole sequences of `context_len` that `memory_bytes` of cache can hold.

    0 when not even one sequence fits. Raises ValueError as `price_policy` does, and for a model that holds nothing.
    """
    sequence_bytes = price_policy(spec, policy, (context_len,)).policy_bytes
    if sequence_bytes == 0:
        raise ValueError("the model holds no cache, so that no memory limits it")
    return memory_bytes // sequence_bytes * context_len


def _price_layer(layer: LayerSpec, fmt: Format, contexts: Sequence[int]) -> LayerPrice:
    position_bytes = layer.elements_per_position
    positions = sum(layer.retained_positions(context_len) for context_len in contexts)
    side_bytes = sum(layer.side_bytes(context_len) for context_len in contexts)
    skipped = 0 if _is_held_in_fp8(fmt) else positions
    return LayerPrice(
        layer_idx=layer.layer_idx,
        retained_positions=positions,
        skipped_positions=skipped,
        bf16_bytes=BF16_BYTES * position_bytes * positions + side_bytes,
        fp8_bytes=position_bytes * positions + side_bytes,
        policy_bytes=position_bytes * (positions + skipped) + side_bytes,
        side_bytes=side_bytes,
    )


def _is_held_in_fp8(fmt: Format) -> bool:
    """Probes (the mantissa bound, FP8 in some heads only) are held in BF16 and save nothing."""
    return isinstance(fmt, Fp8) and fmt.heads is None


def _scale_bytes(spec: CacheSpec, policy: CachePolicy) -> int:
    scalings = {fmt.scaling for fmt in policy.formats if isinstance(fmt, Fp8) and _is_held_in_fp8(fmt)}
    if not scalings:
        return 0
    layers = _scaled_layers(spec)
    if Scaling.PER_HEAD not in scalings:
        return SCALE_BYTES * SCALARS_PER_LAYER * len(layers)
    return sum(per_head_scale_bytes(layer.num_attention_heads, layer.num_kv_heads) for layer in layers)


def per_head_scale_bytes(num_attention_heads: int, num_kv_heads: int) -> int:
    """Bytes of the static scales of one layer, one for every head of Q, K and V."""
    return SCALE_BYTES * (num_attention_heads + 2 * num_kv_heads)


def _scaled_layers(spec: CacheSpec) -> list[LayerSpec]:
    """The layers with K and V, another layer's cache or their own."""
    return [layer for layer in spec.layers if layer.elements_per_position]
