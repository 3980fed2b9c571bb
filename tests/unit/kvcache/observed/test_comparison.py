from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.kvcache.allocator import Backend, Capacity
from kvtriage.kvcache.engine_args import EngineArgs, reserve
from kvtriage.kvcache.observed.account import LOG, Observed, Reported, Settings
from kvtriage.kvcache.observed.comparison import Comparison, Outcome, compare
from kvtriage.kvcache.observed.identity import AskedModel
from kvtriage.kvcache.observed.reading import read_observed
from kvtriage.kvcache.observed.settings import Origin
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import LayerKind, LayerSpec
from kvtriage.units import GIB
from tests.unit.kvcache.models import spec_of
from tests.unit.kvcache.readers.configs import GPT_OSS_20B, LLAMA
from tests.unit.kvcache.server_logs import METRICS, NEW

SPEC = read_cache_spec(GPT_OSS_20B)
SKIP = CachePolicy.fp8(24, Scaling.UNIT, range(0, 24, 2))


def read(text: str) -> Observed:
    observed = read_observed(text.splitlines())
    assert observed is not None
    return observed


def ask(text: str, **given: object) -> Comparison:
    return compare(SPEC, read(text), flags=given)


def page_of(args: EngineArgs) -> str:
    """A page of metrics as that server would have it."""
    capacity = reserve(SPEC, SKIP, args, 16 * GIB)
    assert isinstance(capacity, Capacity)
    tokens, concurrency = str(capacity.reported_tokens), repr(capacity.max_concurrency)
    return METRICS.replace("695981", tokens).replace("21.239669421487605", concurrency)


def test_the_line_agrees_within_the_rounding_of_the_memory() -> None:
    assert ask(NEW).outcome is Outcome.AGREES
    (tokens, concurrency) = ask(NEW).figures
    assert (tokens.low, tokens.high) == (695_774, 696_204)
    assert concurrency.agrees


def test_a_token_outside_the_band_differs() -> None:
    assert ask(NEW.replace("695,981", "696,205")).outcome is Outcome.DIFFERS


def test_a_server_that_barely_started_agrees_though_a_little_less_would_have_been_refused() -> None:
    """2,058 blocks for the 2,057 of one request: 0.7537 GiB, and 0.75 is printed."""
    barely = NEW.replace("16.0 GiB", "0.75 GiB").replace("695,981", "32,783").replace("21.24x", "1.00x")
    found = ask(barely)
    assert found.outcome is Outcome.AGREES
    assert found.figures[0].low == 32_783
    assert ask(barely.replace("32,783", "32,782")).outcome is Outcome.DIFFERS


def test_a_setting_whose_other_values_are_not_modelled_stays_open() -> None:
    """A drafter beside decode context parallelism; the file does not say that there is none. 56 blocks, 32 each."""
    latent = LayerSpec(0, LayerKind.LATENT, 128, 1, 576, 0)
    spec = replace(spec_of(latent), draft_layers=(replace(latent, layer_idx=1),))
    ranks = Settings("0.32.0", max_model_len=4096, tensor_parallel_size=8, decode_context_parallel_size=8)
    found = compare(spec, Observed(LOG, ranks, Reported(available_bytes=2**20, kv_cache_tokens=(7168,))), flags={})
    assert found.outcome is Outcome.AGREES
    assert "num_speculative_tokens" in {setting.name for setting in found.settings}


def test_auto_is_what_the_checkpoint_makes_of_it() -> None:
    plain = NEW.replace("'kv_cache_dtype': 'fp8', 'kv_cache_dtype_skip_layers': ['sliding_window'], ", "")
    plain = plain.replace("kv_cache_dtype=fp8", "kv_cache_dtype=auto").replace("Using fp8", "Using no")
    as_fp8 = plain.replace("695,981", "929,341").replace("21.24x", "28.36x")
    assert compare(SPEC, read(as_fp8), flags={}, auto="fp8_e4m3").outcome is Outcome.AGREES
    assert compare(SPEC, read(as_fp8), flags={}).outcome is Outcome.DIFFERS
    found = compare(SPEC, read(as_fp8), flags={}, auto="nvfp4")
    assert (found.outcome, found.because) == (Outcome.UNKNOWN, ("pages of kv_cache_dtype nvfp4 are not modelled",))


def test_a_list_that_skips_nothing_is_not_taken_for_none() -> None:
    found = ask(NEW.replace("['sliding_window']", "['99']"))
    assert found.outcome is Outcome.UNKNOWN
    assert "skips nothing and lengthens the block" in found.because[0]


