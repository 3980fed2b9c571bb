"""Engines over fake servers: launched in threads by recipe, or attached to."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from kvtriage.engines.fake import FakeTokenizer
from kvtriage.engines.vllm.attach import AttachedFleet
from kvtriage.engines.vllm.client import Client
from kvtriage.engines.vllm.engine import VllmEngine
from kvtriage.engines.vllm.failures import ServerGone
from kvtriage.engines.vllm.fleet import LaunchedFleet
from kvtriage.engines.vllm.recipe import ServerOptions
from kvtriage.engines.vllm.server import Launch, Recipe, Server
from kvtriage.errors import EngineError
from kvtriage.fp8.scales import ScaleSet
from kvtriage.kvcache.spec import CacheSpec
from tests.unit.engines.vllm.misbehaving.faults import Faults
from tests.unit.engines.vllm.misbehaving.player import SCALES, Geometry, Player
from tests.unit.engines.vllm.misbehaving.program import read_flags
from tests.unit.engines.vllm.misbehaving.serving import playing

__all__ = ["Stable", "attached", "geometry_of", "player"]


def geometry_of(spec: CacheSpec) -> Geometry:
    first = spec.layers[0]
    windows = tuple(layer.window_tokens for layer in spec.layers)
    return Geometry(spec.num_layers, first.num_attention_heads, first.num_kv_heads, windows)


@dataclass
class _Thread:
    """What LaunchedFleet needs of a Server, around a thread."""

    client: Client
    player: Player
    log: str = "Using FAKE_ATTN backend"

    def explain(self) -> EngineError | None:
        return ServerGone("the server is gone", hint="a planted fault") if self.player.dead else None


@dataclass
class Stable:
    """Starts fake servers, remembers them, and hands out the faults to the first of them."""

    spec: CacheSpec
    folder: Path
    faults: Faults = field(default_factory=Faults)
    stall_s: float = 60.0
    started: list[Player] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def open_server(self, recipe: Recipe, name: str, how: Launch) -> Iterator[Server]:
        player, _ = read_flags(list(recipe.command))
        player.geometry, player.faults = geometry_of(self.spec), self.faults
        self.started.append(player)
        with playing(player) as url, Client(url, stall_s=self.stall_s) as client:
            yield cast(Server, _Thread(client, player))

    def checkpoint(self, scales: ScaleSet) -> Path:
        """An overlay as far as a fake server reads it."""
        folder = self.folder / f"checkpoint-{scales.scaling}"
        folder.mkdir(exist_ok=True)
        rows = {str(layer.layer_idx): {"k": layer.k, "v": layer.v, "q": layer.q} for layer in scales.layers}
        (folder / SCALES).write_text(json.dumps(rows))
        return folder

    @contextlib.contextmanager
    def engine(self) -> Iterator[VllmEngine]:
        how = Launch(self.folder / "servers", self.said.append)
        model = self.folder / "model"
        model.mkdir(exist_ok=True)
        options = ServerOptions(("vllm", "serve"))
        with LaunchedFleet(self.spec, model, options, how, self.checkpoint, self.open_server) as fleet:
            yield VllmEngine(self.spec, FakeTokenizer(), fleet, self.said.append, patience_s=(0.0, 0.0, 0.0))


def player(spec: CacheSpec, folder: Path, dtype: str, **how: Any) -> Player:
    """A server of the model 'tiny' that somebody started."""
    return Player(str(folder / "tiny"), dtype, geometry=geometry_of(spec), **how)


@contextlib.contextmanager
def attached(
    spec: CacheSpec,
    *players: Player,
    names: tuple[str, ...] = ("tiny",),
    say: Callable[[str], None] = lambda line: None,
    patience_s: tuple[float, ...] = (),
    mixed_backends: bool = False,
) -> Iterator[VllmEngine]:
    """BF16's server, and that of FP8 at scale 1 where there are two."""
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(playing(one)) for one in players]
        fleet = stack.enter_context(AttachedFleet(dict(zip(("bf16", "fp8_unit"), urls, strict=False)), names, None))
        yield VllmEngine(spec, FakeTokenizer(), fleet, say, patience_s, mixed_backends=mixed_backends)
