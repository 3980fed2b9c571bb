from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvtriage.cli.plan.answer import Question, serve_words
from kvtriage.cli.plan.engine_flags import EngineFlags
from kvtriage.cli.plan.question import Asked, open_question
from kvtriage.errors import StudyError
from kvtriage.kvcache.allocator import Backend, SpeculativeMethod
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.support.cautions import Severity
from kvtriage.kvcache.versions import EngineVersion
from tests.unit.cli.plan.plans import asked
from tests.unit.kvcache.readers.configs import GPT_OSS_20B, LLAMA


def question(how: Asked, config: Mapping[str, object] = GPT_OSS_20B) -> Question:
    return open_question(config, None, how)


def test_the_longest_context_is_the_longest_request() -> None:
    found = question(asked(contexts=("100,4096",)))
    assert found.args.max_model_len == 4096
    assert "max_model_len = 4,096 (the longest --context)" in found.said


def test_without_a_context_it_is_the_models_own() -> None:
    found = question(asked(contexts=()))
    assert found.args.max_model_len == 131_072
    assert "max_model_len = 131,072 (the longest that the model reads)" in found.said


@pytest.mark.parametrize(
    ("stated", "gpu", "served"),
    [("bfloat16", None, "bfloat16"), ("float16", "h100", "float16"), ("bfloat16", "t4", "float16")],
)
def test_an_unquantised_cache_is_served_in_the_models_own_dtype(stated: str, gpu: str | None, served: str) -> None:
    """An explicit --kv-cache-dtype wins, so a float16 model must not be told bfloat16."""
    found = question(asked(scaling="native", gpu=gpu), {**LLAMA, "torch_dtype": stated})
    assert serve_words(found)[:2] == ("--kv-cache-dtype", served)


def test_what_is_typed_is_not_assumed() -> None:
    typed = EngineFlags(max_model_len=65_536, max_num_batched_tokens=2048, async_scheduling=False)
    found = question(asked(scaling="per_head", engine=typed))
    assert (found.args.max_model_len, found.args.max_num_batched_tokens) == (65_536, 2048)
    assert found.assumed == ()


@pytest.mark.parametrize(("length", "sentence"), [(131_073, "is beyond the 131,072"), (4096, "does not fit")])
def test_a_length_that_cannot_be(length: int, sentence: str) -> None:
    with pytest.raises(StudyError, match=sentence):
        question(asked(engine=EngineFlags(max_model_len=length)))


def test_a_gpu_decides_batch_and_backend() -> None:
    found = question(asked(gpu="l4", scaling="unit"), LLAMA)
    assert found.args.max_num_batched_tokens == 2048
    assert found.args.attention_backend is not Backend.FLASH_ATTN
    assert any("attention_backend" in said for said in found.said)


def test_a_gpu_without_scales_per_head_gets_one_for_each_tensor() -> None:
    found = question(asked(gpu="l4"), LLAMA)
    assert found.policy.scaling is Scaling.PER_TENSOR
    assert any(said.startswith("scaling = per_tensor") for said in found.chosen)
    assert question(asked(gpu="h100"), LLAMA).policy.scaling is Scaling.PER_HEAD
    assert question(asked(gpu="l4", scaling="per_head"), LLAMA).policy.scaling is Scaling.PER_HEAD


@pytest.mark.parametrize("gpu", [None, "h100"])
def test_a_backend_without_scales_per_head_is_not_asked_for_them(gpu: str | None) -> None:
    found = question(asked(gpu=gpu, engine=EngineFlags(attention_backend=Backend.TRITON_ATTN)), LLAMA)
    assert found.policy.scaling is Scaling.PER_TENSOR
    assert "scaling = per_tensor (TRITON_ATTN takes no scale for each head)" in found.chosen
    assert not any(finding.severity is Severity.REFUSED for finding in found.findings)


def test_where_the_scaling_decides_the_backend_it_is_said() -> None:
    by_default, typed = question(asked(gpu="b200"), LLAMA), question(asked(gpu="b200", scaling="unit"), LLAMA)
    assert by_default.args.attention_backend is Backend.FLASH_ATTN
    assert typed.args.attention_backend is Backend.FLASHINFER
    assert "unit and per_tensor get FLASHINFER on B200" in by_default.chosen[0]
    assert "FLASHINFER" not in question(asked(gpu="h100"), LLAMA).chosen[0]


def test_ngrams_turn_asynchronous_scheduling_off() -> None:
    typed = EngineFlags(num_speculative_tokens=2, speculative_method=SpeculativeMethod.NGRAM)
    assert not question(asked(engine=typed)).args.async_scheduling


def test_memory_from_a_gpu_is_a_band() -> None:
    memory = question(asked(memories=(), gpu="h100-80g", weights_gib="13")).memory
    assert memory is not None
    assert memory.band is not None
    assert memory.band.low_bytes < memory.available_bytes == memory.band.likely_bytes < memory.band.high_bytes


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (asked(weights_gib="13", gpu="h100"), "both say how much memory"),
        (asked(memories=(), weights_gib="13"), "needs a --gpu"),
        (asked(utilization=0.9), "says nothing without --weights-gib"),
        (asked(memories=("1GiB", "2GiB")), "more than once"),
        (asked(memories=(), weights_gib="71.5", gpu="h100"), "likely to get nothing"),
    ],
)
def test_memories_that_contradict_each_other(how: Asked, sentence: str) -> None:
    with pytest.raises(StudyError, match=sentence):
        question(how)


def test_an_older_release_is_noted() -> None:
    found = question(asked(skip="sliding_window", engine=EngineFlags(version=EngineVersion(0, 30))))
    assert any("pages of skipped layers" in note for note in found.notes)
