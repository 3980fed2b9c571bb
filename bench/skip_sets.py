"""How close to the optimum is the search for a skip set, and how many sets does it measure?

    python bench/skip_sets.py [--seeds 300]                           random models of damage, against all 2^10 sets
    python bench/skip_sets.py --planted [--models demo:gemma3-270m]   planted faults, against the truth

Random models have ten layers of one or two sizes, heavy-tailed damage, and groups of layers that cost more
together, or less. A planted checkpoint goes through the whole job by the command line up to the search, with the
study beside this file: its right set is known. Exit 1 when a found set breaks the margin, or is not the truth's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from kvtriage.engines.embedded.demo import DEMO_MODELS
from kvtriage.stages.search.greedy import Hunt, Judged
from kvtriage.stages.set_prices import Layers, SetPrice

STUDY = Path(__file__).with_suffix(".toml")
FAULTS = ("none", "v_offset", "range_and_mantissa", "v_underflow")


@dataclass
class DamageModel:
    """`damage` of a set of layers in BF16; layer i holds `sizes[i]` bytes in FP8, and as many more in BF16."""

    sizes: tuple[int, ...]
    damage: Callable[[Layers], float]
    margin: float
    refuses: Callable[[Layers], bool] = lambda skip: False
    measured: set[Layers] = field(default_factory=set)

    @property
    def layers(self) -> Layers:
        return frozenset(range(len(self.sizes)))

    def price(self, skip: Layers) -> SetPrice | None:
        if self.refuses(skip):
            return None
        held = sum(self.sizes) + sum(self.sizes[layer] for layer in skip)
        return SetPrice(float(held), -10_000 // held)

    def hunt(self, groups: Sequence[Layers] = ()) -> Hunt:
        def screen(sets: Sequence[Layers]) -> list[float]:
            self.measured.update(sets)
            return [self.damage(skip) for skip in sets]

        return Hunt(
            layers=self.layers,
            groups=groups,
            isolated={layer: self.damage(self.layers - {layer}) for layer in self.layers},
            price_of=self.price,
            screen=screen,
            judge=lambda sets: [Judged(mean <= self.margin, mean) for mean in screen(sets)],
        )

    def optimum(self) -> float:
        """Bytes of the cheapest set that keeps the margin, by trying all 2^L."""
        sets = (frozenset(c) for size in range(len(self.sizes) + 1) for c in itertools.combinations(self.layers, size))
        kept = (skip for skip in sets if self.damage(skip) <= self.margin)
        return min(price.held_bytes for skip in kept if (price := self.price(skip)) is not None)


def random_model(seed: int, count: int = 10) -> DamageModel:
    """Layers of one or two sizes, heavy-tailed damage, up to five groups that cost more together or less."""
    draw = random.Random(seed)
    alone = [draw.lognormvariate(-6, 1.2) for _ in range(count)]
    sizes = tuple(draw.choice([10, 40]) if seed % 2 else 10 for _ in range(count))
    groups = {
        frozenset(draw.sample(range(count), draw.choice([2, 2, 3]))): draw.lognormvariate(-5, 1.0)
        for _ in range(draw.randrange(6))
    }
    shared = {group for group in groups if draw.random() < 0.3}

    def damage(skip: Layers) -> float:
        stored = set(range(count)) - skip
        total = sum(alone[layer] for layer in stored)
        for group, cost in groups.items():
            if group <= stored:
                total += -0.4 * min(alone[layer] for layer in group) if group in shared else cost
        return total

    return DamageModel(sizes, damage, damage(frozenset()) * draw.choice([0.1, 0.3, 0.5, 0.8]))


@dataclass(frozen=True)
class Row:
    """One planted checkpoint: what is true of it, and what the search found."""

    model: str
    fault: str
    truth: tuple[int, ...]
    found: tuple[int, ...] | None
    status: str
    measured: int
    verified: int
    seconds: float


def against_all_sets(seeds: int) -> bool:
    """Prints the table; whether every found set keeps its margin."""
    over, measured, judged, kept = [], [], [], True
    started = time.perf_counter()
    for seed in range(seeds):
        model = random_model(seed)
        hunt = model.hunt()
        found = hunt.cheapest([frozenset({0, 1, 8, 9})])
        price = None if found is None else model.price(found)
        if found is None or price is None or model.damage(found) > model.margin:
            print(f"model {seed}: the found set {found} does not keep the margin")
            kept = False
            continue
        over.append(price.held_bytes / model.optimum())
        measured.append(len(model.measured))
        judged.append(len(hunt.judged))
    optimal = sum(ratio == 1 for ratio in over)
    print(f"{len(over)} models of 10 layers, {time.perf_counter() - started:.1f} s")
    print(f"bytes over the optimum's: mean {fmean(over):.4f}, worst {max(over):.3f}; optimal in {optimal}")
    print(f"sets measured of 1,024: mean {fmean(measured):.0f}, most {max(measured)}; on all texts {fmean(judged):.0f}")
    return kept


def on_planted(models: list[str], folder: Path) -> Iterator[Row]:
    """Plants each fault, and runs the job up to the search."""
    for model in models:
        for fault in FAULTS:
            name = f"{model.removeprefix('demo:')}-{fault}"
            checkpoint, case = folder / name, folder / f"{name}-case"
            _kvtriage("faults", "plant", model, "--fault", fault, "--out", str(checkpoint))
            started = time.perf_counter()
            _kvtriage(
                *("run", str(checkpoint), "--data", "demo:english", "--study", str(STUDY), "--out", str(case)),
                *("--until", "search", "--threads", "1"),
            )
            truth = json.loads((checkpoint / "kvtriage_fault.json").read_text())
            frontier = json.loads((case / "frontier.json").read_text())
            yield Row(
                model,
                fault,
                tuple(truth["skip_layers"]),
                None if frontier["found"] is None else tuple(frontier["found"]),
                frontier["status"],
                frontier["measured_sets"],
                len(frontier["verified"]),
                time.perf_counter() - started,
            )


def _kvtriage(*args: str) -> None:
    subprocess.run([sys.executable, "-m", "kvtriage", *args], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--models", nargs="+", choices=[*DEMO_MODELS], default=[*DEMO_MODELS])
    given = parser.parse_args()
    if not given.planted:
        return 0 if against_all_sets(given.seeds) else 1
    wrong = False
    with tempfile.TemporaryDirectory() as folder:
        for row in on_planted(given.models, Path(folder)):
            right = row.found == row.truth
            wrong |= not right
            print(
                f"{row.model:<18} {row.fault:<20} truth {row.truth} found {row.found} ({row.status}) "
                f"{row.measured} sets, {row.verified} verified, {row.seconds:.0f} s: {'right' if right else 'WRONG'}"
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
