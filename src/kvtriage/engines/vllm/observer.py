"""The worker extension, asked from outside: one reply per rank, put together into one per model.

The extension itself is `inside/`; it runs in vLLM's own process and is never imported here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvtriage.engines.vllm.client import Client
from kvtriage.engines.vllm.failures import Missing, Overdue, Refused, Unanswered
from kvtriage.errors import EngineError, NonFinite
from kvtriage.fp8.scales import ScaleSet
from kvtriage.fp8.stats import HeldOut, HeldOutShare, KVStats, RangeStats, TensorKey
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["EXTENSION", "INSIDE", "LiveLayer", "Observer", "Probe"]

EXTENSION = "kvtriage_observer.Observer"
INSIDE = Path(__file__).with_name("inside")
"""Goes on the server's PYTHONPATH."""
_RPC = "/collective_rpc"

Probe = Mapping[int, Mapping[str, Any]]
"""layer_idx → format ('fp8' or 'mantissa'), heads (None for all), and one number per KV head, or one, of k and v."""


class LiveLayer(msgspec.Struct, frozen=True, kw_only=True):
    """One attention layer on one rank, as it acts on the data right now."""

    name: str
    layer_idx: int
    kv_cache_dtype: str
    cache_dtype: str
    num_kv_heads: int
    k_scale: tuple[float, ...]
    v_scale: tuple[float, ...]
    q_scale: tuple[float, ...]
    backend: str
    shares_with: int | None = None
    heads: tuple[int, ...] | None = None
    query_heads: tuple[int, ...] | None = None
    k_scale_float: float | None = None
    """What kernels read that take one number for all heads."""
    v_scale_float: float | None = None
    quantizes_q: bool = False
    takes_quantized_q: bool = False
    per_head_scales: bool | None = None
    backend_name: str | None = None
    unsupported: str | None = None


class _Ranges(msgspec.Struct, frozen=True):
    amax: tuple[tuple[float, ...], ...]
    mantissa_sse: tuple[tuple[float, ...], ...] = ()
    nonfinite: tuple[int, ...] = ()


class _Counts(msgspec.Struct, frozen=True):
    elements: tuple[int, ...]
    saturated: tuple[int, ...]
    below_normal: tuple[int, ...]


class _LayerReply(msgspec.Struct, frozen=True):
    heads: tuple[int, ...]
    query_heads: tuple[int, ...]
    tokens: int
    q: _Ranges
    k: _Ranges
    v: _Ranges
    held_out: dict[str, tuple[_Counts, ...]] = {}


