"""The real demo models: the bytes that are held are the worksheet's, policy by policy."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvtriage.engines.base import Arm
from kvtriage.engines.embedded.demo import DEMO_MODELS
from kvtriage.engines.embedded.engine import EmbeddedEngine, open_engine
from kvtriage.fp8.scales import fit_scales
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import LayerKind
from tests.unit.engines.demo_folder import demo_folder

CONTEXTS = (40, 530)
"""Inside and beyond Gemma's window of 512 tokens."""


@pytest.fixture(scope="module", params=list(DEMO_MODELS))
def engine(request: pytest.FixtureRequest) -> Iterator[EmbeddedEngine]:
    folder = demo_folder(request.param)
    spec = read_cache_spec(json.loads((folder / "config.json").read_bytes()))
    with open_engine(folder, spec, numerics="storage", device="cpu") as opened:
        yield opened


def test_held_bytes_are_the_worksheets_at_every_length_under_every_policy(engine: EmbeddedEngine) -> None:
    spec = engine.spec
    prompt = tuple((7 * i) % 1000 + 10 for i in range(max(CONTEXTS)))
    stats = engine.observe([prompt[:64]], (0,), lambda _done, _total: None)
    scales = {s: fit_scales(stats, spec, s) for s in (Scaling.PER_TENSOR, Scaling.PER_HEAD)}
    skips = ((), spec.layers_of(LayerKind.SLIDING) or (0, spec.num_layers - 1))
    arms = [Arm("native", CachePolicy.native(spec.num_layers))]
    for scaling in Scaling:
        for skip in skips:
            policy = CachePolicy.fp8(spec.num_layers, scaling, skip)
            arms.append(Arm(f"{scaling}, skipping {skip}", policy, scales.get(scaling)))
    for context_len in CONTEXTS:
        for arm in arms:
            with engine.open(arm) as session:
                found = session.generate([prompt[:context_len]], 2)
            worksheet = price_policy(spec, arm.policy, [context_len + 1])
            assert (found.held_tokens, found.held_bytes) == ((context_len + 1,), worksheet.policy_bytes), arm.name
