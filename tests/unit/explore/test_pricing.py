"""The page's figures are the allocator's own, and add up."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from bench.explorer import hybrid
from kvtriage.explore.front import build_front
from kvtriage.explore.layers import view_model
from kvtriage.explore.policies import engine_args, policy_of
from kvtriage.explore.pricing import answer
from kvtriage.explore.subject import Subject
from kvtriage.kvcache.allocator import Backend
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.prices.explain import Explanation, explain
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.kvcache.support.gpus import find_gpu
from tests.unit.explore.subjects import ask, measured
from tests.unit.kvcache.architectures import DEEPSEEK_V32, EVERY_KIND, QWEN3_NEXT
from tests.unit.kvcache.models import GPT_OSS_20B
from tests.unit.report.cases import gemma_like

GPT_OSS = Subject("gpt-oss-20b", "gpt-oss-20b", GPT_OSS_20B)
SLIDING = ",".join(str(idx) for idx in range(0, 24, 2))


def test_the_figures_are_those_of_the_allocator() -> None:
    choice = ask(GPT_OSS, skip=SLIDING)
    found = answer(GPT_OSS, choice)
    policy = policy_of(GPT_OSS, choice.skip_layers, choice.scaling)
    explained = explain(GPT_OSS_20B, policy, engine_args(GPT_OSS, choice), choice.memory_bytes, choice.context_len)
    assert isinstance(explained, Explanation)
    assert found.held_bytes == explained.held.reserved_bytes
    assert found.reserved_bytes == explained.reserved.reserved_bytes
    assert found.reported_tokens == explained.reported_tokens == 695_981
    assert [column.tokens for column in found.columns] == ["464,665", "929,341", "695,981"]
    assert found.ratio == pytest.approx(1.99225, abs=1e-5)


def test_the_causes_add_up_in_tokens() -> None:
    for subject in (GPT_OSS, Subject("q", "q", QWEN3_NEXT), hybrid(30)):
        causes = answer(subject, ask(subject)).causes
        numbers = [int(cause.tokens.replace(",", "")) for cause in causes if cause.tokens != "-"]
        assert sum(numbers[:-1]) == numbers[-1]
        assert len(causes) <= 6


def test_what_is_held_together_is_compared_with_what_is_admitted() -> None:
    few, many = (answer(GPT_OSS, ask(GPT_OSS, requests=count)) for count in ("1", "100000"))
    assert few.fits
    assert few.load.startswith("1 request of 32,768 tokens holds")
    assert not many.fits
    assert "has only room for" in many.load


def test_the_line_is_quoted_and_whole() -> None:
    subject = Subject("my model; rm -rf", "my model; rm -rf", GPT_OSS_20B)
    found = answer(subject, ask(subject, skip=SLIDING, scaling="unit", tp="2"))
    assert found.serve == (
        "vllm serve 'my model; rm -rf' --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers sliding_window "
        "--max-model-len 32768 --max-num-batched-tokens 8192 --tensor-parallel-size 2 "
        "--kv-cache-memory-bytes 17179869184"
    )


def test_all_layers_kept_is_bf16_with_the_model_itself() -> None:
    subject = Subject("m", "folder", GPT_OSS_20B, models={Scaling.PER_HEAD: "scales"})
    assert "vllm serve scales " in answer(subject, ask(subject)).serve
    native = answer(subject, ask(subject, skip="0-23"))
    assert native.serve.startswith("vllm serve folder --kv-cache-dtype bfloat16 ")
    assert native.ratio == 1


def test_a_refusal_is_said_and_the_rest_stays() -> None:
    starved = answer(GPT_OSS, ask(GPT_OSS, memory="1048576"))
    assert starved.said[0].severity == "refused"
    assert starved.said[0].sentence.startswith("vLLM would not start")
    assert starved.held_bytes is not None
    assert starved.ratio == 2
    assert starved.reported_tokens is None
    assert not starved.fits
    odd = answer(GPT_OSS, ask(GPT_OSS, tp="3"))
    assert odd.said[0].severity == "refused"
    assert [column.tokens for column in odd.columns] == ["refused"] * 3
    assert (odd.held_bytes, odd.ratio, odd.ratio_text) == (None, None, odd.columns[-1].held)


def test_pages_are_the_backends() -> None:
    on_cpu = replace(GPT_OSS, backend=Backend.CPU_ATTN)
    tokens = [answer(subject, ask(subject, scaling="per_tensor")).reported_tokens for subject in (GPT_OSS, on_cpu)]
    assert tokens == [929_341, 1_111_466]


def test_a_set_that_needs_a_flag_is_told_which() -> None:
    """A full layer in BF16 beside sliding ones in FP8."""
    refused = answer(GPT_OSS, ask(GPT_OSS, skip="1")).said[0]
    assert refused.severity == "refused"
    assert "it would with --disable-hybrid-kv-cache-manager" in refused.hint
    assert "it would with" not in answer(GPT_OSS, ask(GPT_OSS, memory="1048576")).said[0].hint


def test_with_one_kv_head_the_per_tensor_checkpoint_is_served() -> None:
    models = {Scaling.PER_HEAD: "per-head", Scaling.PER_TENSOR: "per-tensor"}
    one, many = replace(measured(gemma_like()), models=models), replace(GPT_OSS, models=models)
    assert "vllm serve per-tensor " in answer(one, ask(one, scaling="per_head")).serve
    assert "vllm serve per-head " in answer(many, ask(many, scaling="per_head")).serve


def test_a_gpu_is_asked_what_it_can_do() -> None:
    subject = Subject("m", "m", GPT_OSS_20B, gpu=find_gpu("l4"))
    severities = {said.severity for said in answer(subject, ask(subject)).said}
    assert "refused" in severities


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_every_kind_of_model_has_an_answer(spec: CacheSpec) -> None:
    subject = Subject("m", "m", spec)
    found = answer(subject, ask(subject))
    assert len(found.columns) == 3
    assert found.serve.startswith("vllm serve m ")
    assert view_model(subject).layers


def test_a_cache_that_is_not_modelled_is_said() -> None:
    layer = replace(DEEPSEEK_V32.layers[0], compress_ratio=4)
    subject = Subject("m", "m", replace(DEEPSEEK_V32, layers=(layer, *DEEPSEEK_V32.layers[1:])))
    found = answer(subject, ask(subject))
    assert found.columns == ()
    assert found.toggles == ()
    assert found.said[0].severity == "warned"
    assert build_front(subject, ask(subject)).points == ()


def test_a_case_tells_damage_and_latency() -> None:
    subject = measured(gemma_like())
    found = answer(subject, ask(subject, scaling="unit"))
    assert found.damage is not None
    assert found.latency is not None
    assert found.stored == "18 of 18 layers in FP8"


def test_a_price_for_each_class_of_layers_and_work_that_grows_as_they_do() -> None:
    """Full or sliding, in FP8 or in BF16: four toggles. bench/explorer.py measures whole round trips."""

    def calls(layers: int) -> int:
        subject = hybrid(layers)
        choice = ask(subject, skip=f"0-{layers // 3}")
        with counting_calls() as count:
            assert len(answer(subject, choice).toggles) == 4
        return count[0]

    few, many = calls(200), calls(800)
    assert many < 4.2 * few


@contextmanager
def counting_calls() -> Iterator[list[int]]:
    """Of Python functions and C functions alike, in the block."""
    count = [0]

    def counted(_frame: object, event: str, _what: object) -> None:
        count[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        yield count
    finally:
        sys.setprofile(before)