class Observer:
    """The extension of one server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def layers(self) -> tuple[tuple[LiveLayer, ...], ...]:
        """[ranks][layers of that rank]. Raises Missing where there is no extension to ask."""
        return tuple(self._ask("kvtriage_layers", tuple[LiveLayer, ...]))

    def watch(self, on: bool) -> None:
        """Count NaN and infinity as they pass. It costs time: off while anything is timed."""
        self._call("kvtriage_watch", on)

    def nonfinite(self) -> dict[int, int]:
        """Elements of Q, K and V that were NaN or infinite while watching, by layer, all ranks together."""
        found: dict[int, int] = {}
        for counts in self._ask("kvtriage_nonfinite", dict[str, int]):
            for layer_idx, count in counts.items():
                found[int(layer_idx)] = found.get(int(layer_idx), 0) + count
        return found

    def probe(self, layers: Probe) -> None:
        """Round K and V of these layers before they are stored, and of no others."""
        self._call("kvtriage_probe", {str(layer_idx): dict(words) for layer_idx, words in layers.items()})

    def start(self, edges: Sequence[int], candidates: Sequence[ScaleSet] = ()) -> None:
        """Gather ranges from here on, anew."""
        sets = [{str(s.layer_idx): {"k": s.k, "v": s.v} for s in scales.layers} for scales in candidates]
        self._call("kvtriage_observe", True, list(edges), sets)

    def stop(self) -> None:
        self._call("kvtriage_observe", False)

    def ranges(self, spec: CacheSpec, edges: Sequence[int], tokens: int) -> KVStats:
        """What `tokens` tokens showed. Raises EngineError when others were seen, NonFinite."""
        replies = self._replies(spec, tokens)
        tensors: dict[TensorKey, RangeStats] = {}
        for layer in spec.layers:
            own = [reply[layer.layer_idx] for reply in replies if layer.layer_idx in reply]
            for tensor in ("q", "k", "v"):
                count = layer.num_attention_heads if tensor == "q" else layer.num_kv_heads
                tensors[layer.layer_idx, tensor] = _gather(layer.layer_idx, tensor, own, count)
        return KVStats(tuple(edges), tokens, tensors)

    def held_out(self, spec: CacheSpec, candidates: int, tokens: int) -> list[HeldOut]:
        """The shares under each of `candidates` scale sets given to `start`."""
        replies = self._replies(spec, tokens)
        found: list[list[HeldOutShare]] = [[] for _ in range(candidates)]
        for layer in spec.layers:
            own = [reply[layer.layer_idx] for reply in replies if layer.layer_idx in reply]
            for tensor in ("k", "v"):
                stats = _gather(layer.layer_idx, tensor, own, layer.num_kv_heads)
                for number in range(candidates):
                    found[number] += _shares(layer.layer_idx, tensor, own, number, stats)
        return [HeldOut(tuple(shares), tokens) for shares in found]

    def _replies(self, spec: CacheSpec, tokens: int) -> list[dict[int, _LayerReply]]:
        replies = []
        for reply in self._ask("kvtriage_ranges", dict[str, _LayerReply]):
            layers = {int(layer_idx): found for layer_idx, found in reply.items()}
            for layer_idx, found in layers.items():
                if found.tokens != tokens:
                    raise EngineError(
                        f"layer {layer_idx} showed {found.tokens} of the {tokens} tokens that were sent",
                        hint="a replayed CUDA graph hides them: add --engine-arg --enforce-eager; nobody else may use "
                        "the server meanwhile",
                    )
            replies.append(layers)
        if {i for layers in replies for i in layers} != {layer.layer_idx for layer in spec.layers}:
            raise EngineError(
                "the server does not show the layers that config.json describes", hint="is it the same model?"
            )
        return replies

    def _call(self, method: str, *args: object) -> Any:
        """Raises Missing, saying what the server lacks; Unanswered where it has the method, and the call failed.

        Overdue stays what it is: the call would take as long once more.
        """
        try:
            return self._client.post_json(_RPC, {"method": method, "args": list(args)})
        except Refused as error:
            # A gateway in front of somebody's server may let /v1 through and nothing else.
            why = "are off" if isinstance(error, Missing) else "are not open to kvtriage"
            raise Missing(
                f"the server's development endpoints {why}",
                hint="start it with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls, as --dry-run prints it",
            ) from error
        except Overdue:
            raise
        except Unanswered as error:
            if f"Method {method!r} is not implemented" in error.message:
                raise Missing(
                    "the server runs without kvtriage's extension",
                    hint="start it with --worker-extension-cls and PYTHONPATH, as --dry-run prints it",
                ) from error
            raise Unanswered(
                f"the server's extension failed at {method}: {error.message}", hint="the server's log says more"
            ) from error

    def _ask(self, method: str, kind: Any) -> list[Any]:
        """One reply per rank. Raises Refused for another form."""
        match self._call(method):
            case {"results": list(results)} if results:
                try:
                    # Not strict, for NaN and infinity come as words: JSON has no numbers for them.
                    return [msgspec.convert(result, kind, strict=False) for result in results]
                except msgspec.ValidationError as error:
                    raise Refused(
                        f"the extension's answer to {method} cannot be read: {error}",
                        hint="it belongs to another version of kvtriage",
                    ) from error
            case _:
                raise Refused(f"the server gave no answer to {method}", hint="its log says more")


def _gather(layer_idx: int, tensor: str, replies: Sequence[_LayerReply], count: int) -> RangeStats:
    """All heads of the model in their own order. Raises EngineError where one is missing, NonFinite."""
    heads: list[int] = []
    rows: list[tuple[_Ranges, int]] = []
    for reply in replies:
        ranges: _Ranges = getattr(reply, tensor)
        own = reply.query_heads if tensor == "q" else reply.heads
        heads += own
        rows += [(ranges, row) for row in range(len(own))]
    order = np.argsort(heads, kind="stable")
    if [heads[i] for i in order] != list(range(count)):
        raise EngineError(
            f"{tensor.upper()} of layer {layer_idx} shows the heads {sorted(heads)}, and the model has {count}",
            hint="the extension does not know how this model is split over the ranks; please report it",
        )
    picked = [rows[i] for i in order]
    if any(sum(ranges.nonfinite) for ranges, _ in picked):
        raise NonFinite(
            f"{tensor.upper()} of layer {layer_idx} holds NaN or infinity",
            hint="the model itself overflows here; no scale can be calibrated on it (are the weights intact?)",
        )
    by_position = np.array([ranges.amax[row] for ranges, row in picked], dtype=np.float64)
    errors = [ranges.mantissa_sse[row] if ranges.mantissa_sse else () for ranges, row in picked]
    return RangeStats(
        amax=by_position.max(axis=1),
        amax_by_position=by_position,
        mantissa_sse=np.array(errors, dtype=np.float64).reshape(count, -1),
    )


def _shares(
    layer_idx: int, tensor: str, replies: Sequence[_LayerReply], number: int, stats: RangeStats
) -> list[HeldOutShare]:
    found = []
    for reply in replies:
        counts = reply.held_out[tensor][number]
        for row, head in enumerate(reply.heads):
            total = math.nan if counts.elements[row] == 0 else counts.elements[row]
            found.append(
                HeldOutShare(
                    layer_idx=layer_idx,
                    tensor=tensor,
                    head=head,
                    saturated=counts.saturated[row] / total,
                    below_normal=counts.below_normal[row] / total,
                    amax=float(stats.amax[head]),
                )
            )
    return sorted(found, key=lambda share: share.head)
