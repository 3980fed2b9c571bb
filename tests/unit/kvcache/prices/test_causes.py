"""Each cause where it is at work, and that nothing is left over."""

from __future__ import annotations

from hypothesis import given, reject
from hypothesis import strategies as st

from kvtriage.errors import UnsupportedModel
from kvtriage.kvcache.allocator import HybridManager, Layout
from kvtriage.kvcache.engine_args import EngineArgs
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.prices.causes import CauseKind
from kvtriage.kvcache.prices.explain import Explanation, explain
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from tests.unit.kvcache.architectures import (
    DEEPSEEK_V32,
    EVERY_KIND,
    FALCON_H1,
    GEMMA_3_27B,
    GIB,
    LLAMA_8B,
    QWEN3_NEXT,
    fp8,
    servers,
)
from tests.unit.kvcache.models import GPT_OSS_20B, layer, spec_of

PLAIN = EngineArgs(max_model_len=32_768)


def explained(spec: CacheSpec, policy: CachePolicy, args: EngineArgs = PLAIN, context: int = 32_768) -> Explanation:
    found = explain(spec, policy, args, 16 * GIB, min(context, spec.max_model_len))
    assert isinstance(found, Explanation)
    return found


def sizes(found: Explanation) -> dict[CauseKind, int]:
    return {cause.kind: cause.reserved_bytes for cause in found.beside + found.causes}


@given(servers(), st.integers(1, 40) | st.integers(1, 500_000), st.integers(0, 2**40))
def test_causes_add_up_with_no_rest(
    server: tuple[CacheSpec, CachePolicy, EngineArgs], context: int, memory: int
) -> None:
    spec, policy, args = server
    try:
        found = explain(spec, policy, args, memory, min(context, spec.max_model_len))
    except UnsupportedModel:
        reject()
    if not isinstance(found, Explanation):
        assert found.detail
        return
    worksheet = found.contents.kv_bytes + sum(cause.reserved_bytes for cause in found.beside)
    assert worksheet == found.worksheet_bytes
    assert worksheet + sum(cause.reserved_bytes for cause in found.causes) == found.reserved.reserved_bytes
    every = found.beside + found.causes + found.pool_causes
    if found.reported_tokens is None:
        assert found.kv_tokens is None
        assert all(cause.tokens is None for cause in every)
    else:
        assert found.kv_tokens is not None
        assert found.kv_tokens + sum(cause.tokens or 0 for cause in every) == found.reported_tokens


@given(st.sampled_from(EVERY_KIND), st.integers(1, 448), st.booleans())
def test_the_worksheet_is_the_worksheet(spec: CacheSpec, context: int, is_native: bool) -> None:
    policy = CachePolicy.native(spec.num_layers) if is_native else fp8(spec, 1)
    found = explain(spec, policy, EngineArgs(max_model_len=448), GIB, context)
    if isinstance(found, Explanation):
        assert found.worksheet_bytes == price_policy(spec, policy, (context,)).policy_bytes


def test_full_layers_pay_for_nothing_but_the_rest_of_a_block() -> None:
    assert sizes(explained(LLAMA_8B, fp8(LLAMA_8B))) == {}
    odd = explained(LLAMA_8B, fp8(LLAMA_8B), EngineArgs(max_model_len=1000), 1000)
    assert sizes(odd) == {CauseKind.BLOCK_ROUNDING: 8 * 65_536}


def test_windows_pay_for_the_tokens_in_flight() -> None:
    """16,511 − 128 tokens in each of 12 windows; what is left of 1,033 blocks; full layers fit exactly."""
    found = sizes(explained(GPT_OSS_20B, fp8(GPT_OSS_20B)))
    assert found == {
        CauseKind.IN_FLIGHT: 12 * (16_511 - 128) * 1024,
        CauseKind.BLOCK_ROUNDING: 12 * (1033 * 16 - 16_511) * 1024,
    }


