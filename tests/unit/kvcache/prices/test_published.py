"""Published config.json files, where a folder of them lies beside the checkout: each is explained with no rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtriage.errors import UnsupportedModel
from kvtriage.kvcache.engine_args import EngineArgs
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.prices.explain import Explanation, explain
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec

FOLDER = Path(__file__).resolve().parents[5] / "shared" / "configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
UNMODELLED = "DeepSeek-V4"
pytestmark = pytest.mark.skipif(not NAMES, reason=f"no published configs at {FOLDER}")


def spec_named(name: str) -> CacheSpec:
    return read_cache_spec(json.loads((FOLDER / f"{name}.json").read_bytes()))


@pytest.mark.parametrize("name", [name for name in NAMES if UNMODELLED not in name])
def test_causes_lead_from_the_worksheet_to_the_line(name: str) -> None:
    spec = spec_named(name)
    length = min(32_768, spec.max_model_len)
    for policy in (CachePolicy.native(spec.num_layers), CachePolicy.fp8(spec.num_layers, Scaling.UNIT)):
        found = explain(spec, policy, EngineArgs(max_model_len=length), 2**40, length)
        assert isinstance(found, Explanation)
        worksheet = price_policy(spec, policy, (length,)).policy_bytes
        assert found.worksheet_bytes == worksheet
        assert worksheet + sum(cause.reserved_bytes for cause in found.causes) == found.reserved.reserved_bytes
        every = found.beside + found.causes + found.pool_causes
        assert found.kv_tokens is not None
        assert found.kv_tokens + sum(cause.tokens or 0 for cause in every) == found.reported_tokens


@pytest.mark.parametrize("name", [name for name in NAMES if UNMODELLED in name])
def test_a_compressed_cache_is_refused_by_name(name: str) -> None:
    spec = spec_named(name)
    with pytest.raises(UnsupportedModel, match="does not model the pages of layer 0"):
        explain(spec, CachePolicy.native(spec.num_layers), EngineArgs(), 2**40, 1024)
