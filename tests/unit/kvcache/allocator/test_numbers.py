"""Figures that vLLM 0.32's own code gave for real models, kept here to be checked anywhere.

The Hopper defaults throughout: FLASH_ATTN, layout LBNHC, 8,192 batched tokens, asynchronous scheduling.
"""

from __future__ import annotations

import pytest

from kvtriage.errors import UnsupportedModel
from kvtriage.kvcache.allocator import (
    Backend,
    CacheDtype,
    Capacity,
    HybridManager,
    LayerStack,
    Layout,
    PoolSettings,
    Reason,
    Refusal,
    ServingLimits,
    allocate,
)
from kvtriage.kvcache.allocator.layers import CachelessLayer, EngineLayer, FullLayer, IndexLayer, MlaLayer, StateLayer
from tests.unit.kvcache.allocator.stacks import (
    COMMAND_R7B,
    DEEPSEEK_V3,
    GEMMA_3_1B,
    GEMMA_3_27B,
    GIB,
    GPT_OSS_20B,
    LLAMA_4_SCOUT,
    LLAMA_8B,
    MISTRAL_7B,
    QWEN3_NEXT,
    stack_of,
)

BF16 = PoolSettings()
FP8 = PoolSettings(cache_dtype=CacheDtype.FP8)
NO_HYBRID = PoolSettings(cache_dtype=CacheDtype.FP8, hybrid_manager=HybridManager.OFF)


def skipping(
    *words: str,
    block_size: int | None = None,
    layout: Layout = Layout.LBNHC,
    backend: Backend = Backend.FLASH_ATTN,
    hybrid_manager: HybridManager = HybridManager.AUTO,
) -> PoolSettings:
    return PoolSettings(
        cache_dtype=CacheDtype.FP8,
        skip_layers=words,
        block_size=block_size,
        layout=layout,
        backend=backend,
        hybrid_manager=hybrid_manager,
    )


def at(max_model_len: int | None, available_bytes: int = 16 * GIB) -> ServingLimits:
    return ServingLimits(available_bytes, max_model_len, longest_model_len=131_072)


def started(stack: LayerStack, settings: PoolSettings, limits: ServingLimits) -> Capacity:
    outcome = allocate(stack, settings, limits)
    assert isinstance(outcome, Capacity), outcome
    return outcome


def refused(stack: LayerStack, settings: PoolSettings, limits: ServingLimits) -> Refusal:
    outcome = allocate(stack, settings, limits)
    assert isinstance(outcome, Refusal), outcome
    return outcome


FLASHINFER_128 = skipping("sliding_window", block_size=128, backend=Backend.FLASHINFER)

