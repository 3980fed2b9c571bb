"""What a server says of its cache: the layers, the probes and the ranges of its workers, and its metrics."""

from __future__ import annotations

from typing import Any

from tests.unit.engines.vllm.misbehaving.player import Player

__all__ = ["answer_call", "metrics_text"]


def answer_call(player: Player, method: str, args: list[Any]) -> Any:
    """The result of one method of the worker extension."""
    match method:
        case "kvtriage_layers":
            return [_layer(player, layer_idx) for layer_idx in range(player.geometry.layers)]
        case "kvtriage_watch":
            (player.watches,) = args
        case "kvtriage_nonfinite":
            return {str(i): player.faults.nonfinite for i in range(player.geometry.layers)}
        case "kvtriage_probe":
            player.probes = args[0]
        case "kvtriage_observe":
            _observe(player, args[0], *(args[1:] or ([0], [])))
        case "kvtriage_ranges":
            return _ranges(player)
    return None


def metrics_text(player: Player) -> str:
    skip = "[" + ", ".join(f"'{word}'" for word in player.skip) + "]"
    labels = (
        f'block_size="16",cache_dtype="{player.cache_dtype}",enable_prefix_caching="True",engine="0",'
        f'kv_cache_dtype_skip_layers="{skip}",kv_cache_max_concurrency="4.5",kv_cache_memory_bytes="1073741824",'
        'kv_cache_size_tokens="9216",num_cpu_blocks="None",num_gpu_blocks="576"'
    )
    return f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{labels}}} 1.0\n"


def _layer(player: Player, layer_idx: int) -> dict[str, Any]:
    fp8 = player.stores_fp8(layer_idx)
    own = player.scales.get(str(layer_idx), {"k": [1.0], "v": [1.0], "q": [1.0]}) if fp8 else {}
    return {
        "name": f"model.layers.{layer_idx}.self_attn.attn",
        "layer_idx": layer_idx,
        "kv_cache_dtype": "fp8" if fp8 else "auto",
        "cache_dtype": "uint8" if fp8 else "bfloat16",
        "num_kv_heads": player.geometry.kv_heads,
        "heads": list(range(player.geometry.kv_heads)),
        "query_heads": list(range(player.geometry.heads)),
        "k_scale": own.get("k", [1.0]),
        "v_scale": own.get("v", [1.0]),
        "q_scale": own.get("q", [1.0]),
        "backend": "fake.Backend",
        "backend_name": player.backend,
        "per_head_scales": True,
        "quantizes_q": fp8 and player.quantizes_q,
        "takes_quantized_q": player.quantizes_q,
        "shares_with": None,
        "unsupported": None,
    }


def _observe(player: Player, on: bool, edges: list[int], candidates: list[dict[str, Any]]) -> None:
    player.seen = {"edges": edges, "candidates": len(candidates), "tokens": 0} if on else {**player.seen, "off": True}


def _ranges(player: Player) -> dict[str, Any]:
    heads = player.geometry.kv_heads
    counts = {"elements": [800] * heads, "saturated": [0] * heads, "below_normal": [8] * heads}
    layer = {
        "heads": list(range(heads)),
        "query_heads": list(range(player.geometry.heads)),
        "tokens": player.seen["tokens"],
        "q": _tensor(player, player.geometry.heads, mantissa=False),
        "k": _tensor(player, heads, mantissa=True),
        "v": _tensor(player, heads, mantissa=True),
        "held_out": {"k": [counts] * player.seen["candidates"], "v": [counts] * player.seen["candidates"]},
    }
    return {str(layer_idx): layer for layer_idx in range(player.geometry.layers)}


def _tensor(player: Player, heads: int, *, mantissa: bool) -> dict[str, Any]:
    return {
        "amax": [[8.0 + head] * len(player.seen["edges"]) for head in range(heads)],
        "mantissa_sse": [[1.0 + i for i in range(8)]] * heads if mantissa else [],
        "nonfinite": [player.faults.nonfinite] * heads,
    }
