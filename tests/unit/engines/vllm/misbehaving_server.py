"""A whole vLLM without a model: small, deterministic, and able to fail in every way that servers fail.

In a test it is a thread (`playing`); as a program it takes vLLM's own flags, so that the launcher
can start it. `Faults` says what goes wrong, and how often before it goes right again. Scales come from
`fake_scales.json` in the model folder.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import hmac
import itertools
import json
import math
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

__all__ = ["Faults", "Geometry", "Player", "playing"]

VOCABULARY = 40
STALL_S = 2.0
"""How long a stalled stream is silent before it breaks off."""
SCALES = "fake_scales.json"


@functools.cache
def _logit(before: int, token: int) -> tuple[float, float]:
    """What the fake model thinks, and in which direction damage pushes it."""
    chance = random.Random(f"{before}/{token}")
    return 3 * chance.random(), chance.gauss(0, 1)


def text_of(token: int) -> str:
    """Every third token is part of a character, as byte-level vocabularies have them."""
    return "\ufffd" if token % 3 == 0 else f" w{token}"


@dataclass
class Faults:
    """How many requests of a kind fail before the next one is answered; −1 for all of them."""

    status: dict[str, list[int]] = field(default_factory=dict)
    """Path → statuses answered in turn before the right one."""
    short_scores: int = 0
    no_logprobs: int = 0
    other_tokens: int = 0
    nan_logprobs: int = 0
    nan_answers: int = 0
    """As vLLM has it: an answer with NaN in it cannot be written."""
    cut_streams: int = 0
    stalled_streams: int = 0
    short_streams: int = 0
    error_streams: int = 0
    not_json: int = 0
    deaths: int = 0
    """Requests after which the whole server ends without an answer."""
    nonfinite: int = 0
    mixes_up_batches: bool = False
    forgets_prefixes: bool = False
    default_scales: bool = False
    ignores_skip: bool = False
    start: str = ""
    """'oom', 'port', 'dies', 'never' or 'mute': how a program fails before it is ready."""

    def strikes(self, name: str) -> bool:
        left: int = getattr(self, name)
        if left > 0:
            setattr(self, name, left - 1)
        return left != 0


@dataclass(frozen=True)
class Geometry:
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    windows: tuple[int | None, ...] = (48, 48, None, 48, 48, None)


@dataclass
class Player:
    """What the server is: its flags, its state, and what it was asked."""

    model: str
    cache_dtype: str = "bfloat16"
    skip: tuple[str, ...] = ()
    chunk: int | None = None
    geometry: Geometry = field(default_factory=Geometry)
    faults: Faults = field(default_factory=Faults)
    called: str | None = None
    """What it calls its model; as the folder."""
    version: str = "0.32.0"
    gpus: str | None = None
    quantizes_q: bool = False
    backend: str = "FAKE_ATTN"
    extension: bool = True
    methods: bool = True
    """Whether its workers have the extension's methods, where there are development endpoints at all."""
    forbidden: bool = False
    """Whether a gateway in front lets nothing but /v1 through."""
    metrics: bool = True
    max_model_len: int = 2048
    tokens_per_chunk: int = 1
    step_s: float = 0.003
    token: str | None = None
    scoring: str = "prompt_logprobs"
    """Or 'echo', 'echo_text', 'generated': less and less of what vLLM can say of a prompt."""
    refuses: tuple[str, ...] = ()
    """Fields of a request that it does not know, and answers 400 to."""
    most_logprobs: int = 20
    speaks_ids: bool = True
    """Whether it says which tokens it generates; else their texts alone."""
    gated: bool = False
    """Whether kvtriage's gate stands before it; then `token` is what it was told as its key."""
    sharpness: float = 1.0
    """How sure the model is of itself; another one is another model."""
    paths: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    probes: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)
    watches: bool = False
    salts: set[str] = field(default_factory=set)
    running: int = 0
    most_running: int = 0
    came_s: list[float] = field(default_factory=list)
    """When each completion was asked for (time.perf_counter)."""
    dead: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @functools.cached_property
    def scales(self) -> dict[str, Any]:
        file = Path(self.model) / SCALES
        return {} if self.faults.default_scales or not file.exists() else dict(json.loads(file.read_text()))

    def stores_fp8(self, layer_idx: int) -> bool:
        if self.cache_dtype not in ("fp8", "fp8_e4m3"):
            return False
        if self.faults.ignores_skip:
            return True
        sliding = self.geometry.windows[layer_idx] is not None
        return str(layer_idx) not in self.skip and not ("sliding_window" in self.skip and sliding)

    def damage(self) -> float:
        """How far the logits are pushed about; 0 for BF16 in one piece."""
        total = 1e-5 if self.chunk else 0.0
        for layer_idx in range(self.geometry.layers):
            if self.stores_fp8(layer_idx):
                total += 0.01 if str(layer_idx) in self.scales else 0.02
            if (probe := self.probes.get(str(layer_idx))) is not None:
                share = 1.0 if probe["heads"] is None else len(probe["heads"]) / self.geometry.kv_heads
                total += share * (0.02 if probe["format"] == "fp8" else 0.005) * (1 + layer_idx)
        return total

    def log_probs(self, before: int, actual: int | None) -> dict[int, float]:
        """Of every token that can follow `before`, and of the one that does."""
        tokens = {*range(VOCABULARY)} | (set() if actual is None else {actual})
        damage = self.damage()
        logits = {}
        for token in tokens:
            base, noise = _logit(before, token)
            logits[token] = self.sharpness * base + damage * noise
        norm = math.log(math.fsum(math.exp(logit) for logit in logits.values()))
        return {token: logit - norm for token, logit in logits.items()}

    def layers(self) -> list[dict[str, Any]]:
        return [self._layer(layer_idx) for layer_idx in range(self.geometry.layers)]

    def _layer(self, layer_idx: int) -> dict[str, Any]:
        fp8 = self.stores_fp8(layer_idx)
        own = self.scales.get(str(layer_idx), {"k": [1.0], "v": [1.0], "q": [1.0]}) if fp8 else {}
        return {
            "name": f"model.layers.{layer_idx}.self_attn.attn",
            "layer_idx": layer_idx,
            "kv_cache_dtype": "fp8" if fp8 else "auto",
            "cache_dtype": "uint8" if fp8 else "bfloat16",
            "num_kv_heads": self.geometry.kv_heads,
            "heads": list(range(self.geometry.kv_heads)),
            "query_heads": list(range(self.geometry.heads)),
            "k_scale": own.get("k", [1.0]),
            "v_scale": own.get("v", [1.0]),
            "q_scale": own.get("q", [1.0]),
            "backend": "fake.Backend",
            "backend_name": self.backend,
            "per_head_scales": True,
            "quantizes_q": fp8 and self.quantizes_q,
            "takes_quantized_q": self.quantizes_q,
            "shares_with": None,
            "unsupported": None,
        }

    def observe(self, on: bool, edges: list[int], candidates: list[dict[str, Any]]) -> None:
        self.seen = {"edges": edges, "candidates": len(candidates), "tokens": 0} if on else {**self.seen, "off": True}

    def ranges(self) -> dict[str, Any]:
        edges = len(self.seen["edges"])

        def tensor(heads: int, *, mantissa: bool) -> dict[str, Any]:
            histogram = [0] * 64
            histogram[43] = 8 * self.seen["tokens"]
            return {
                "amax": [[8.0 + head] * edges for head in range(heads)],
                "histogram": [histogram] * heads,
                "zeros": [0] * heads,
                "mantissa_sse": [[1.0 + i for i in range(8)]] * heads if mantissa else [],
                "nonfinite": [self.faults.nonfinite] * heads,
            }

        heads = self.geometry.kv_heads
        counts = {"elements": [800] * heads, "saturated": [0] * heads, "below_normal": [8] * heads}
        layer = {
            "heads": list(range(heads)),
            "query_heads": list(range(self.geometry.heads)),
            "tokens": self.seen["tokens"],
            "q": tensor(self.geometry.heads, mantissa=False),
            "k": tensor(heads, mantissa=True),
            "v": tensor(heads, mantissa=True),
            "held_out": {"k": [counts] * self.seen["candidates"], "v": [counts] * self.seen["candidates"]},
        }
        return {str(layer_idx): layer for layer_idx in range(self.geometry.layers)}

    def metrics_text(self) -> str:
        skip = "[" + ", ".join(f"'{word}'" for word in self.skip) + "]"
        labels = (
            f'block_size="16",cache_dtype="{self.cache_dtype}",enable_prefix_caching="True",engine="0",'
            f'kv_cache_dtype_skip_layers="{skip}",kv_cache_max_concurrency="4.5",kv_cache_memory_bytes="1073741824",'
            'kv_cache_size_tokens="9216",num_cpu_blocks="None",num_gpu_blocks="576"'
        )
        return f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{labels}}} 1.0\n"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    player: Player

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        player = self.player
        if not self._admitted(self.path.partition("?")[0]):
            return
        match self.path.partition("?")[0]:
            case "/health":
                self._send(b"")
            case "/version":
                self._json({"version": player.version})
            case "/v1/models":
                name = player.called or player.model
                self._json({"data": [{"id": name, "root": player.model, "max_model_len": player.max_model_len}]})
            case "/metrics" if player.metrics:
                self._send(player.metrics_text().encode())
            case "/server_info" if player.extension:
                facts = {
                    "model_config": {"dtype": "torch.bfloat16", "hf_token": "secret"},
                    "device_config": {"device": "cpu"},
                }
                self._json({"vllm_config": facts, "system_env": {"nvidia_gpu_models": player.gpus}})
            case _:
                self._json({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        player = self.player
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        with player.lock:
            player.bodies.append(body)
        if not self._admitted(self.path):
            return
        if self.path == "/collective_rpc" and player.extension:
            self._rpc(body["method"], body["args"])
        elif self.path == "/v1/completions":
            if unknown := [name for name in player.refuses if name in body]:
                self._json({"error": {"message": f"Extra inputs are not permitted: {unknown[0]}"}}, 400)
                return
            if (body.get("logprobs") or 0) > player.most_logprobs:
                self._json({"error": {"message": "too many logprobs"}}, 400)
                return
            self._complete(body)
        else:
            self._json({"detail": "Not Found"}, 404)

    def _admitted(self, path: str) -> bool:
        """False when this request was answered by a fault."""
        player = self.player
        with player.lock:
            player.paths.append(path)
            player.headers.append(dict(self.headers))
            statuses = player.faults.status.get(path, [])
            status = statuses.pop(0) if statuses else None
            dies = path == "/v1/completions" and player.faults.strikes("deaths")
            overflows = path == "/v1/completions" and player.faults.strikes("nan_answers")
            garbles = path == "/v1/completions" and player.faults.strikes("not_json")
        if dies:
            player.dead = True
        if player.dead:
            self.close_connection = True
            self.connection.close()
            if __name__ == "__main__":
                os._exit(9)
            return False
        if player.gated and path.startswith("/kvtriage/proof/"):
            self._prove(path.rpartition("/")[2])
            return False
        if player.gated and path == "/health":
            return True
        if (player.token is not None or player.gated) and self.headers.get("Authorization") != f"Bearer {player.token}":
            self._json({"error": {"message": "Unauthorized"}}, 401)
            return False
        if player.forbidden and not path.startswith("/v1/"):
            self._json({"message": "Forbidden"}, 403)
            return False
        if status is not None:
            self._json({"error": {"message": "a planted fault"}}, status)
            return False
        if overflows:
            self._json({"error": {"message": "Out of range float values are not JSON compliant: nan"}}, 400)
            return False
        if garbles:
            self._send(b"<html>busy</html>")
            return False
        return True

    def _prove(self, nonce: str) -> None:
        key = self.player.token
        if key is None:
            self._send(b"KVTRIAGE_SERVER_KEY is not in the server's environment", 503)
        else:
            self._send(hmac.new(key.encode(), nonce.encode(), hashlib.sha256).hexdigest().encode())

    def _rpc(self, method: str, args: list[Any]) -> None:
        player = self.player
        result: Any = None
        if not player.methods:
            told = f"Call to collective_rpc method failed: Method {method!r} is not implemented."
            self._json({"error": {"message": told}}, 500)
            return
        match method:
            case "kvtriage_layers":
                result = player.layers()
            case "kvtriage_watch":
                (player.watches,) = args
            case "kvtriage_nonfinite":
                result = {str(i): player.faults.nonfinite for i in range(player.geometry.layers)}
            case "kvtriage_probe":
                player.probes = args[0]
            case "kvtriage_observe":
                player.observe(args[0], *(args[1:] or ([0], [])))
            case "kvtriage_ranges":
                result = player.ranges()
        self._json({"results": [result]})

    def _complete(self, body: dict[str, Any]) -> None:
        player = self.player
        with player.lock:
            player.came_s.append(time.perf_counter())
            player.running += 1
            player.most_running = max(player.most_running, player.running)
            if player.seen and "off" not in player.seen:
                player.seen["tokens"] += len(body["prompt"])
        try:
            if body.get("stream"):
                self._stream(body)
            else:
                self._answer(body)
        finally:
            with player.lock:
                player.running -= 1

    def _answer(self, body: dict[str, Any]) -> None:
        player, prompt = self.player, body["prompt"]
        choice = self._said(self._greedy(prompt, body["max_tokens"]), body)
        if player.scoring.startswith("echo") and body.get("echo"):
            choice["logprobs"] = self._echo(body)
            self._json({"choices": [choice]})
            return
        if player.scoring == "prompt_logprobs" and (asked := body.get("prompt_logprobs")) is not None:
            positions: list[Any] = [None]
            together = player.faults.mixes_up_batches and self._waits_for_company()
            for before, actual in itertools.pairwise(prompt):
                found = player.log_probs(before + 1000 * together, actual)
                ranked = sorted(found, key=lambda token: -found[token])
                named = {actual: ranked.index(actual) + 1} | {t: ranked.index(t) + 1 for t in ranked[:asked]}
                positions.append(
                    {str(t): {"logprob": found[t], "rank": rank, "decoded_token": "x"} for t, rank in named.items()}
                )
            choice["prompt_logprobs"] = positions
            self._spoil(choice, positions)
        if body.get("logprobs") is not None:
            log_prob = -1.0
            if player.faults.forgets_prefixes and body["cache_salt"] in player.salts:
                log_prob = -9.0
            player.salts.add(body.get("cache_salt", ""))
            choice["logprobs"] = {"token_logprobs": [log_prob]}
        self._json({"choices": [choice]})

    def _said(self, tokens: list[int], body: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": "".join(map(text_of, tokens))}
        return {**choice, "token_ids": tokens} if self.player.speaks_ids and body.get("return_token_ids") else choice

    def _echo(self, body: dict[str, Any]) -> dict[str, Any]:
        player, prompt = self.player, body["prompt"]
        by_id = player.scoring == "echo" and body.get("return_tokens_as_token_ids")

        def word(token: int) -> str:
            return f"token_id:{token}" if by_id else text_of(token)

        own: list[float | None] = [None]
        top: list[dict[str, float] | None] = [None]
        for before, actual in itertools.pairwise([*prompt, *self._greedy(prompt, 1)]):
            found = player.log_probs(before, actual)
            ranked = sorted(found, key=lambda token: -found[token])[: body["logprobs"]]
            own.append(found[actual])
            top.append({word(token): found[token] for token in ranked})
        words = [word(token) for token in [*prompt, *self._greedy(prompt, 1)]]
        with player.lock:
            if player.faults.strikes("short_scores"):
                words, own, top = words[:-3], own[:-3], top[:-3]
        return {"tokens": words, "token_logprobs": own, "top_logprobs": top}

    def _waits_for_company(self) -> bool:
        time.sleep(0.05)
        return self.player.running > 1

    def _spoil(self, choice: dict[str, Any], positions: list[Any]) -> None:
        faults = self.player.faults
        with self.player.lock:
            if faults.strikes("short_scores"):
                del positions[-1]
            if faults.strikes("no_logprobs"):
                choice["prompt_logprobs"] = None
            if faults.strikes("other_tokens"):
                positions[-1] = {"99999": {"logprob": -1.0, "rank": 1}}
            if faults.strikes("nan_logprobs"):
                for entry in positions[-1].values():
                    entry["logprob"] = None

    def _greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = [prompt[-1]]
        for _ in range(count):
            found = self.player.log_probs(tokens[-1], None)
            tokens.append(max(found, key=lambda token: found[token]))
        return tokens[1:]

    def _stream(self, body: dict[str, Any]) -> None:
        player, faults = self.player, self.player.faults
        tokens = self._greedy(body["prompt"], body["max_tokens"])
        with player.lock:
            cut, stalled = faults.strikes("cut_streams"), faults.strikes("stalled_streams")
            short, fails = faults.strikes("short_streams"), faults.strikes("error_streams")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if short:
            tokens = tokens[:-1]
        for start in range(0, len(tokens), player.tokens_per_chunk):
            time.sleep(player.step_s)
            own = tokens[start : start + player.tokens_per_chunk]
            self._event(json.dumps({"choices": [self._said(own, body)]}))
            if cut or stalled or fails:
                break
        if stalled:
            time.sleep(STALL_S)
        if cut or stalled:
            self.close_connection = True
            self.connection.close()
            return
        if fails:
            self._event(json.dumps({"error": {"message": "the engine died"}}))
        if body.get("stream_options", {}).get("include_usage"):
            self._event(json.dumps({"choices": [], "usage": {"completion_tokens": len(tokens)}}))
        self._event("[DONE]")
        with contextlib.suppress(OSError):
            self.wfile.write(b"0\r\n\r\n")

    def _event(self, data: str) -> None:
        line = f"data: {data}\n\n".encode()
        with contextlib.suppress(OSError):
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.flush()

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), status)

    def _send(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def _bind(player: Player, port: int) -> _Server:
    return _Server(("127.0.0.1", port), type("Handler", (_Handler,), {"player": player}))


@contextlib.contextmanager
def playing(player: Player) -> Iterator[str]:
    """The base URL of a server in a thread."""
    server = _bind(player, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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
        _bind(player, port).serve_forever()


if __name__ == "__main__":
    _main()
