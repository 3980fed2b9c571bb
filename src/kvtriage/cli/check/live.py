"""A checkpoint against a server that runs it: the scales that act, to the bit, layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvtriage.checkpoints.scale_findings import attention_heads
from kvtriage.checkpoints.scale_loading import Fate, LayerLoad, predict_loading
from kvtriage.cli.check.answer import Checked, Live
from kvtriage.cli.options import Servers
from kvtriage.cli.servers import server_logs, server_options
from kvtriage.cli.terminal import say
from kvtriage.engines.base import Arm
from kvtriage.errors import EngineError, ModelError
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.spec import CacheSpec

if TYPE_CHECKING:
    from kvtriage.engines.vllm.fleet import Served
    from kvtriage.engines.vllm.live_scales import LiveScales

__all__ = ["check_live_scales"]

_LENGTH = 512
"""Tokens of the longest context of a server that is started for this alone."""
_OF_THE_FILE = (Fate.STORED, Fate.ROUNDED, Fate.SPREAD, Fate.CUT, Fate.COPIED)


def check_live_scales(checked: Checked, servers: Servers, url: str | None) -> Live:
    """Start a server on the checkpoint, or ask the one at `url`. Raises EngineError, ModelError."""
    if checked.spec is None:
        raise ModelError(
            "a server cannot be compared: config.json is of an architecture that is not read",
            hint="leave --engine out: the files alone are checked then",
        )
    try:
        from kvtriage.engines.vllm.live_scales import gather_live
    except ImportError as error:
        raise EngineError(
            f"no server can be asked: {error}", hint="pip install '.[vllm]' in kvtriage's folder"
        ) from error
    with _attached(url) if url is not None else _started(checked, checked.spec, servers) as served:
        _check_model(checked, served, url)
        heads = attention_heads(checked.held, checked.spec)
        loads = predict_loading(checked.held, heads, served.facts.get("dtype"))
        return _compare(loads, gather_live(served.ranks or ()), checked.spec.num_layers)


@contextlib.contextmanager
def _attached(url: str) -> Iterator[Served]:
    from kvtriage.engines.vllm.client import Client, check_url, token_from_environment
    from kvtriage.engines.vllm.fleet import interrogate

    with Client(check_url(url), token_from_environment()) as client:
        yield interrogate(client, needs_extension=True)


@contextlib.contextmanager
def _started(checked: Checked, spec: CacheSpec, servers: Servers) -> Iterator[Served]:
    from kvtriage.engines.vllm.fleet import interrogate
    from kvtriage.engines.vllm.recipe import make_recipe, read_command, read_engine_args
    from kvtriage.engines.vllm.server import Launch, launch
    from kvtriage.engines.vllm.variables import read_variables

    command, words = read_command(servers.command), read_engine_args(servers.engine_args)
    options = server_options(command, words, min(_LENGTH, spec.max_model_len), read_variables(servers.variables))
    scaling = checked.held.declared.scaling or Scaling.PER_TENSOR
    arm = Arm("check", CachePolicy.fp8(spec.num_layers, scaling))
    recipe = make_recipe(arm, spec, str(checked.held.folder), options)
    with (
        server_logs(None) as logs,
        launch(recipe, "check", Launch(logs, say, servers.start_timeout_s)) as server,
    ):
        yield interrogate(server.client, needs_extension=True)


def _check_model(checked: Checked, served: Served, url: str | None) -> None:
    if url is not None and Path(served.root).name != checked.held.folder.name:
        say(f"warning: the server names its model {served.root!r}, and the checkpoint is {checked.held.folder.name!r}")


def _compare(loads: tuple[LayerLoad, ...], live: Mapping[int, LiveScales], num_layers: int) -> Live:
    differing = [*_unexpected(live, num_layers)]
    equal = 0
    for load in loads:
        own = live.get(load.layer_idx)
        if own is None:
            differing.append(f"layer {load.layer_idx} is not there")
            continue
        found = [*_differences(load, own)]
        differing += found
        equal += not found and load.k.fate in _OF_THE_FILE and load.v.fate in _OF_THE_FILE
    backends = sorted({own.backend for own in live.values()})
    return Live(
        layers=len(loads),
        equal=equal,
        in_bf16=sum(not own.is_fp8 for own in live.values()),
        backend="+".join(backends) or "unknown backend",
        differing=tuple(differing),
    )


def _unexpected(live: Mapping[int, LiveScales], num_layers: int) -> Iterator[str]:
    for layer_idx in live:
        if layer_idx >= num_layers:
            yield f"the server has a layer {layer_idx}, and config.json means {num_layers}"


def _differences(load: LayerLoad, own: LiveScales) -> Iterator[str]:
    """What acts is what the file says, or what its absence means."""
    from kvtriage.engines.vllm.live_scales import same_bits

    for tensor, loaded, acts in (("k", load.k, own.k), ("v", load.v, own.v), ("q", load.q, own.q)):
        if loaded.values and not same_bits(loaded.values, acts):
            says = _few(loaded.values)
            yield f"layer {load.layer_idx} runs on a {tensor}_scale of {_few(acts)}, and the file says {says}"


def _few(values: tuple[float, ...]) -> str:
    shown = ", ".join(f"{value:.9g}" for value in values[:4])
    return f"[{shown}, ...]" if len(values) > 4 else f"[{shown}]"
