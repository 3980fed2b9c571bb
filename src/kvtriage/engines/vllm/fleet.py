"""Which server answers for which arm: servers of our own, one at a time, or the user's (see `attach`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvtriage.engines.base import Arm
from kvtriage.engines.vllm.client import Client
from kvtriage.engines.vllm.dialect import VLLM, Dialect
from kvtriage.engines.vllm.failures import Missing, Refused, ServerGone
from kvtriage.engines.vllm.log import backend_of, scale_warnings
from kvtriage.engines.vllm.metrics import CacheConfig, read_cache_config
from kvtriage.engines.vllm.observer import LiveLayer, Observer, Probe
from kvtriage.engines.vllm.recipe import ServerOptions, count_devices, make_recipe, served_policy
from kvtriage.engines.vllm.server import Launch, Recipe, Server, launch, show_command
from kvtriage.engines.vllm.variables import show_variables
from kvtriage.fp8.scales import ScaleSet
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["Fleet", "LaunchedFleet", "OpenServer", "Served", "interrogate"]

OpenServer = Callable[[Recipe, str, Launch], AbstractContextManager[Server]]


@dataclass(eq=False)
class Served:
    """A server that answers, and what it says of itself."""

    client: Client
    model: str
    root: str
    """What it loaded, as it names it: a folder or a hub id."""
    longest: int
    """Tokens of its longest context."""
    version: str
    config: CacheConfig | None
    ranks: tuple[tuple[LiveLayer, ...], ...] | None
    """None where it has no extension to ask."""
    unseen: str | None
    """Why there are no ranks to see."""
    observer: Observer | None
    facts: dict[str, Any]
    """vLLM's own configuration, where it shows it; else empty."""
    dialect: Dialect = VLLM
    log_backend: str | None = None
    warnings: tuple[str, ...] = ()
    checked: set[str] = field(default_factory=set)
    """Arms that were read back on it."""
    probing: Probe | None = None
    """What its extension rounds; None where that is not known: somebody may have left it rounding."""

    @property
    def block_size(self) -> int:
        return self.config.pool.block_size if self.config is not None and self.config.pool is not None else 16


class Fleet(Protocol):
    """See the module."""

    @property
    def one_arm_at_a_time(self) -> bool: ...

    @property
    def arms(self) -> frozenset[str] | None:
        """The arms there are servers for; None for any."""
        ...

    @property
    def server_args(self) -> tuple[str, ...]:
        """What all servers are started with: variables as NAME=VALUE, then arguments."""
        ...

    @property
    def sets_steps(self) -> bool:
        """Whether a server is given the length of its prefill steps, where an arm asks for one."""
        ...

    def show(self, arm: Arm) -> str:
        """The arm's server in one line: the command that starts it, or where it is."""
        ...

    @property
    def devices(self) -> int:
        """That one server takes, as far as its arguments say."""
        ...

    def serve(self, arm: Arm) -> Served:
        """The arm's server, started where it has to be. Raises EngineError."""
        ...

    def has_ended(self, arm: Arm) -> bool:
        """Whether the arm's server is known to have ended; it is not asked."""
        ...

    def restart(self, arm: Arm) -> None:
        """After its death. Raises the reason where it cannot be started again."""
        ...


def interrogate(client: Client, *, needs_extension: bool) -> Served:
    """Ask a server who it is. What it does not have is left out; a question that failed is not taken for that.

    Raises EngineError: Missing where it has no extension and needs one, Unanswered and ServerGone.
    """
    match client.get_json("/v1/models"):
        case {"data": [{"id": str(model), **rest}, *_]}:
            root, longest = rest.get("root"), rest.get("max_model_len")
        case _:
            raise Refused(f"{client.url} lists no model", hint="is it an OpenAI-compatible server?")
    extension = Observer(client)
    ranks, unseen = None, None
    try:
        ranks = extension.layers()
    except Missing as missing:
        if needs_extension:
            raise
        unseen = missing.message
    return Served(
        client=client,
        model=model,
        root=str(root or model),
        longest=longest if isinstance(longest, int) else 0,
        version=_optional(client, "/version", "version") or "unknown",
        config=_cache_config(client),
        ranks=ranks,
        unseen=unseen,
        observer=None if ranks is None else extension,
        facts={} if ranks is None else _facts(client),
    )


