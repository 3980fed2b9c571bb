"""Servers that are kept: what several tests ask of one arm costs one start."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from kvtriage.engines.base import Arm
from kvtriage.engines.vllm.fleet import LaunchedFleet, Served
from kvtriage.engines.vllm.server import Recipe

__all__ = ["KeptFleet"]


class KeptFleet:
    """A fleet of its own for each recipe, none of them stopped before the end."""

    def __init__(self, make: Callable[[], LaunchedFleet]) -> None:
        self._make = make
        self._first = make()
        self._fleets: list[tuple[Recipe, LaunchedFleet]] = []
        self._stack = ExitStack()

    def __enter__(self) -> KeptFleet:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def one_arm_at_a_time(self) -> bool:
        return self._first.one_arm_at_a_time

    @property
    def arms(self) -> frozenset[str] | None:
        return self._first.arms

    @property
    def server_args(self) -> tuple[str, ...]:
        return self._first.server_args

    @property
    def devices(self) -> int:
        return self._first.devices

    @property
    def sets_steps(self) -> bool:
        return self._first.sets_steps

    def has_ended(self, arm: Arm) -> bool:
        return self._fleet(arm).has_ended(arm)

    def show(self, arm: Arm) -> str:
        return self._first.show(arm)

    def serve(self, arm: Arm) -> Served:
        return self._fleet(arm).serve(arm)

    def restart(self, arm: Arm) -> None:
        self._fleet(arm).restart(arm)

    def _fleet(self, arm: Arm) -> LaunchedFleet:
        recipe = self._first.recipe(arm)
        for known, fleet in self._fleets:
            if known == recipe:
                return fleet
        fleet = self._stack.enter_context(self._make())
        self._fleets.append((recipe, fleet))
        return fleet