def test_a_cpu_is_known_by_its_line() -> None:
    """Blocks of 128 tokens, and one batch in flight, though no line says either."""
    args = EngineArgs(max_model_len=32_768, attention_backend=Backend.CPU_ATTN)
    capacity = reserve(SPEC, CachePolicy.fp8(24, Scaling.UNIT), args, 16 * GIB)
    assert isinstance(capacity, Capacity)
    printed = f"CPU KV cache size: {capacity.reported_tokens:,} tokens, "
    text = NEW.replace("GPU KV cache size: 695,981 tokens, ", printed).replace("FLASH_ATTN attention", "no attention")
    text = text.replace("21.24x", f"{capacity.max_concurrency:.2f}x").replace("['sliding_window']", "[]")
    assert ask(text).outcome is Outcome.AGREES
    assert ask(text.replace("CPU KV", "GPU KV")).outcome is Outcome.DIFFERS


def test_a_cache_of_float32_is_not_taken_for_bf16() -> None:
    text = NEW.replace("dtype=torch.bfloat16", "dtype=torch.float32").replace(
        "kv_cache_dtype=fp8", "kv_cache_dtype=auto"
    )
    text = text.replace("'kv_cache_dtype': 'fp8', ", "").replace("Using fp8", "Using no")
    assert ask(text).outcome is Outcome.UNKNOWN
    assert "float32" in ask(text).because[0]


def test_settings_that_would_explain_it_are_named() -> None:
    found = ask(NEW.replace("695,981", "926,623").replace("21.24x", "28.28x"))
    assert found.outcome is Outcome.DIFFERS
    assert (("async_scheduling", "off"),) in [change.settings for change in found.changes]
    assert "+230,642 tokens (+33.1%)" in found.because[-1]


def test_what_nobody_states_leaves_it_open() -> None:
    page = page_of(EngineArgs(max_model_len=32768, async_scheduling=False))
    found = ask(page)
    assert found.outcome is Outcome.UNKNOWN
    assert "async_scheduling" in {setting.name for setting in found.settings if setting.origin is Origin.ASSUMED}
    assert (("async_scheduling", "off"),) in [change.settings for change in found.changes]
    assert ask(page, async_scheduling=False).outcome is Outcome.AGREES


@pytest.mark.parametrize("dtype", ['cache_dtype="fp8",', ""])
def test_what_leaves_it_open_is_named_with_the_flag_that_states_it(dtype: str) -> None:
    page = page_of(EngineArgs(max_model_len=32768, async_scheduling=False)).replace('cache_dtype="fp8",', dtype)
    found = ask(page)
    assert found.outcome is Outcome.UNKNOWN
    assumed = {each.name for each in found.settings if each.origin is Origin.ASSUMED}
    said = [reason for reason in found.because if " is assumed, and other values give other figures: give --" in reason]
    assert {reason.split()[0] for reason in said} == assumed
    assert "async_scheduling" in assumed


def with_class(architecture: str) -> str:
    return f"INFO 11-02 09:14:08 [model.py:733] Resolved architecture: {architecture}\n{NEW}"


def test_a_log_of_another_model_is_not_compared() -> None:
    asked = AskedModel("gpt-oss-20b", ("GptOssForCausalLM",), "bfloat16")
    found = compare(SPEC, read(with_class("LlamaForCausalLM")), flags={}, model=asked)
    assert (found.outcome, found.figures, found.changes) == (Outcome.UNKNOWN, (), ())
    assert "these are two models" in found.because[0]
    assert {each.origin for each in found.settings} == {Origin.FILE}
    assert compare(SPEC, read(with_class("GptOssForCausalLM")), flags={}, model=asked).outcome is Outcome.AGREES


def test_a_name_of_another_model_makes_a_difference_open() -> None:
    asked = AskedModel("gpt-oss-120b", ("GptOssForCausalLM",), "bfloat16")
    agreeing = compare(SPEC, read(NEW), flags={}, model=asked)
    assert agreeing.outcome is Outcome.AGREES
    assert "openai/gpt-oss-20b" in agreeing.because[0]
    other = NEW.replace("695,981", "926,623")
    found = compare(SPEC, read(other), flags={}, model=asked)
    assert (found.outcome, found.changes) == (Outcome.UNKNOWN, ())
    assert "whether they are one model" in found.because[0]
    assert compare(SPEC, read(other), flags={}).outcome is Outcome.DIFFERS


def test_a_difference_that_rounds_to_nothing_has_no_sign() -> None:
    found = ask(NEW.replace("695,981", "695,773"))
    assert found.because[-1].startswith("-208 tokens (0.0%)")


