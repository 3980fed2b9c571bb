"""From a policy to the flags of `vllm serve`: the only place that knows them.

Skipped layers are a server argument and never part of a checkpoint, and the server silently
ignores an entry that matches no layer; so they are written from the policy and nowhere by hand.

The dtype is always named. Under `auto` a checkpoint that declares a kv_cache_scheme switches its
cache to FP8 by itself, so a native policy names its own: an explicit dtype wins over the
checkpoint's. It has to be the dtype the model is served in.

On GPUs one scale per KV head is for FlashAttention 3 and later alone: every other backend for plain
FP8 refuses a checkpoint of strategy attn_head. So the backend is named, and a server that has not
got it says so at its start. (vLLM 0.32: `--attention-backend` in engine/arg_utils.py,
`supports_per_head_quant_scales` in v1/attention/backend.py and backends/flash_attn.py.)
"""

from __future__ import annotations

from kvtriage.kvcache.policy import CachePolicy, Fp8, Native, Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerKind

__all__ = ["SLIDING_WINDOW", "skip_entries", "vllm_args"]

DTYPE_FLAG = "--kv-cache-dtype"
SKIP_FLAG = "--kv-cache-dtype-skip-layers"
BACKEND_FLAG = "--attention-backend"
SLIDING_WINDOW = "sliding_window"
PER_HEAD_BACKEND = "FLASH_ATTN"


def vllm_args(
    policy: CachePolicy, spec: CacheSpec, model: str | None, native_dtype: str = "bfloat16"
) -> tuple[str, ...]:
    """What follows `vllm serve`: the model first, when there is one, then the cache flags.

    ('MODEL', '--kv-cache-dtype', 'fp8', '--kv-cache-dtype-skip-layers', 'sliding_window').
    `native_dtype` is what an unquantised cache is stored in, and named for a native policy.
    Per-head and per-tensor scales are in the checkpoint: the flags differ by `model` and, where a
    layer has more than one KV head, by the attention backend that per-head scales need. With one KV
    head everywhere the two are equal, and the checkpoint is the per-tensor one.
    Raises ValueError for a policy that no server can apply: a probe, or mixed scalings.
    """
    if policy.num_layers != spec.num_layers:
        raise ValueError(f"the policy has {policy.num_layers} layers and the model {spec.num_layers}")
    serve = () if model is None else (model,)
    if policy.is_native:
        return (*serve, DTYPE_FLAG, native_dtype)
    skip = skip_entries(policy, spec)
    per_head = policy.scaling is Scaling.PER_HEAD and not spec.has_one_kv_head
    return (
        *(*serve, DTYPE_FLAG, "fp8"),
        *((SKIP_FLAG, *skip) if skip else ()),
        *((BACKEND_FLAG, PER_HEAD_BACKEND) if per_head else ()),
    )


def _is_servable(fmt: object) -> bool:
    return isinstance(fmt, Native) or (isinstance(fmt, Fp8) and fmt.heads is None)


def skip_entries(policy: CachePolicy, spec: CacheSpec) -> tuple[str, ...]:
    """Layer indices, or the one word that stands for all sliding layers.

    A layer that reads another's cache goes as that one goes, whatever its own format: the engine decides on the dtype
    of each by itself, and would read BF16 as FP8 where only one of the two is named.
    Raises ValueError for a policy that no server can apply: a probe, or mixed scalings.
    """
    if policy.scaling is None or not all(_is_servable(fmt) for fmt in policy.formats):
        raise ValueError("a probe or a policy of mixed scalings cannot be served")
    skipped = set(policy.skip_layers)
    skip_layers = tuple(
        layer.layer_idx
        for layer in spec.layers
        if (layer.layer_idx if layer.shares_with is None else layer.shares_with) in skipped
    )
    if skip_layers and skip_layers == spec.layers_of(LayerKind.SLIDING):
        return (SLIDING_WINDOW,)
    return tuple(str(layer_idx) for layer_idx in skip_layers)
