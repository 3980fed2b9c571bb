"""What the client adds to each token: streams against a server that has nothing to do.

    python bench/client_overhead.py [--streams 1 64 256] [--tokens 64] [--rounds 3] [--limit-ms 0.1] [--json FILE]

A process of its own plays an OpenAI server that writes tokens as fast as it can. The client's CPU time
for a token, arrival stamped and stream read, is what it could distort a clock by; the wall time has the
server in it too. Open and closed loop. Exit 1 when the client takes more than the limit for a token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from kvtriage.engines.vllm.client import Client
from kvtriage.engines.vllm.timing import Stream, closed_loop, open_loop, stream_body


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection: requests one after another, each answered with a stream."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = next(
                int(line.partition(b":")[2])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length")
            )
            body = json.loads(await reader.readexactly(length))
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n")
            for token in range(body["max_tokens"]):
                _write(writer, json.dumps({"choices": [{"index": 0, "text": "x", "token_ids": [token]}]}))
                await writer.drain()
                await asyncio.sleep(0)
            _write(writer, "[DONE]")
            writer.write(b"0\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    writer.close()


def _write(writer: asyncio.StreamWriter, data: str) -> None:
    event = f"data: {data}\n\n".encode()
    writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")


async def _serve() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def measure(url: str, streams: int, tokens: int, *, is_open: bool) -> tuple[float, float]:
    """CPU seconds of the client and wall seconds, for each token."""
    bodies = [stream_body("m", [1, 2, 3], tokens, str(i)) for i in range(streams)]
    with Client(url) as client:
        closed_loop(client, bodies, streams)
        cpu, wall = time.process_time(), time.perf_counter()
        found: list[Stream]
        if is_open:
            found = open_loop(client, bodies, [i / 1000 for i in range(streams)])
        else:
            found = closed_loop(client, bodies, streams)
        count = sum(len(stream.token_ids) for stream in found)
        return (time.process_time() - cpu) / count, (time.perf_counter() - wall) / count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-ms", type=float, default=0.1)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        asyncio.run(_serve())
    rows: list[dict[str, object]] = []
    worst = 0.0
    with subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE) as server:
        if server.stdout is None:
            return 1
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        for streams in asked.streams:
            for is_open in (False, True):
                taken = [measure(url, streams, asked.tokens, is_open=is_open) for _ in range(asked.rounds)]
                each = [cpu * 1e3 for cpu, _ in taken]
                cpu, wall = statistics.median(each), statistics.median(wall for _, wall in taken) * 1e3
                worst = max(worst, cpu)
                loop = "open" if is_open else "closed"
                what = f"ms of the client for a token, {streams} streams, {loop} loop"
                rows.append({"what": what, "ratios": each, "target": f"at most {asked.limit_ms:g}"})
                print(f"{streams:>4} streams, {loop:<6} loop: {cpu:.4f} ms of CPU, {wall:.4f} ms in all")
        server.terminate()
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"at most {worst:.4f} ms a token; the limit is {asked.limit_ms:g} ms")
    return int(worst > asked.limit_ms)


if __name__ == "__main__":
    sys.exit(main())
