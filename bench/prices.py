"""How fast are many prices, and how soon does `kvtriage plan` answer?

    python bench/prices.py [--seconds 2] [--starts 9] [--json FILE]

Prices: a sweep over the 48 layers of a recurrent hybrid (three of four layers a gated delta net, the shape of
Qwen3-Next), 24 contexts by 16 memory sizes, on one core. Three ways in turn, in one run, each timed as often as fits:
the sweep; a sweep of a single context and memory, whose pools serve one price each; and each price by itself, from
the model's layers on, held bytes left out. Rounds are kept raw, and the best are what the ratios compare, since noise
only adds.

Cold start: `kvtriage plan` of a config.json with memory to fill, and `python -c pass`, alternating. Exit 1 below
20,000 prices a second, at 0.3 s or more, and when plan loads torch, numpy or pydantic.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtriage.kvcache.engine_args import EngineArgs, reserve
from kvtriage.kvcache.prices.sweep import NamedPolicy, list_policies, sweep
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec, StateTensor

GIB = 1024**3
CONTEXTS = tuple(4096 * step for step in range(1, 25))
MEMORIES = tuple(4 * GIB * step for step in range(1, 17))
FEWEST_PRICES = 20_000
LONGEST_START_S = 0.3
HEAVY = ("torch", "numpy", "pydantic")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 128,
    "hidden_size": 4096,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
LOADED = """
import sys
from kvtriage.cli.main import main
main(sys.argv[2:])
print(*sorted(set(sys.argv[1].split(",")) & set(sys.modules)), file=sys.stderr)
"""


@dataclass(frozen=True)
class Rounds:
    """One way to do it: how many prices a round has, and the seconds of each round."""

    name: str
    prices: int
    seconds: tuple[float, ...]

    @property
    def prices_per_s(self) -> float:
        return self.prices / min(self.seconds)


def hybrid() -> CacheSpec:
    """48 layers, of which every fourth has full attention and the others a recurrent state."""
    state = (StateTensor("conv", (3, 8192), 2, 1, 0), StateTensor("temporal", (32, 128, 128), 2, 0))
    return CacheSpec(
        "hybrid",
        tuple(
            LayerSpec(idx, LayerKind.FULL, 16, 2, 256, 256)
            if idx % 4 == 3
            else LayerSpec(idx, LayerKind.STATE, 0, 0, 0, 0, beside=state)
            for idx in range(48)
        ),
        max(CONTEXTS),
    )


def price_alone(spec: CacheSpec, policies: tuple[NamedPolicy, ...]) -> int:
    """The reported tokens alone, each by itself, over a few of the contexts and memories: it is slow."""
    count = 0
    for named in policies:
        for context in CONTEXTS[::8]:
            for memory in MEMORIES[::8]:
                reserve(spec, named.policy, EngineArgs(max_model_len=context), memory)
                count += 1
    return count


def measure_prices(seconds: float) -> list[Rounds]:
    """The three ways, round after round in turn, until the time is over; at least three rounds."""
    spec = hybrid()
    policies = list_policies(spec)
    ways: dict[str, Callable[[], int]] = {
        "sweep of 24 contexts and 16 memories": lambda: len(sweep(spec, policies, EngineArgs(), CONTEXTS, MEMORIES)),
        "sweep of one context and one memory": lambda: len(
            sweep(spec, policies, EngineArgs(), CONTEXTS[:1], MEMORIES[-1:])
        ),
        "each price by itself": lambda: price_alone(spec, policies),
    }
    counts: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["each price by itself"]) < 3:
        for name, way in ways.items():
            start = time.perf_counter()
            counts[name] = way()
            times[name].append(time.perf_counter() - start)
    return [Rounds(name, counts[name], tuple(times[name])) for name in ways]


def measure_starts(starts: int) -> tuple[list[Rounds], list[str]]:
    """`kvtriage plan` and an empty Python in turn; and which heavy modules plan loads."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(CONFIG))
        plan = ["plan", str(config), "--context", "32768", "--memory", "16GiB", "--skip", "0"]
        ways = {
            "kvtriage plan": [sys.executable, "-m", "kvtriage", *plan],
            "python -c pass": [sys.executable, "-c", "pass"],
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(starts):
            for name, command in ways.items():
                start = time.perf_counter()
                subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
                times[name].append(time.perf_counter() - start)
        loaded = subprocess.run(
            [sys.executable, "-c", LOADED, ",".join(HEAVY), *plan], capture_output=True, text=True, check=True
        )
    return [Rounds(name, 1, tuple(times[name])) for name in ways], loaded.stderr.split()


def rows(prices: Sequence[Rounds], starts: Sequence[Rounds]) -> list[dict[str, object]]:
    """Lines of bench/table.py."""
    sweep_s, _, alone_s = ([seconds / rounds.prices for seconds in rounds.seconds] for rounds in prices)
    plan, python = starts
    return [
        {
            "what": f"seconds of {FEWEST_PRICES:,} prices in a sweep",
            "ratios": [seconds * FEWEST_PRICES for seconds in sweep_s],
            "target": "at most 1",
        },
        {"what": "a price in a sweep / by itself", "ratios": [a / b for a, b in zip(sweep_s, alone_s, strict=True)]},
        {"what": "seconds until plan has answered", "ratios": plan.seconds, "target": f"at most {LONGEST_START_S}"},
        {
            "what": "start of plan / of Python",
            "ratios": [own / bare for own, bare in zip(plan.seconds, python.seconds, strict=True)],
        },
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="how long to time the prices")
    parser.add_argument("--starts", type=int, default=9, help="how often to start each program")
    parser.add_argument("--json", type=Path, help="also write the rows and the raw rounds here")
    options = parser.parse_args()
    if options.starts < 1:
        parser.error("--starts is at least 1")
    prices = measure_prices(options.seconds)
    starts, loaded = measure_starts(options.starts)
    alone = prices[-1].prices_per_s
    for rounds in prices:
        print(
            f"{rounds.name:38} {rounds.prices_per_s:>10,.0f} prices/s {rounds.prices_per_s / alone:>6.1f}x "
            f"  best of {len(rounds.seconds)} rounds of {rounds.prices:,}"
        )
    for rounds in starts:
        print(
            f"{rounds.name:38} {min(rounds.seconds) * 1e3:>10,.0f} ms, median "
            f"{statistics.median(rounds.seconds) * 1e3:,.0f} ms of {len(rounds.seconds)}"
        )
    print(f"plan loads {', '.join(loaded) if loaded else 'none of ' + ', '.join(HEAVY)}")
    if options.json:
        options.json.write_text(json.dumps([*rows(prices, starts), *map(asdict, [*prices, *starts])], indent=1) + "\n")
    is_fast = prices[0].prices_per_s >= FEWEST_PRICES and min(starts[0].seconds) < LONGEST_START_S
    return 0 if is_fast and not loaded else 1


if __name__ == "__main__":
    sys.exit(main())
