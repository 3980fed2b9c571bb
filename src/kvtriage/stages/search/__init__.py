"""search: the fewest retained bytes with which the quality margins hold jointly.

Damage of single layers does not add up: two layers may be harmless one by one and not together, or
the one repair may do for both. So sets of layers are measured, and not layers.

    texts     which texts choose, and which are claimed on
    probing   sets measured by the engine's probes, each text once
    rivals    the sets that others would choose
    greedy    the search itself: seeds, joint additions, pruning, swaps
    proving   a set as a whole arm, against all margins
    front     the table: bytes against damage
    choosing  the cheapest set by KL, verified, and a stricter one where that fails
    naming    which sets the table shows
    run       all of it, one record
    costs     what it comes to, said before
    adopting  the found set in place of the suspects, for what comes after
"""

from __future__ import annotations

from kvtriage.stages.search.adopting import adopt
from kvtriage.stages.search.costs import SearchCost, cost_search
from kvtriage.stages.search.run import search

__all__ = ["SearchCost", "adopt", "cost_search", "search"]