FIGURES = {
    # blocks, bytes of a block, blocks of a request, reported tokens, groups
    "llama-fp8": (LLAMA_8B, FP8, 32768, (16384, 1048576, 2048, 262144, 1)),
    "gpt-oss-bf16": (GPT_OSS_20B, BF16, 32768, (43690, 393216, 3081, 464665, 2)),
    "gpt-oss-fp8": (GPT_OSS_20B, FP8, 32768, (87381, 196608, 3081, 929341, 2)),
    "gpt-oss-skip-sliding": (GPT_OSS_20B, skipping("sliding_window"), 32768, (43690, 393216, 2057, 695981, 2)),
    "gpt-oss-skip-one": (GPT_OSS_20B, skipping("0"), 32768, (524288, 32768, 19008, 903823, 24)),
    "gpt-oss-no-hybrid": (GPT_OSS_20B, NO_HYBRID, 32768, (43690, 393216, 2048, 699040, 1)),
    "gpt-oss-block-48": (
        GPT_OSS_20B,
        skipping("sliding_window", block_size=48),
        32768,
        (29127, 589824, 1716, 556196, 2),
    ),
    "gpt-oss-flashinfer": (GPT_OSS_20B, FLASHINFER_128, 32768, (10922, 1572864, 515, 694936, 2)),
    "gpt-oss-packed": (GPT_OSS_20B, skipping("1", layout=Layout.BLHNC), 32768, (40329, 425984, 1541, 857560, 2)),
    "gemma-1b-packed": (GEMMA_3_1B, skipping("5", layout=Layout.BLHNC), 32768, (209715, 81920, 3669, 1872973, 6)),
    "gemma-27b-skip-one": (GEMMA_3_27B, skipping("0"), 16384, (131072, 131072, 32308, 66469, 62)),
    "gemma-27b-no-hybrid": (GEMMA_3_27B, NO_HYBRID, 16384, (4228, 4063232, 1024, 67648, 1)),
    "mistral-bf16": (MISTRAL_7B, BF16, 32768, (8192, 2097152, 1281, 209551, 1)),
    "command-r": (COMMAND_R7B, skipping("sliding_window"), 32768, (32768, 524288, 4867, 220616, 4)),
    "llama-4": (LLAMA_4_SCOUT, FP8, 65536, (43690, 393216, 8704, 328960, 4)),
    "deepseek": (DEEPSEEK_V3, skipping("0", "1", "59", "60"), 32768, (7169, 2396160, 512, 458816, 1)),
    "deepseek-block-16": (DEEPSEEK_V3, skipping("30", block_size=16), 32768, (15033, 1142784, 1024, 481056, 1)),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures(name: str) -> None:
    stack, settings, length, (num_blocks, bytes_per_block, needed, tokens, num_groups) = FIGURES[name]
    capacity = started(stack, settings, at(length))
    assert capacity.num_blocks == num_blocks
    assert capacity.pool.bytes_per_block == bytes_per_block
    assert capacity.blocks_per_request == needed
    assert capacity.reported_tokens == tokens
    assert capacity.max_concurrency == num_blocks / needed
    assert capacity.pool.num_groups == num_groups


@pytest.mark.parametrize(("prefix_caching", "tokens"), [(True, 1_256_749), (False, 1_314_752)])
def test_a_recurrent_hybrid_keeps_a_second_state_for_prefix_caching(prefix_caching: bool, tokens: int) -> None:
    settings = PoolSettings(cache_dtype=CacheDtype.FP8, prefix_caching=prefix_caching)
    assert started(QWEN3_NEXT, settings, at(65536)).reported_tokens == tokens


def test_the_smallest_memory_that_serves_one_request() -> None:
    enough = 257 * 1048576
    assert started(LLAMA_8B, FP8, at(4096, enough)).reported_tokens == 4112
    short = refused(LLAMA_8B, FP8, at(4096, enough - 1))
    assert (short.error_type, short.reason) == ("ValueError", Reason.REQUEST)
    assert "the longest that fits is 4,080" in short.detail
    assert refused(LLAMA_8B, FP8, at(4096, 0)).reason is Reason.MEMORY


def test_the_longest_context_that_fits_is_found() -> None:
    capacity = started(GPT_OSS_20B, BF16, at(None, GIB))
    assert (capacity.max_model_len, capacity.reported_tokens) == (27_136, 27_145)
    assert started(LLAMA_8B, FP8, at(None, 64 * GIB)).max_model_len == 131_072
    assert refused(LLAMA_8B, FP8, at(None, 1048576)).reason is Reason.LENGTH


def test_a_given_number_of_blocks() -> None:
    limits = ServingLimits(16 * GIB, 32768, num_gpu_blocks_override=5000)
    assert started(GPT_OSS_20B, FP8, limits).reported_tokens == 53_177


REFUSALS = {
    "full-layer": (GPT_OSS_20B, skipping("1"), "AssertionError", Reason.PADDED_PAGE),
    "sliding-and-full": (GPT_OSS_20B, skipping("sliding_window", "1"), "AssertionError", Reason.PADDED_PAGE),
    "partial-no-hybrid": (
        MISTRAL_7B,
        skipping("0", "1", hybrid_manager=HybridManager.OFF),
        "ValueError",
        Reason.NOT_PROMOTED,
    ),
    "states-no-hybrid": (QWEN3_NEXT, NO_HYBRID, "ValueError", Reason.NOT_PROMOTED),
    "heads-outermost": (GPT_OSS_20B, skipping("0", layout=Layout.BHLNC), "ValueError", Reason.LAYOUT),
    "padded-heads": (
        MISTRAL_7B,
        skipping("sliding_window", layout=Layout.BHLNC),
        "AssertionError",
        Reason.LAYOUT_PADDING,
    ),
    "odd-block": (LLAMA_8B, skipping(block_size=24), "ValueError", Reason.BLOCK_SIZE),
    "chunked-hybrid": (
        LLAMA_4_SCOUT,
        PoolSettings(hybrid_manager=HybridManager.ON, allow_chunked_hybrid=False),
        "ValueError",
        Reason.HYBRID_MANAGER,
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    stack, settings, error_type, reason = REFUSALS[name]
    refusal = refused(stack, settings, at(16384))
    assert (refusal.error_type, refusal.reason) == (error_type, reason)
    assert refusal.text == f"{reason.value}: {refusal.detail}"


def test_words_that_match_nothing_still_lengthen_the_block() -> None:
    """The engine ignores the word and not the list."""
    for word in ("99", "-1", "full_attention", "01"):
        capacity = started(GPT_OSS_20B, skipping(word), at(32768))
        assert capacity.pool.rules.block_size == 32
        assert {page.dtype for group in capacity.pool.groups for page in group.pages} == {CacheDtype.FP8}


def test_a_model_without_a_cache_has_one_block_and_no_figures() -> None:
    capacity = started(stack_of([CachelessLayer()]), FP8, at(8192))
    assert (capacity.num_blocks, capacity.reported_tokens, capacity.tokens_by_blocks) == (1, 0, 0)


def test_the_line_before_0_21_counts_blocks() -> None:
    """gpt-oss-20b in BF16: two groups of 16-token blocks, whatever the context."""
    for length in (4096, 32768):
        assert started(GPT_OSS_20B, BF16, at(length)).tokens_by_blocks == 43690 // 2 * 16


def sparse(attention: EngineLayer, index: EngineLayer, num_layers: int) -> LayerStack:
    return LayerStack.of_places(
        ((place, cache) for place in range(num_layers) for cache in (attention, index)), num_layers
    )


DEEPSEEK_V3_2 = sparse(MlaLayer(576, sparse=True), IndexLayer(132), 61)


@pytest.mark.parametrize(("settings", "row_bytes"), [(BF16, 2 * 576), (FP8, 656), (skipping("99"), 656)])
def test_a_sparse_latent_keeps_its_keys_beside_its_rows(settings: PoolSettings, row_bytes: int) -> None:
    """FP8 rows are packed with their scales, 656 bytes; the keys of the index are 132 in either case."""
    capacity = started(DEEPSEEK_V3_2, settings, at(32768))
    block = 128 if settings.skip_layers else 64
    assert capacity.pool.rules.block_size == block
    assert capacity.pool.bytes_per_block == 61 * block * (row_bytes + 132)
    assert capacity.pool.num_groups == 1


def test_sparse_layers_take_blocks_that_their_index_takes() -> None:
    assert refused(DEEPSEEK_V3_2, skipping(block_size=32), at(32768)).reason is Reason.BLOCK_SIZE
    minimax = sparse(FullLayer(4, 128, 128), IndexLayer(256), 57)
    assert started(minimax, BF16, at(32768)).pool.rules.block_size == 128
    assert refused(minimax, skipping(block_size=64), at(32768)).reason is Reason.BLOCK_SIZE


def test_sparse_rows_in_blocks_of_all_layers_are_not_modelled() -> None:
    with pytest.raises(UnsupportedModel, match="rows of a sparse index"):
        allocate(DEEPSEEK_V3_2, skipping(layout=Layout.BLNHC), at(32768))


def test_states_beside_latents_take_blocks_of_128_and_more() -> None:
    """Kimi-K3 on one of 16 ranks: 3 · 128 tokens of 576 · 2 bytes hold a state, and a log says 384."""
    state_bytes = 2 * 3 * 3 * 6 * 128 + 4 * 6 * 128 * 128
    stack = stack_of(MlaLayer(576) if place % 4 == 3 else StateLayer(state_bytes) for place in range(92))
    capacity = started(stack, BF16, at(32768))
    assert capacity.pool.rules.block_size == 384
