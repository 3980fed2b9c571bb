"""The contract of every engine, held to real servers of vLLM: each promise of tests/conformance is collected here."""

from __future__ import annotations

import pytest

from kvtriage.engines.base import Arm, Engine
from kvtriage.fp8.scales import ScaleSet
from kvtriage.kvcache.policy import Scaling
from tests.conformance.test_engine_contract import *  # noqa: F403 - all promises, those to come too


@pytest.fixture  # type: ignore[no-redef]
def engine(vllm: Engine) -> Engine:
    return vllm


@pytest.fixture  # type: ignore[no-redef]
def scales(hybrid_scales: dict[Scaling, ScaleSet]) -> dict[Scaling, ScaleSet]:
    return hybrid_scales


@pytest.fixture  # type: ignore[no-redef]
def storable(four_arms: list[Arm]) -> list[Arm]:
    """Of those that can be stored the four that are served anyway: each is a server."""
    return four_arms
