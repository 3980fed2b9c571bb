"""The same server as a program, which takes vLLM's own flags, so that the launcher can start it.

    python -m tests.unit.engines.vllm.misbehaving.program serve MODEL --port 8000

FAKE_FAULTS in its environment holds its `Faults` as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path

from tests.unit.engines.vllm.misbehaving.faults import Faults
from tests.unit.engines.vllm.misbehaving.player import Player
from tests.unit.engines.vllm.misbehaving.serving import bind

__all__ = ["read_flags"]


def read_flags(words: list[str]) -> tuple[Player, int]:
    """A player from the flags of `vllm serve`, and its port."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--model")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--served-model-name")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--kv-cache-dtype-skip-layers", nargs="*", default=[])
    parser.add_argument("--max-num-batched-tokens", type=int)
    known, _ = parser.parse_known_args(words)
    model = known.model or known.words[-1]
    skip, chunk = tuple(known.kv_cache_dtype_skip_layers), known.max_num_batched_tokens
    return Player(model, known.kv_cache_dtype, skip, chunk, called=known.served_model_name), known.port


def _main() -> None:
    player, port = read_flags(sys.argv[1:])
    player.faults = Faults(**json.loads(os.environ.get("FAKE_FAULTS", "{}")))
    player.is_program = True
    player.gated, player.token = True, os.environ.get("KVTRIAGE_SERVER_KEY")
    print("INFO Resolved architecture: Fake\nINFO Starting to load model", file=sys.stderr, flush=True)
    match player.faults.start:
        case "oom":
            sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
        case "port":
            # Only the first start finds its port taken.
            marker = Path(os.environ["FAKE_MARKER"])
            if not marker.exists():
                marker.touch()
                sys.exit("OSError: [Errno 98] Address already in use")
        case "dies":
            sys.exit("ValueError: this model is broken")
        case "never":
            time.sleep(600)
        case "mute":
            with socket.create_server(("127.0.0.1", port)):
                time.sleep(600)
    if os.environ.get("FAKE_CHILD"):
        # A worker in a session of its own, which a signal to the process group does not reach.
        child = os.fork()
        if child == 0:
            os.setsid()
            time.sleep(600)
        Path(os.environ["FAKE_CHILD"]).write_text(f"{os.getpid()} {child}")
    print("INFO Application startup complete", file=sys.stderr, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        bind(player, port).serve_forever()


if __name__ == "__main__":
    _main()
