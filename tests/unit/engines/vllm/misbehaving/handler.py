"""HTTP as vLLM speaks it, and as it goes wrong."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.unit.engines.vllm.misbehaving.completions import answer_at_once, said
from tests.unit.engines.vllm.misbehaving.faults import STALL_S
from tests.unit.engines.vllm.misbehaving.player import Player
from tests.unit.engines.vllm.misbehaving.worker import answer_call, metrics_text

__all__ = ["Handler"]


class Handler(BaseHTTPRequestHandler):
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
                self._send(metrics_text(player).encode())
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
            self._call_workers(body["method"], body["args"])
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
            if player.is_program:
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

    def _call_workers(self, method: str, args: list[Any]) -> None:
        if self.player.methods:
            self._json({"results": [answer_call(self.player, method, args)]})
        else:
            told = f"Call to collective_rpc method failed: Method {method!r} is not implemented."
            self._json({"error": {"message": told}}, 500)

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
                self._json({"choices": [answer_at_once(player, body)]})
        finally:
            with player.lock:
                player.running -= 1

    def _stream(self, body: dict[str, Any]) -> None:
        player, faults = self.player, self.player.faults
        tokens = player.greedy(body["prompt"], body["max_tokens"])
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
            self._event(json.dumps({"choices": [said(player, own, body)]}))
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
