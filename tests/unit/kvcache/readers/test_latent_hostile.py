"""Whatever a config of these families holds, the answer is a spec that can be priced, or one sentence."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.errors import ModelError
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.spec import CacheSpec
from tests.unit.kvcache.readers.configs import edited, read_or_refuse
from tests.unit.kvcache.readers.latent_configs import DEEPSEEK_V3, DEEPSEEK_V4_FLASH, GLM_52, MINICPM3

SMALL = {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
CONFIGS = {
    "dense": edited(DEEPSEEK_V3, **SMALL),
    "sparse": edited(GLM_52, **SMALL, indexer_types=["full", "full", "full", "shared"]),
    "compressed": edited(DEEPSEEK_V4_FLASH, **SMALL, compress_ratios=[0, 4, 128, 4, 0]),
    "unfolded": edited(MINICPM3, **SMALL),
}

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.sampled_from([10**9, 10**5000, float("nan"), 1.5, "", "F", "FSSF", "full", {}, {"a": []}, [[]]]),
    st.lists(st.one_of(st.integers(-1, 128), st.sampled_from(["F", "S", "full", "shared", None])), max_size=6),
)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_small_ones_are_read(config: Mapping[str, object]) -> None:
    answer = read_or_refuse(config)
    assert isinstance(answer, CacheSpec)
    assert answer.num_layers == 4


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@given(data=st.data())
def test_any_values_are_priced_or_refused(config: Mapping[str, object], data: st.DataObject) -> None:
    keys = st.sampled_from(sorted({*config, "indexer_types", "index_topk_pattern", "layer_types", "is_causal"}))
    answer = read_or_refuse({**config, **data.draw(st.dictionaries(keys, VALUES, min_size=1, max_size=3))})
    if isinstance(answer, ModelError):
        assert "\n" not in answer.message
        assert len(answer.message) < 400
    else:
        native = CachePolicy.native(answer.num_layers)
        short, long = (price_policy(answer, native, (context_len,)).bf16_bytes for context_len in (100, 10_000))
        assert 0 < short <= long
