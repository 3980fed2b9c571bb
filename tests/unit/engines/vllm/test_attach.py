"""Servers that the user started: found, told apart, asked, never stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from kvtriage.engines.base import Arm, ScoreRequest, ScoreResponse
from kvtriage.engines.info import Readback
from kvtriage.engines.vllm.attach import read_urls
from kvtriage.engines.vllm.failures import Overdue, Unanswered
from kvtriage.engines.vllm.fleet import Served
from kvtriage.errors import EngineError, PolicyNotApplied, StudyError
from kvtriage.kvcache.policy import CachePolicy, Fp8, Mantissa, Scaling
from kvtriage.records.evidence import Evidence
from kvtriage.records.trials import ScoreTrial, TimingTrial, Trial
from kvtriage.stages.ablate import ablate
from kvtriage.stages.arms import check_applied
from kvtriage.stages.orders import Across, in_turn
from kvtriage.stages.search.proving import as_probe
from tests.unit.engines.vllm.fleets import attached, player
from tests.unit.engines.vllm.misbehaving.player import Player
from tests.unit.stages.fake_case import STUDY, FakeCase, hybrid, silent

SPEC = hybrid()
COUNT = SPEC.num_layers
BF16 = Arm("bf16", CachePolicy.native(COUNT))
UNIT = Arm("fp8_unit", CachePolicy.fp8(COUNT, Scaling.UNIT))


def test_urls_are_given_by_arm() -> None:
    assert read_urls(["bf16=http://a:1/v1", "fp8_unit=http://b:2"]) == {"bf16": "http://a:1", "fp8_unit": "http://b:2"}
    assert read_urls([]) == {}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["http://a:1"], "is not the URL|not of the form"),
        (["fp8_unit=http://a:1"], "no --arm bf16"),
        (["bf16=http://a:1", "bf16=http://b:1"], "given twice"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(StudyError, match=says):
        read_urls(words)


def test_an_answer_whose_time_is_up_is_not_asked_for_again(tmp_path: Path) -> None:
    """It would take as long once more; what merely failed is asked for again."""
    asked: list[type[Unanswered]] = []

    def failing(kind: type[Unanswered]) -> Callable[[Served], None]:
        def ask(served: Served) -> None:
            asked.append(kind)
            raise kind("no answer", hint="a planted fault")

        return ask

    with attached(SPEC, player(SPEC, tmp_path, "bfloat16"), patience_s=(0.0, 0.0)) as engine:
        for kind in (Overdue, Unanswered):
            with pytest.raises(Unanswered, match="no answer"):
                engine.persist(BF16, failing(kind))
    assert asked == [Overdue, *[Unanswered] * 3]


def test_a_set_is_rounded_by_bf16s_server_where_it_has_none(tmp_path: Path) -> None:
    """Where the extension is there to do it; without, and for an arm that is to be stored, a server is asked for."""
    stored = Arm("skip 1", CachePolicy.fp8(COUNT, Scaling.UNIT, (1,)))
    rounded = dataclasses.replace(stored, policy=as_probe(stored.policy, SPEC))
    with attached(SPEC, player(SPEC, tmp_path, "bfloat16")) as engine:
        with engine.open(rounded) as session:
            check_applied(rounded, session.applied(), engine.info(), SPEC)
        with pytest.raises(EngineError, match="no --arm skip 1=URL"), engine.open(stored):
            pass
    bare = player(SPEC, tmp_path, "bfloat16", extension=False)
    refused = pytest.raises(PolicyNotApplied, match="needs kvtriage's extension")
    with attached(SPEC, bare) as engine, refused, engine.open(rounded):
        pass


def test_arms_are_measured_where_they_run(tmp_path: Path) -> None:
    with attached(SPEC, player(SPEC, tmp_path, "bfloat16"), player(SPEC, tmp_path, "fp8")) as engine:
        info = engine.info()
        assert info.arms == frozenset({"bf16", "fp8_unit"})
        assert info.readback is Readback.LIVE
        assert not engine.one_arm_at_a_time
        request = ScoreRequest("x", tuple(range(20)), 10)
        with engine.open(BF16) as one, engine.open(UNIT) as other:
            kl = other.score(request).distribution.kl_from(one.score(request).distribution)
            assert other.applied().dtypes == ("float8_e4m3fn",) * COUNT
        assert sum(kl) > 0


@pytest.mark.parametrize(("native", "stored"), [(True, True), (False, False), (True, False), (False, True)])
def test_a_backend_that_takes_q_in_fp8_is_told_by_the_baseline_and_held_to_it(
    tmp_path: Path, native: bool, stored: bool
) -> None:
    players = (
        player(SPEC, tmp_path, "bfloat16", quantizes_q=native),
        player(SPEC, tmp_path, "fp8", quantizes_q=stored),
    )
    with attached(SPEC, *players) as engine, engine.open(UNIT) as session:
        info = engine.info()
        assert info.numerics == ("attention" if native else "storage")
        differs = pytest.raises(PolicyNotApplied, match="has Q scales")
        with contextlib.nullcontext() if native is stored else differs:
            check_applied(UNIT, session.applied(), info, SPEC)


@pytest.mark.parametrize(("metrics", "readback"), [(True, Readback.CONFIG), (False, Readback.NONE)])
def test_a_server_without_the_extension_is_measured_and_said_to_be(
    tmp_path: Path, metrics: bool, readback: Readback
) -> None:
    players = [player(SPEC, tmp_path, dtype, extension=False, metrics=metrics) for dtype in ("bfloat16", "fp8")]
    with attached(SPEC, *players) as engine:
        assert engine.info().readback is readback
        with engine.open(UNIT) as session:
            assert session.score(ScoreRequest("x", tuple(range(20)), 10)).nll
        with pytest.raises(EngineError, match="development endpoints are off, and ranges are observed inside"):
            engine.observe([list(range(20))], (0,), lambda done, total: None)


def test_an_extension_that_fails_is_not_taken_for_none(tmp_path: Path) -> None:
    broken = player(SPEC, tmp_path, "bfloat16")
    broken.faults.status = {"/collective_rpc": [500] * 9}
    with (
        attached(SPEC, broken) as engine,
        pytest.raises(Unanswered, match=r"extension failed at kvtriage_layers: .*planted"),
    ):
        engine.info()


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ({"extension": False}, "server bf16: the server's development endpoints are off"),
        ({"methods": False}, "server bf16: the server runs without kvtriage's extension"),
        ({"forbidden": True}, "server bf16: the server's development endpoints are not open to kvtriage"),
        ({"metrics": False}, "server bf16: /metrics does not tell the size of its cache"),
    ],
)
def test_what_a_server_lacks_is_said(tmp_path: Path, lacks: dict[str, bool], says: str) -> None:
    said: list[str] = []
    with attached(SPEC, player(SPEC, tmp_path, "bfloat16", **lacks), say=said.append) as engine, engine.open(BF16):
        assert any(says in line for line in said)


@pytest.mark.parametrize(
    ("dtype", "extension", "warned"), [("auto", False, 1), ("auto", True, 0), ("bfloat16", False, 0)]
)
def test_an_automatic_cache_that_cannot_be_looked_at_is_warned_of(
    tmp_path: Path, dtype: str, extension: bool, warned: int
) -> None:
    said: list[str] = []
    with (
        attached(SPEC, player(SPEC, tmp_path, dtype, extension=extension), say=said.append) as engine,
        engine.open(BF16),
    ):
        assert sum("its cache dtype is auto" in line for line in said) == warned


def ablated(folder: Path, across: Across, *, metrics: bool = True) -> tuple[list[Trial], Evidence, list[Player]]:
    """One study over two servers of the user's."""
    case = FakeCase(study=msgspec.structs.replace(STUDY, items_per_bucket=2, latency_contexts=(32,)))
    scales, sensitivities = case.calibrate(), case.diagnose()
    players = [player(SPEC, folder, dtype, extension=False, metrics=metrics) for dtype in ("bfloat16", "fp8")]
    trials: list[Trial] = []
    with attached(SPEC, *players) as engine:
        evidence = ablate(
            case.plan,
            scales,
            sensitivities,
            case.items,
            case.split,
            engine,
            [],
            trials.append,
            silent,
            {},
            across,
        )
    return trials, evidence, players