def test_two_settings_at_once_are_tried() -> None:
    page = page_of(EngineArgs(max_model_len=32768, async_scheduling=False, max_num_batched_tokens=2048))
    changes = [dict(change.settings) for change in ask(page).changes]
    assert {"async_scheduling": "off", "max_num_batched_tokens": "2048"} in changes


def test_a_flag_that_contradicts_the_file_gives_way_and_is_told() -> None:
    found = ask(NEW, max_model_len=4096)
    assert found.outcome is Outcome.AGREES
    (length,) = [setting for setting in found.settings if setting.name == "max_model_len"]
    assert (length.origin, length.note) == (Origin.FILE, "not 4,096, as the flag says")


def test_only_what_matters_is_called_assumed() -> None:
    llama = read_cache_spec(LLAMA)
    observed = Observed(LOG, Settings(version="0.32.0", max_model_len=4096), Reported(num_gpu_blocks=(1000,)))
    found = compare(llama, observed, flags={}, policy=CachePolicy.native(llama.num_layers))
    assert "max_num_batched_tokens" not in {setting.name for setting in found.settings}


@pytest.mark.parametrize(
    ("old", "new", "because"),
    [
        ("'kv_cache_dtype': 'fp8'", "'kv_cache_dtype': 'nvfp4'", "pages of kv_cache_dtype nvfp4 are not modelled"),
        ("0.32.0", "0.1.dev20073", "give --vllm-version"),
        ("'max_model_len'", "'kv_transfer_config': {'kv_connector': 'LMCache'}, 'max_model_len'", "LMCache"),
    ],
)
def test_what_cannot_be_predicted_says_why(old: str, new: str, because: str) -> None:
    text = NEW.replace(old, new).replace(
        "kv_cache_dtype=fp8", f"kv_cache_dtype={new.split()[-1]}" if "nvfp4" in new else "kv_cache_dtype=fp8"
    )
    found = ask(text.replace("Using fp8 data type", "Using other data type"))
    assert found.outcome is Outcome.UNKNOWN
    assert any(because in reason for reason in found.because)


def test_without_memory_and_blocks_nothing_is_told() -> None:
    log = "\n".join(line for line in NEW.splitlines() if "Available" not in line)
    assert ask(log).outcome is Outcome.UNKNOWN
    assert ask(log).figures == ()
    assert compare(SPEC, read(log), flags={}, available_bytes=16 * GIB).outcome is Outcome.AGREES


def test_a_refusal_is_compared_by_need_and_length() -> None:
    args = EngineArgs(max_model_len=131_072)
    needed = reserve(SPEC, CachePolicy.native(24), args, 2**60)
    longest = reserve(SPEC, CachePolicy.native(24), replace(args, max_model_len=-1), 2 * GIB)
    assert isinstance(needed, Capacity)
    assert isinstance(longest, Capacity)
    need = needed.blocks_per_request * needed.pool.bytes_per_block / GIB
    log = (
        "non-default args: {'model': 'm', 'max_model_len': 131072, 'max_num_batched_tokens': 8192}\n"
        "Initializing a V1 LLM engine (v0.32.0) with config: model='m', max_seq_len=131072, kv_cache_dtype=auto\n"
        f"ValueError: To serve at least one request with the model's max seq len (131072), ({need:.2f} GiB KV cache is "
        "needed, which is larger than the available KV cache memory (2.00 GiB). Based on the available memory, the "
        f"estimated maximum model length is {longest.max_model_len}. "
    )
    found = ask(log)
    assert [figure.name for figure in found.figures] == ["needed GiB", "longest that fits"]
    assert found.outcome is Outcome.AGREES


@given(st.integers(2 * GIB, 80 * GIB), st.sampled_from([4096, 32768, 131072]), st.booleans())
def test_what_the_engine_would_print_agrees(available: int, length: int, is_async: bool) -> None:
    args = EngineArgs(max_model_len=length, async_scheduling=is_async)
    capacity = reserve(SPEC, SKIP, args, available)
    assert isinstance(capacity, Capacity)
    text = (
        f"non-default args: {{'max_model_len': {length}, 'async_scheduling': {is_async}, 'kv_cache_dtype': 'fp8', "
        "'kv_cache_dtype_skip_layers': ['sliding_window'], 'max_num_batched_tokens': 8192}\n"
        "Initializing a V1 LLM engine (v0.32.0) with config: model='m'\n"
        f"Available KV cache memory: {round(available / GIB, 2)} GiB\n"
        f"GPU KV cache size: {capacity.reported_tokens:,} tokens, Maximum concurrency for {length:,} tokens per "
        f"request: {capacity.max_concurrency:.2f}x\n"
    )
    assert ask(text).outcome is Outcome.AGREES