def test_empty_places_of_gemma() -> None:
    """52 windows in 6 groups of 10 leave 8 places empty; each is as many blocks as a window has."""
    found = explained(GEMMA_3_27B, fp8(GEMMA_3_27B))
    blocks = -(-(1023 + 16_384) // 16) + 1
    assert sizes(found)[CauseKind.GROUP_PADDING] == 8 * blocks * 16 * 4096


def test_a_states_copy_and_the_page_it_is_padded_to() -> None:
    found = sizes(explained(QWEN3_NEXT, CachePolicy.native(48)))
    state = 2 * (3 * 8192 + 32 * 128 * 128)
    page = 544 * 2048
    assert found[CauseKind.STATES] == found[CauseKind.STATE_COPIES] == 36 * state
    assert found[CauseKind.PAGE_PADDING] == 2 * 36 * (page - state)


def test_no_copy_of_a_state_without_prefix_caching() -> None:
    args = EngineArgs(max_model_len=32_768, enable_prefix_caching=False)
    found = explained(FALCON_H1, fp8(FALCON_H1), args)
    assert CauseKind.STATE_COPIES not in sizes(found)
    assert sizes(found)[CauseKind.STATES] == found.contents.state_bytes > 0


def test_index_keys_have_a_line_and_packed_rows_another() -> None:
    """An FP8 row of a sparse layer takes 656 bytes, not 576; a key takes 132 in either dtype."""
    found = sizes(explained(DEEPSEEK_V32, fp8(DEEPSEEK_V32)))
    assert found == {CauseKind.INDEX_KEYS: 61 * 32_768 * 132, CauseKind.ROW_SCALES: 61 * 32_768 * (656 - 576)}
    native = sizes(explained(DEEPSEEK_V32, CachePolicy.native(61)))
    assert native == {CauseKind.INDEX_KEYS: 61 * 32_768 * 132}


def test_windows_without_the_hybrid_manager_hold_all() -> None:
    args = EngineArgs(max_model_len=32_768, hybrid_manager=HybridManager.OFF)
    found = sizes(explained(GPT_OSS_20B, fp8(GPT_OSS_20B), args))
    assert found == {CauseKind.AS_FULL: 12 * (32_768 - 128) * 1024}


def test_pages_that_skipped_windows_are_padded_to() -> None:
    """A block of 48 FP8 tokens makes pages of 48 KiB; 16 BF16 tokens fill 32 of them."""
    skip = fp8(GPT_OSS_20B, *GPT_OSS_20B.layers_of(LayerKind.SLIDING))
    found = sizes(explained(GPT_OSS_20B, skip, EngineArgs(max_model_len=32_768, block_size=48)))
    assert found[CauseKind.PAGE_PADDING] == 12 * 1033 * 16 * 1024


def test_a_line_that_counts_longer_requests() -> None:
    found = explained(GPT_OSS_20B, fp8(GPT_OSS_20B), PLAIN, 8192)
    assert found.causes[0].kind is CauseKind.LENGTH
    assert found.causes[0].reserved_bytes == 12 * (32_768 - 8192) * 1024


def test_layers_of_other_stages_are_elsewhere() -> None:
    args = EngineArgs(max_model_len=32_768, pipeline_parallel_size=2)
    found = explained(LLAMA_8B, fp8(LLAMA_8B), args)
    assert sizes(found) == {CauseKind.STAGES: -found.worksheet_bytes // 2}


def test_layers_that_a_packed_layout_leaves_out_count_as_negative() -> None:
    """Windows of two head counts, five of one and one of the other, are cut into pairs: four layers find no partner."""
    spec = spec_of(layer(0, 64, kv_heads=8), *(layer(idx, 64, kv_heads=2) for idx in range(1, 6)), layer(6))
    found = explained(spec, fp8(spec), EngineArgs(max_model_len=32_768, layout=Layout.BLHNC))
    assert sizes(found)[CauseKind.LEFT_OUT] == -4 * 64 * 2 * 2 * 16