def test_arms_read_at_once_leave_the_same_trials_in_the_same_order(tmp_path: Path) -> None:
    together = threading.Barrier(2, timeout=10)

    def at_once(score: Callable[[Arm], ScoreResponse], arms: Sequence[Arm]) -> Iterator[ScoreResponse]:
        """As the command line does it; both arms have to be under way before either goes on."""

        def meet(arm: Arm) -> ScoreResponse:
            together.wait()
            return score(arm)

        return pool.map(meet, arms)

    with ThreadPoolExecutor() as pool:
        parallel, _, _ = ablated(tmp_path, at_once)
    serial, _, _ = ablated(tmp_path, in_turn)
    scores = [[trial for trial in trials if isinstance(trial, ScoreTrial)] for trials in (parallel, serial)]
    assert scores[0] == scores[1]
    assert {trial.arm for trial in scores[0]} == {"bf16", "fp8_unit"}
    assert len(parallel) == len(serial)


def test_anything_compatible_is_an_arm_and_the_conditions_say_what_was_not_seen(tmp_path: Path) -> None:
    trials, evidence, players = ablated(tmp_path, in_turn, metrics=False)
    assert evidence.conditions.readback == "none"
    assert {type(trial) for trial in trials} == {ScoreTrial, TimingTrial}
    assert {trial.arm for trial in trials} == {"bf16", "fp8_unit"}
    for one in players:
        assert {path.partition("?")[0] for path in one.paths} >= {"/v1/models", "/v1/completions"}


