"""What a search is said to take before it begins."""

from __future__ import annotations

from kvtriage.cli.dry_run_options import Speed
from kvtriage.cli.search_table import render_cost
from kvtriage.stages.search import SearchCost

COST = SearchCost(28, 2800, 4, 800, 40, 14, 700)


def test_servers_are_counted_where_there_are_any() -> None:
    plain, served = (render_cost(COST, Speed(1e-3, 1e-1), servers) for servers in (False, True))
    assert "total, at most                              4,340 tokens  about 8.3 s" in plain
    assert "server" not in plain
    assert served.startswith(plain)
    assert "servers: one, in BF16" in served
    assert "up to 4 more verify, and BF16's starts again after each" in served
