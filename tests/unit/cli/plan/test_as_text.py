from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtriage.cli.plan.answer import PlanAnswer
from kvtriage.cli.plan.as_markdown import render_markdown
from kvtriage.cli.plan.as_text import describe_layers, render_plan
from kvtriage.cli.plan.engine_flags import EngineFlags
from kvtriage.errors import KvtriageError
from kvtriage.kvcache.prices.causes import CAUSE_WORDS, CauseKind
from kvtriage.kvcache.prices.explain import Explanation
from kvtriage.kvcache.spec import CacheSpec, IndexKeys, LayerKind, LayerSpec, StateTensor
from kvtriage.kvcache.versions import EngineVersion
from tests.unit.cli.plan.plans import answer_of, asked
from tests.unit.kvcache.models import layer, spec_of
from tests.unit.kvcache.readers.configs import GEMMA3_27B, GPT_OSS_20B, LLAMA
from tests.unit.kvcache.readers.latent_configs import DEEPSEEK_V32
from tests.unit.kvcache.readers.recurrent_configs import NEMOTRON_NANO

STATE = StateTensor("s", (4, 4), 4)


def text_of(config: Mapping[str, object] = GPT_OSS_20B, **how: Any) -> str:
    return render_plan(answer_of(config, asked(**how)))


def story() -> PlanAnswer:
    return answer_of(GPT_OSS_20B, asked(skip="sliding_window"))


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_three_prices_and_the_line_of_gpt_oss() -> None:
    text = text_of(skip="sliding_window")
    for row in (
        "held in decode 771.0 MiB 385.5 MiB 387.0 MiB",
        "reserved for it 1,155.4 MiB 577.7 MiB 771.4 MiB",
        "reported tokens 464,665 929,341 695,981",
        "32,768 / 8,192 / async 929,341 695,981 25.1% 0.4%",
        "131,072 / 2,048 / no async 1,375,099 1,352,831 1.6% 0.1%",
        "GPU KV cache size: 695,981 tokens, Maximum concurrency for 32,768 tokens per request: 21.24x",
    ):
        assert row in flat(text)


def test_without_memory_what_was_assumed_of_the_policy_is_said_and_of_the_engine_is_not() -> None:
    text = flat(text_of(memories=()))
    assert "assumed: scaling = per_head (--scaling unit needs no checkpoint with scales)" in text
    assert "max_num_batched_tokens" not in text
    assert "assumed:" not in text_of(memories=(), scaling="unit")


@pytest.mark.parametrize(
    ("how", "version", "device"),
    [
        ({"gpu": "cpu"}, None, "CPU"),
        ({"gpu": "xpu"}, None, "XPU"),
        ({"gpu": "mi300x"}, None, "GPU"),
        ({"gpu": "cpu"}, EngineVersion(0, 31), "GPU"),
    ],
)
def test_the_line_names_the_device_as_the_release_does(
    how: dict[str, Any], version: EngineVersion | None, device: str
) -> None:
    text = text_of(LLAMA, **how, engine=EngineFlags(version=version))
    assert f" {device} KV cache size: " in flat(text)


def test_why_the_line_loses_more_than_the_bytes() -> None:
    text = flat(text_of(skip="sliding_window"))
    assert "it reserves for the tokens in flight too (16,384, or the whole request where that is shorter)" in text
    assert "in BF16 each of those takes twice the bytes" in text


def test_a_skip_that_gains_is_not_told_how_to_become_cheap() -> None:
    """66,469 tokens with layer 0 in BF16, and 59,867 with all in FP8: the groups come out without padding."""
    text = flat(text_of(GEMMA3_27B, skip="0", contexts=("16384",)))
    assert "16,384 / 8,192 / async 59,867 66,469 -11.0%" in text
    assert "the engine reports more than with all in FP8" in text
    assert "twice the bytes" not in text


