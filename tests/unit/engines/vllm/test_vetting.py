"""Everything that is asked of a server before its first trial, and of each that takes its place."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from kvtriage.engines.base import Arm, ScoreRequest
from kvtriage.errors import EngineError, PolicyNotApplied
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.stages.arms import check_applied
from tests.unit.engines.vllm.fleets import attached, player
from tests.unit.engines.vllm.misbehaving.worker import answer_call
from tests.unit.stages.fake_case import hybrid

SPEC = hybrid()
COUNT = SPEC.num_layers
BF16 = Arm("bf16", CachePolicy.native(COUNT))
UNIT = Arm("fp8_unit", CachePolicy.fp8(COUNT, Scaling.UNIT))


@pytest.mark.parametrize("arm", [BF16, UNIT], ids=["bf16", "fp8"])
def test_another_model_of_the_same_name_is_found_by_what_it_says(tmp_path: Path, arm: Arm) -> None:
    right, wrong = player(SPEC, tmp_path, "bfloat16"), player(SPEC, tmp_path, "fp8")
    wrong.sharpness = 20.0
    if arm is BF16:
        wrong.cache_dtype = "bfloat16"
        arm = Arm("fp8_unit", BF16.policy)
    with (
        attached(SPEC, right, wrong) as engine,
        pytest.raises(EngineError, match=r"'fp8_unit' is \d+\.\d nats per token away from BF16"),
        engine.open(BF16),
        engine.open(arm),
    ):
        pass


def test_what_an_earlier_run_left_on_is_switched_off(tmp_path: Path) -> None:
    """A run that was killed while it observed or probed somebody's server."""
    left = player(SPEC, tmp_path, "bfloat16")
    left.probes = {"0": {"format": "fp8", "heads": None, "k": [1.0], "v": [1.0]}}
    answer_call(left, "kvtriage_observe", [True])
    with attached(SPEC, left) as engine, engine.open(BF16):
        assert left.probes == {}
        assert "off" in left.seen


def test_somebodys_server_watches_nothing_after_a_smoke_test_that_failed(tmp_path: Path) -> None:
    one = player(SPEC, tmp_path, "bfloat16")
    one.faults.forgets_prefixes = True
    with (
        attached(SPEC, one) as engine,
        pytest.raises(EngineError, match="once its prefix is in the cache"),
        engine.open(BF16),
    ):
        pass
    watch = [body["args"] for body in one.bodies if body.get("method") == "kvtriage_watch"]
    assert watch == [[True], [False]]
    assert not one.watches


def test_a_server_that_comes_back_as_another_is_refused(tmp_path: Path) -> None:
    native, stored = player(SPEC, tmp_path, "bfloat16"), player(SPEC, tmp_path, "fp8")
    request = ScoreRequest("x", tuple(range(20)), 10)
    with attached(SPEC, native, stored) as engine, engine.open(UNIT) as session:
        assert session.score(request).nll
        stored.skip = ("sliding_window",)
        engine._fleet.restart(UNIT)
        with pytest.raises(PolicyNotApplied, match="'fp8_unit': its server came back with another cache"):
            session.score(request)
        stored.skip = ()
        engine._fleet.restart(UNIT)
        stored.extension = False
        with pytest.raises(PolicyNotApplied, match="'fp8_unit': its server came back"):
            session.score(request)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": "0.31.0"}, r"has version 0\.31\.0, and that of another arm 0\.32\.0"),
        ({"gpus": "GPU 0: NVIDIA L4"}, "has gpus NVIDIA L4, and that of another arm NVIDIA H200"),
        ({"gpus": "GPU 0: NVIDIA H200"}, None),
    ],
)
def test_arms_are_compared_on_equal_servers(tmp_path: Path, change: dict[str, str], says: str | None) -> None:
    native, stored = player(SPEC, tmp_path, "bfloat16"), player(SPEC, tmp_path, "fp8")
    native.gpus = stored.gpus = "GPU 0: NVIDIA H200\nGPU 1: NVIDIA H200"
    for name, value in change.items():
        setattr(stored, name, value)
    refused = contextlib.nullcontext() if says is None else pytest.raises(EngineError, match=says)
    with attached(SPEC, native, stored) as engine, engine.open(BF16), refused, engine.open(UNIT):
        pass


def test_backends_are_compared_where_both_can_be_seen(tmp_path: Path) -> None:
    native, stored = player(SPEC, tmp_path, "bfloat16", extension=False), player(SPEC, tmp_path, "fp8")
    with attached(SPEC, native, stored) as engine, engine.open(UNIT) as session:
        assert (engine.info().backend, session.applied().backend) == ("unknown", "FAKE_ATTN")
        check_applied(UNIT, session.applied(), engine.info(), SPEC)


@pytest.mark.parametrize("allowed", [False, True])
def test_arms_on_other_attention_backends_are_compared_only_where_the_user_says_so(
    tmp_path: Path, allowed: bool
) -> None:
    native, stored = player(SPEC, tmp_path, "bfloat16"), player(SPEC, tmp_path, "fp8", quantizes_q=True)
    stored.backend = "FLASH_ATTN, FA3"
    refused = (
        contextlib.nullcontext() if allowed else pytest.raises(PolicyNotApplied, match=r"on the .*, FA3, and BF16")
    )
    with attached(SPEC, native, stored, mixed_backends=allowed) as engine, engine.open(UNIT) as session:
        info, applied = engine.info(), session.applied()
        assert (info.mixed_backends, info.backend, info.numerics) == (allowed, "FAKE_ATTN", "storage")
        assert (applied.backend, applied.numerics) == ("FLASH_ATTN, FA3", "attention")
        with refused:
            check_applied(UNIT, applied, info, SPEC)
