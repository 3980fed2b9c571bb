"""Small models for the tests of this room."""

from __future__ import annotations

from hypothesis import strategies as st

from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec

__all__ = ["CONTEXTS", "GPT_OSS_20B", "layer", "policies", "spec_of", "specs"]


def layer(
    layer_idx: int = 0,
    window_tokens: int | None = None,
    *,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 16,
    head_dim_v: int | None = None,
) -> LayerSpec:
    return LayerSpec(
        layer_idx=layer_idx,
        kind=LayerKind.FULL if window_tokens is None else LayerKind.SLIDING,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        window_tokens=window_tokens,
    )


def spec_of(*layers: LayerSpec, max_model_len: int = 131072) -> CacheSpec:
    return CacheSpec(model_type="test", layers=layers, max_model_len=max_model_len)


GPT_OSS_20B = spec_of(
    *(layer(idx, 128 if idx % 2 == 0 else None, heads=64, kv_heads=8, head_dim=64) for idx in range(24))
)

CONTEXTS = st.lists(st.integers(1, 200_000), min_size=1, max_size=5)


@st.composite
def specs(draw: st.DrawFn) -> CacheSpec:
    """Any per-layer geometry, K and V of different width included."""
    layers = []
    for idx in range(draw(st.integers(1, 6))):
        kv_heads = draw(st.integers(1, 8))
        layers.append(
            layer(
                idx,
                draw(st.none() | st.integers(1, 5000)),
                heads=kv_heads * draw(st.integers(1, 8)),
                kv_heads=kv_heads,
                head_dim=draw(st.integers(1, 256)),
                head_dim_v=draw(st.integers(1, 256)),
            )
        )
    return spec_of(*layers)


@st.composite
def policies(draw: st.DrawFn, num_layers: int) -> CachePolicy:
    skip = draw(st.sets(st.integers(0, num_layers - 1)))
    return CachePolicy.fp8(num_layers, draw(st.sampled_from(Scaling)), skip)
