"""A whole vLLM without a model, in a thread: small, deterministic, and able to fail in every way that servers fail.

`Faults` says what goes wrong. Scales come from `fake_scales.json` in the model folder.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

from tests.unit.engines.vllm.misbehaving.handler import Handler
from tests.unit.engines.vllm.misbehaving.player import Player

__all__ = ["bind", "playing"]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def bind(player: Player, port: int) -> _Server:
    return _Server(("127.0.0.1", port), type("Handler", (Handler,), {"player": player}))


@contextlib.contextmanager
def playing(player: Player) -> Iterator[str]:
    """The base URL of a server in a thread."""
    server = bind(player, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