def _optional(client: Client, path: str, key: str) -> str | None:
    try:
        match client.get_json(path):
            case {**found} if isinstance(found.get(key), str):
                return str(found[key])
    except Refused:
        return None
    return None


def _cache_config(client: Client) -> CacheConfig | None:
    try:
        return read_cache_config(client.get_text("/metrics"))
    except Refused:
        return None


def _facts(client: Client) -> dict[str, Any]:
    """Of all that /server_info shows, what is asked for below: the rest may hold secrets and is dropped here."""
    try:
        found = client.get_json("/server_info?config_format=json")
    except Refused:
        return {}
    match found:
        case {"vllm_config": {"model_config": {"dtype": str(dtype)}, "device_config": {"device": device}}, **rest}:
            system = rest.get("system_env")
            gpus = system.get("nvidia_gpu_models") if isinstance(system, dict) else None
            return {"dtype": dtype.removeprefix("torch."), "device": str(device), "gpus": gpus}
        case _:
            return {}


class LaunchedFleet:
    """Servers of our own: at most one runs, and it serves every arm of the same recipe."""

    def __init__(
        self,
        spec: CacheSpec,
        model: Path,
        options: ServerOptions,
        how: Launch,
        checkpoint: Callable[[ScaleSet], Path],
        open_server: OpenServer = launch,
    ) -> None:
        self._spec = spec
        self._model = model
        self._options = options
        self._how = how
        self._checkpoint = checkpoint
        self._open_server = open_server
        self._recipe: Recipe | None = None
        self._server: Server | None = None
        self._served: Served | None = None
        """What the server said of itself, once it has said all of it."""
        self._stack = ExitStack()

    def __enter__(self) -> LaunchedFleet:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()

    @property
    def one_arm_at_a_time(self) -> bool:
        return True

    @property
    def arms(self) -> frozenset[str] | None:
        return None

    @property
    def server_args(self) -> tuple[str, ...]:
        return (*show_variables(self._options.variables), *self._options.engine_args)

    @property
    def sets_steps(self) -> bool:
        return True

    @property
    def devices(self) -> int:
        return count_devices(self._options.engine_args)

    def show(self, arm: Arm) -> str:
        return show_command(self.recipe(arm))

    def recipe(self, arm: Arm) -> Recipe:
        scales = None if served_policy(arm.policy).is_native else arm.scales
        model = self._model if scales is None else self._checkpoint(scales)
        return make_recipe(arm, self._spec, str(model), self._options)

    def serve(self, arm: Arm) -> Served:
        recipe = self.recipe(arm)
        if self._server is None or recipe != self._recipe:
            self._stop()
            self._server = self._stack.enter_context(self._open_server(recipe, _file_name(arm.name), self._how))
            self._recipe = recipe
        if self._served is None:
            served = interrogate(self._server.client, needs_extension=True)
            served.log_backend = backend_of(self._server.log)
            served.warnings = scale_warnings(self._server.log)
            self._served = served
        return self._served

    def has_ended(self, arm: Arm) -> bool:
        return self._server is not None and self._server.explain() is not None

    def restart(self, arm: Arm) -> None:
        reason = None if self._server is None else self._server.explain()
        if reason is not None and not isinstance(reason, ServerGone):
            raise reason
        self._stop()
        self._how.say(f"server {arm.name}: starting it again")

    def _stop(self) -> None:
        self._server = self._served = self._recipe = None
        self._stack.close()
        self._stack = ExitStack()


def _file_name(arm: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "-_" else "-" for sign in arm).strip("-")[:80] or "arm"
