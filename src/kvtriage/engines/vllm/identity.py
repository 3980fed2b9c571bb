"""Who answers: what BF16's server says of itself, and how much all servers show, as the records keep it."""

from __future__ import annotations

import os
from collections.abc import Iterable

from kvtriage.engines.info import EngineInfo, Readback
from kvtriage.engines.vllm.fleet import Fleet, Served
from kvtriage.engines.vllm.readback import backend_of_layers, numerics_of_layers, rounding_of_layers

__all__ = ["UNKNOWN", "describe_engine", "least_readback", "native_dtype_of_served"]

UNKNOWN = "unknown"


def native_dtype_of_served(served: Served) -> str:
    """What BF16's server stores an unquantised layer in, as far as it shows it."""
    if served.ranks is not None and served.ranks[0]:
        return served.ranks[0][0].cache_dtype
    return UNKNOWN if served.config is None else served.config.cache_dtype


def least_readback(servers: Iterable[Served]) -> Readback:
    """The least that any of them shows."""
    levels = [_readback(served) for served in servers]
    return next(level for level in reversed(Readback) if level in levels)


def describe_engine(served: Served, fleet: Fleet, readback: Readback, *, mixed_backends: bool) -> EngineInfo:
    """`served` is BF16's server."""
    ranks = served.ranks or ()
    device = served.facts.get("gpus") or served.facts.get("device") or UNKNOWN
    numerics = numerics_of_layers(ranks)
    return EngineInfo(
        name="vllm",
        version=served.version,
        device=str(device),
        backend=backend_of_layers(ranks) or served.log_backend or UNKNOWN,
        numerics=numerics,
        compute_dtype=str(served.facts.get("dtype", UNKNOWN)),
        native_dtype=native_dtype_of_served(served),
        threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        per_head_scales=all(layer.per_head_scales is not False for rank in ranks for layer in rank),
        kl_top_k=served.dialect.top_k,
        readback=readback,
        scoring=served.dialect.scoring,
        server=fleet.server_args,
        arms=fleet.arms,
        repeat="chunks" if fleet.sets_steps else "batches",
        rounding=rounding_of_layers(ranks),
        probe_numerics=None if numerics == "storage" else "storage",
        mixed_backends=mixed_backends,
        # A token is decoded behind every text, and thrown away.
        longest_text=served.longest - 1 if served.longest else None,
    )


def _readback(served: Served) -> Readback:
    if served.ranks is not None:
        return Readback.LIVE
    return Readback.NONE if served.config is None else Readback.CONFIG