@pytest.mark.parametrize("context", ["8192", "32768", "131072"])
def test_what_the_skip_holds_more_follows_from_the_row_above(context: str) -> None:
    answer = answer_of(GEMMA3_27B, asked(skip="sliding_window", contexts=(context,), memories=("64GiB",)))
    assert answer.engine is not None
    fp8, policy = answer.engine.fp8, answer.engine.policy
    assert isinstance(fp8, Explanation)
    assert isinstance(policy, Explanation)
    more = policy.held.reserved_bytes / fp8.held.reserved_bytes - 1
    assert answer.engine.skip_costs[0].held_share == more
    assert f"{more:.1%}" in render_plan(answer)


def test_a_skip_that_costs_next_to_nothing_needs_no_reason() -> None:
    lean = EngineFlags(max_num_batched_tokens=512, async_scheduling=False)
    text = flat(text_of(skip="0", contexts=("131072",), engine=lean))
    assert "What the skip costs" in text
    assert "twice the bytes" not in text


def test_a_third_state_for_a_step_is_the_engines_own_doing() -> None:
    how: dict[str, Any] = {"contexts": ("32768",)}
    words = "its prefill holds a third for a step"
    assert words in flat(text_of(NEMOTRON_NANO, **how))
    assert words in render_markdown(answer_of(NEMOTRON_NANO, asked(**how)))
    assert words not in flat(text_of(NEMOTRON_NANO, engine=EngineFlags(async_scheduling=False), **how))
    assert words not in flat(text_of(NEMOTRON_NANO, engine=EngineFlags(enable_prefix_caching=False), **how))
    assert words not in flat(text_of(skip="sliding_window"))


def test_scales_that_the_engine_computes_are_asked_of_no_checkpoint() -> None:
    """FLASHMLA_SPARSE packs FP8 with scales of its own, whatever the checkpoint brings."""
    for gpu, reads in (("h100-80g", False), ("b200", True), (None, True)):
        assert ("with a checkpoint that holds the scales" in text_of(DEEPSEEK_V32, gpu=gpu)) == reads, gpu


def test_the_first_screen_is_the_answer() -> None:
    screen = text_of(skip="sliding_window").splitlines()[:24]
    for word in ("GPU KV cache size: 695,981", "reserved for it", "929,341", "25.1%      0.4%", " 1.6%"):
        assert any(word in line for line in screen), word


def test_every_byte_is_explained_on_demand() -> None:
    short, long = text_of(skip="sliding_window"), flat(render_plan(story(), in_full=True))
    for row in (
        "K and V of 32,768 tokens 387.0 MiB 1,387,263",
        "+ tokens in flight 384.0 MiB -690,912",
        "= reported 695,981",
        "blocks reserved 3,081 3,081 2,057",
        "source: platforms/cuda.py",
    ):
        assert row in long
        assert row not in flat(short)
    assert "--explain says where every byte goes." in short
    assert long.count("+33.1%") == 2


def test_what_is_refused_prints_no_line_and_nothing_to_paste() -> None:
    """Also where the backends refuse what the allocator would take."""
    for text in (text_of(skip="1"), text_of(gpu="a100-80g", scaling="per_head")):
        assert flat(text).count("vLLM would not start") == 1
        assert text.index("vLLM would not start") < text.index("held in decode")
        assert "GPU KV cache size" not in text
        assert "vllm serve" not in text


def test_figures_of_what_the_backends_refuse_are_told_as_such() -> None:
    assert "tokens, if it started" in flat(text_of(gpu="a100-80g", scaling="per_head"))
    assert "if it started" not in text_of(gpu="h100-80g")


def test_a_release_whose_line_ignores_the_settings_is_told_one_price_of_the_skip() -> None:
    text = text_of(skip="sliding_window", engine=EngineFlags(version=EngineVersion(0, 20)))
    assert flat(text).count(" 50.0% ") == 1
    assert "Fewer in flight" not in text
    assert "At its start vLLM 0.20.0 may print (it is modelled in part, see below)" in text


