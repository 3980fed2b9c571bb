"""How fast does the explorer answer?

    python bench/explorer.py [--seconds 3] [--json FILE]

One explorer on the loopback and one client that keeps its connection, as a browser does. Three models: 128 layers of a
hybrid, whose toggles fall into four classes; 128 layers of which no two are alike, so that each toggle is a price of
its own; and 10,000 layers. Every question names another set of layers. Whole round trips are kept raw, the reading of
JSON left out; the best, the median and the 95th percentile are told, and the processor time of an answer, client and
server together. Exit 1 where the best price of 128 layers takes 50 ms or more of both: other load only adds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtriage.explore.server import HOST, Explored, open_server
from kvtriage.explore.subject import Subject
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec

LONGEST_PRICE_S = 0.05


@dataclass(frozen=True)
class Case:
    name: str
    path: str
    subject: Subject
    is_promised: bool


def hybrid(num_layers: int) -> Subject:
    """Every sixth layer attends to everything, the others to a window of 1,024."""
    layers = tuple(
        LayerSpec(idx, LayerKind.FULL, 32, 8, 128, 128)
        if idx % 6 == 5
        else LayerSpec(idx, LayerKind.SLIDING, 32, 8, 128, 128, 1024)
        for idx in range(num_layers)
    )
    return Subject("hybrid", "hybrid", CacheSpec("gemma3_text", layers, 131_072))


def unlike(num_layers: int) -> Subject:
    """Full attention everywhere, and no two layers with as many query heads."""
    layers = tuple(LayerSpec(idx, LayerKind.FULL, 8 * (idx + 1), 8, 128, 128) for idx in range(num_layers))
    return Subject("unlike", "unlike", CacheSpec("llama", layers, 131_072))


def questions(num_layers: int) -> Iterator[str]:
    step = 0
    while True:
        first = step * 7 % num_layers
        yield f"skip={first}-{min(num_layers - 1, first + step % 40)}&context={1024 + step % 8192}"
        step += 1


@dataclass(frozen=True)
class Taken:
    """Seconds of each round trip, and of processor time for one of them."""

    round_trips_s: list[float]
    processor_s: float


def measure(case: Case, seconds: float) -> Taken:
    taken: list[float] = []
    with open_server(Explored(lambda: case.subject), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        connection = http.client.HTTPConnection(HOST, server.server_port)
        asked = questions(case.subject.spec.num_layers)
        processor, until = time.process_time(), time.perf_counter() + seconds
        while time.perf_counter() < until or len(taken) < 3:
            started = time.perf_counter()
            connection.request("GET", f"{case.path}?{next(asked)}")
            response = connection.getresponse()
            response.read()
            taken.append(time.perf_counter() - started)
            if response.status != 200:
                raise SystemExit(f"{case.name}: status {response.status}")
        processor = time.process_time() - processor
        connection.close()
        server.shutdown()
        thread.join()
    return Taken(taken, processor / len(taken))


def row(case: Case, taken: Taken) -> dict[str, object]:
    """A line of bench/table.py."""
    line: dict[str, object] = {"what": f"seconds of a {case.name}", "ratios": taken.round_trips_s}
    return line | ({"target": f"at most {LONGEST_PRICE_S}"} if case.is_promised else {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    cases = (
        Case("price, 128 layers of 2 kinds", "/price", hybrid(128), True),
        Case("price, 128 layers, no two alike", "/price", unlike(128), True),
        Case("front, 128 layers of 2 kinds", "/front", hybrid(128), False),
        Case("price, 10,000 layers of 2 kinds", "/price", hybrid(10_000), False),
    )
    found = {case.name: measure(case, options.seconds) for case in cases}
    for name, each in found.items():
        taken = each.round_trips_s
        slow = sorted(taken)[int(len(taken) * 0.95)]
        best, median = min(taken), statistics.median(taken)
        told = f"best {1e3 * best:.1f} ms, median {1e3 * median:.1f} ms, 95th {1e3 * slow:.1f} ms"
        print(f"{name:34}{len(taken):6} asked: {told}, processor {1e3 * each.processor_s:.1f} ms")
    if options.json is not None:
        options.json.write_text(json.dumps([row(case, found[case.name]) for case in cases], indent=1) + "\n")
    promised = [found[case.name] for case in cases if case.is_promised]
    return int(max(min(*each.round_trips_s, each.processor_s) for each in promised) >= LONGEST_PRICE_S)


if __name__ == "__main__":
    sys.exit(main())
