"""What a search is said to take before it begins, and what came of it."""

from __future__ import annotations

import msgspec

from kvtriage.cli.dry_run_options import Speed
from kvtriage.cli.search_table import render_cost, render_frontier
from kvtriage.stages.search import SearchCost
from tests.unit.report.cases import gemma_like
from tests.unit.report.test_frontier_figure import FRONTIER, row

COST = SearchCost(28, 2800, 4, 800, 40, 14, 700)


def test_servers_are_counted_where_there_are_any() -> None:
    plain, served = (render_cost(COST, Speed(1e-3, 1e-1), servers) for servers in (False, True))
    assert "total, at most                              4,340 tokens  about 8.3 s" in plain
    assert "server" not in plain
    assert served.startswith(plain)
    assert "servers: one, in BF16" in served
    assert "up to 4 more verify, and BF16's starts again after each" in served


def test_sets_are_named_and_lengths_said() -> None:
    everything = row(tuple(range(18)), 2 * 2**20, 0.0, "BF16 everywhere")
    frontier = msgspec.structs.replace(FRONTIER, rows=(*FRONTIER.rows, everything))
    told = render_frontier(frontier, gemma_like().plan)
    assert [line.split("  ")[0] for line in told.splitlines() if line.startswith("BF16")] == ["BF16 everywhere *"]
    assert "all 18  " in told
    assert "0, 1, 16, 17" in told
    assert (
        "held: bytes of a sequence of 256 or 1,024 tokens; tokens: the engine's line for max_model_len 32,768" in told
    )