def test_a_request_is_no_longer_than_the_server_takes() -> None:
    """--max-model-len alone says how long the request is whose prices stand side by side; so does what auto finds."""
    assert "one request of 8,192 tokens" in text_of(contexts=(), engine=EngineFlags(max_model_len=8192))
    found = text_of(contexts=(), memories=("100MiB",), engine=EngineFlags(max_model_len=-1))
    assert "one request of 4,240 tokens" in found
    assert "the longest that fits is" not in found


def test_blocks_that_are_given_are_not_compared() -> None:
    """The same number of larger blocks is not the same memory."""
    answer = answer_of(GPT_OSS_20B, asked(skip="sliding_window", engine=EngineFlags(num_gpu_blocks_override=10_000)))
    assert answer.engine is not None
    assert (answer.engine.trades, answer.engine.skip_costs) == ((), ())


def test_a_checkpoint_that_vllm_does_not_load_is_not_served() -> None:
    scheme = {"num_bits": 4, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config = {**LLAMA, "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}}
    answer = answer_of(config, asked(contexts=("4096",)))
    assert answer.question.declared.refused
    assert not answer.starts
    assert "vLLM does not load this checkpoint" in render_plan(answer)


def test_small_batches_alone_bound_the_requests() -> None:
    text = flat(render_plan(story(), in_full=True))
    assert "chunks of 512, and no more requests than that run at once" in text
    assert "--max-num-batched-tokens 2048 prompts are read in chunks of 2,048 " in text


def test_before_0_21_the_line_is_two() -> None:
    text = text_of(skip=None, engine=EngineFlags(version=EngineVersion(0, 20)))
    assert "\n  GPU KV cache size: 699,040 tokens\n  Maximum concurrency for 32,768 tokens" in text


def test_without_memory_the_engine_is_not_asked() -> None:
    text = text_of(memories=())
    assert "At its start" not in text
    assert "max_num_batched_tokens" not in text


def test_the_flags_to_paste_are_those_that_print_the_line() -> None:
    text = text_of(skip="sliding_window", engine=EngineFlags(async_scheduling=False, max_num_batched_tokens=2048))
    assert (
        "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers sliding_window --attention-backend FLASH_ATTN "
        "--max-model-len 32768 --max-num-batched-tokens 2048 --no-async-scheduling"
    ) in flat(text)


def test_ranks_are_told() -> None:
    text = flat(text_of(engine=EngineFlags(tensor_parallel_size=16)))
    assert "On each of 16 ranks" in text
    assert "12 sliding layers: 1 of 8 KV heads, each on 2 ranks" in text


def test_a_band_is_told_as_one() -> None:
    text = flat(text_of(memories=(), gpu="h100", weights_gib="13"))
    assert "A band, not a promise" in text
    assert "at worst likely at best - weights 13.0 GiB 13.0 GiB 13.0 GiB" in text
    assert "would print about GPU KV cache size: 2,800,000 to 3,500,000, likely 3,300,000 tokens" in text
    assert "Maximum concurrency for 32,768 tokens per request: 86 to 110, likely 100" in text
    assert "one request of 32,768 tokens; tokens are rounded" in text
    tokens = [int(word.replace(",", "")) for word in text.partition("reported tokens ")[2].split()[:3]]
    assert tokens == sorted(tokens)


def test_no_figure_of_a_band_has_more_than_two_digits() -> None:
    how = asked(memories=(), gpu="h100", weights_gib="13", skip="sliding_window")
    text = render_plan(answer_of(GPT_OSS_20B, how), in_full=True)
    told = [
        line for line in text.splitlines() if line.startswith(("  reported tokens", "  = reported  ", "  blocks   "))
    ]
    assert len(told) == 4
    for word in " ".join(told).split():
        assert len(word.replace(",", "").rstrip("0")) <= 2 or not word[0].isdigit(), word


def test_a_band_whose_worst_does_not_start_says_so() -> None:
    text = flat(text_of(memories=(), gpu="h100", weights_gib="63", engine=EngineFlags(max_model_len=131_072)))
    assert "GPU KV cache size: up to " in text
    assert "at worst it would not start for want of memory" in text


def test_the_same_refusal_is_not_told_of_each_policy() -> None:
    text = flat(text_of(contexts=(), memories=("1GiB",)))
    assert text.count("would not start") == 1


def test_every_cause_has_words() -> None:
    assert set(CAUSE_WORDS) == set(CauseKind)


LENGTHS = st.integers(1, 131_072)


@example(1, "0-23", 1, "1KiB")
@given(
    LENGTHS,
    st.sampled_from(["sliding_window", "0", "1,3", "0-23"]),
    st.integers(1, 10**6),
    st.sampled_from(["1KiB", "9GiB"]),
)
def test_the_text_fits_80_columns(context_len: int, skip: str, batched: int, memory: str) -> None:
    text = text_of(
        contexts=(str(context_len), "1"),
        skip=skip,
        memories=(memory,),
        engine=EngineFlags(max_num_batched_tokens=batched, num_speculative_tokens=0),
    )
    assert max(map(len, text.splitlines())) <= 80
    assert text.endswith("\n")
    assert text.isascii()


def test_the_text_of_a_long_list_of_layers_fits_80_columns() -> None:
    config = {**LLAMA, "num_hidden_layers": 126}
    text = text_of(config, contexts=("1000",), skip=",".join(map(str, range(0, 126, 2))), scaling="unit", memories=())
    assert max(map(len, text.splitlines())) <= 80
    assert "--kv-cache-dtype-skip-layers 0 2 4" in text


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (spec_of(layer(0), layer(1, 4)), "1 full, 1 sliding over 4 tokens"),
        (
            CacheSpec("m", (LayerSpec(0, LayerKind.STATE, 0, 0, 0, 0, beside=(STATE,)), layer(1)), 9),
            "1 full, 1 recurrent",
        ),
        (
            CacheSpec("m", (LayerSpec(0, LayerKind.FULL, 2, 2, 4, 4, beside=(STATE,)),), 9),
            "1 full, 1 of them with a recurrent state",
        ),
        (
            CacheSpec("m", (LayerSpec(0, LayerKind.LATENT, 2, 1, 4, 0, beside=(IndexKeys(132),)),), 9),
            "1 latent, 1 of them with an index",
        ),
        (
            CacheSpec("m", (layer(0), LayerSpec(1, LayerKind.FULL, 8, 2, 16, 16, shares_with=0)), 9),
            "1 full, 1 that read an earlier layer's cache",
        ),
        (
            CacheSpec("m", (LayerSpec(0, LayerKind.CROSS, 2, 2, 4, 4, encoder_tokens=1500),), 9),
            "1 cross attention to 1,500 positions",
        ),
        (
            CacheSpec("m", (LayerSpec(0, LayerKind.CHUNKED, 2, 2, 4, 4, 8192), layer(1)), 9),
            "1 full, 1 chunked by 8,192 tokens",
        ),
        (CacheSpec("m", (LayerSpec(0, LayerKind.NONE, 0, 0, 0, 0), layer(1)), 9), "1 full, 1 without attention"),
    ],
)
def test_layers_in_words(spec: CacheSpec, words: str) -> None:
    assert describe_layers(spec) == words


def test_a_skip_of_full_layers_alone_is_explained_without_windows() -> None:
    text = text_of(LLAMA, contexts=("4096",), skip="0")
    assert "A layer with a window" not in text


def test_a_model_error_is_no_answer() -> None:
    with pytest.raises(KvtriageError):
        text_of({"architectures": ["LlamaForCausalLM"]})