def test_another_model_behind_the_url_is_refused(tmp_path: Path) -> None:
    with (
        attached(SPEC, player(SPEC, tmp_path, "bfloat16"), names=("other",)) as engine,
        pytest.raises(StudyError, match="serves"),
    ):
        engine.info()


def test_somebodys_server_rounds_nothing_after_an_interrupted_probe(tmp_path: Path) -> None:
    one = player(SPEC, tmp_path, "bfloat16")
    probe = Arm("one layer", CachePolicy.only(COUNT, (2,), Fp8(Scaling.UNIT)))

    def interrupt(done: int, total: int) -> None:
        if one.probes:
            raise KeyboardInterrupt

    requests = [ScoreRequest(f"x{i}", tuple(range(20)), 10) for i in range(2)]
    with pytest.raises(KeyboardInterrupt), attached(SPEC, one) as engine:
        engine.probe(requests, [probe], interrupt)
    assert one.probes == {}
    rpc = [body["args"] for body in one.bodies if body.get("method") == "kvtriage_probe"]
    assert [bool(args[0]) for args in rpc] == [False, True, False]


def test_a_repeat_on_somebody_elses_server_is_read_in_the_company_of_others(tmp_path: Path) -> None:
    """Its steps cannot be set: alone and at once it would be BF16 to the bit, and the noise floor zero."""
    one = player(SPEC, tmp_path, "bfloat16")
    request = ScoreRequest("x", tuple(range(20)), 10)
    repeat = dataclasses.replace(BF16, name="bf16_repeat", prefill_chunk=192)
    with attached(SPEC, one) as engine:
        assert engine.info().repeat == "batches"
        scored = []
        for arm in (BF16, repeat):
            with engine.open(arm) as session:
                one.bodies.clear()
                scored.append(session.score(request).nll)
                asked = [body for body in one.bodies if "prompt" in body]
                company = [body for body in asked if "prompt_logprobs" not in body]
                assert len(asked) - len(company) == 1
                assert len(company) == (3 if arm is repeat else 0)
                assert len({body["cache_salt"] for body in asked}) == len(asked)
    assert scored[0] == scored[1]


def test_a_server_of_another_arm_is_refused(tmp_path: Path) -> None:
    with (
        attached(SPEC, player(SPEC, tmp_path, "bfloat16"), player(SPEC, tmp_path, "bfloat16")) as engine,
        pytest.raises(PolicyNotApplied, match="'fp8_unit'"),
        engine.open(UNIT),
    ):
        pass


def test_an_arm_without_a_server_is_said(tmp_path: Path) -> None:
    bound = Arm("bound", CachePolicy.uniform(COUNT, Mantissa()))
    with attached(SPEC, player(SPEC, tmp_path, "bfloat16")) as engine, pytest.raises(EngineError), engine.open(bound):
        pass
