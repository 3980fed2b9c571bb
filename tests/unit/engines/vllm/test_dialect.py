"""What a server can be asked is found by asking; whatever it is, a study can be made of it."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from kvtriage.engines.base import Arm, ScoreRequest
from kvtriage.engines.info import Scoring
from kvtriage.engines.vllm.client import Client
from kvtriage.engines.vllm.dialect import VLLM, Dialect, learn_dialect
from kvtriage.engines.vllm.failures import Refused
from kvtriage.errors import EngineError
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.records.evidence import Evidence
from kvtriage.records.trials import ScoreTrial, TimingTrial, Trial
from kvtriage.stages.ablate import ablate
from kvtriage.stages.decide import decide
from kvtriage.stages.wording import format_share
from tests.unit.engines.vllm.fleets import attached, player
from tests.unit.engines.vllm.misbehaving.faults import Faults
from tests.unit.engines.vllm.misbehaving.player import Player
from tests.unit.engines.vllm.misbehaving.serving import playing
from tests.unit.stages.fake_case import STUDY, FakeCase, hybrid, silent

SPEC = hybrid()
EXTRAS = VLLM.extras
REQUEST = ScoreRequest("x", tuple(range(1, 21)), 10)
BF16 = Arm("bf16", CachePolicy.native(SPEC.num_layers))
UNIT = Arm("fp8_unit", CachePolicy.fp8(SPEC.num_layers, Scaling.UNIT))
OPENAI = ("prompt_logprobs", *sorted(EXTRAS))
"""What a server refuses that takes OpenAI's fields and no others."""


def plain(folder: Path, dtype: str, scoring: str, *, strict: bool = False, speaks_ids: bool = True) -> Player:
    """A server that has nothing of vLLM's but the API."""
    how = {"extension": False, "metrics": False, "refuses": OPENAI if strict else (), "speaks_ids": speaks_ids}
    return player(SPEC, folder, dtype, scoring=scoring, **how)


@pytest.mark.parametrize(
    ("scoring", "strict", "found"),
    [
        ("prompt_logprobs", False, VLLM),
        ("echo", False, Dialect(Scoring.ECHO, 20, EXTRAS)),
        ("echo_text", False, Dialect(Scoring.ECHO_TEXT, 20, EXTRAS)),
        ("echo", True, Dialect(Scoring.ECHO_TEXT, 20, frozenset())),
        ("generated", False, Dialect(Scoring.GENERATED, None, EXTRAS)),
        ("generated", True, Dialect(Scoring.GENERATED, None, frozenset())),
    ],
)
def test_the_best_that_a_server_can_do_is_found(tmp_path: Path, scoring: str, strict: bool, found: Dialect) -> None:
    with playing(plain(tmp_path, "bfloat16", scoring, strict=strict)) as url, Client(url) as client:
        assert learn_dialect(client, "tiny") == found


def test_a_server_that_takes_five_logprobs_is_asked_for_five(tmp_path: Path) -> None:
    modest = plain(tmp_path, "bfloat16", "echo")
    modest.most_logprobs = 5
    with playing(modest) as url, Client(url) as client:
        assert learn_dialect(client, "tiny") == Dialect(Scoring.ECHO, 5, EXTRAS)


def test_a_server_that_answers_nothing_at_all_is_refused(tmp_path: Path) -> None:
    locked = plain(tmp_path, "bfloat16", "echo")
    locked.token = "secret"
    with playing(locked) as url, Client(url) as client, pytest.raises(Refused, match="answered 401"):
        learn_dialect(client, "tiny")


def test_an_echo_and_prompt_logprobs_are_the_same_scores(tmp_path: Path) -> None:
    scores = []
    for scoring in ("prompt_logprobs", "echo"):
        with attached(SPEC, *(plain(tmp_path, dtype, scoring) for dtype in ("bfloat16", "fp8"))) as engine:
            with engine.open(BF16) as one, engine.open(UNIT) as other:
                native, stored = one.score(REQUEST), other.score(REQUEST)
            assert engine.info().scoring == scoring
            scores.append((native.nll, stored.nll, native.top1, stored.distribution.kl_from(native.distribution)))
    assert scores[0][:3] == scores[1][:3]
    assert scores[0][3] == pytest.approx(scores[1][3])


def test_by_text_likelihoods_are_the_same_and_the_divergence_is_no_larger(tmp_path: Path) -> None:
    found = {}
    for scoring in ("echo", "echo_text"):
        with attached(SPEC, *(plain(tmp_path, dtype, scoring) for dtype in ("bfloat16", "fp8"))) as engine:
            with engine.open(BF16) as one, engine.open(UNIT) as other:
                native, stored = one.score(REQUEST), other.score(REQUEST)
            found[scoring] = (stored.nll, stored.distribution.kl_from(native.distribution))
    assert found["echo"][0] == found["echo_text"][0]
    assert 0 < sum(found["echo_text"][1]) < sum(found["echo"][1]) + 1e-9


def test_an_echo_that_is_short_is_asked_for_again(tmp_path: Path) -> None:
    native = plain(tmp_path, "bfloat16", "echo")
    with (
        attached(SPEC, native, plain(tmp_path, "fp8", "echo"), patience_s=(0.0,)) as engine,
        engine.open(BF16) as session,
    ):
        native.faults = Faults(short_scores=1)
        assert len(session.score(REQUEST).nll) == 10


def test_arms_that_are_scored_in_different_ways_are_not_compared(tmp_path: Path) -> None:
    servers = plain(tmp_path, "bfloat16", "prompt_logprobs"), plain(tmp_path, "fp8", "echo")
    says = r"arm 'fp8_unit' has likelihoods by echo, and that of another arm prompt_logprobs"
    with (
        attached(SPEC, *servers) as engine,
        engine.open(BF16),
        pytest.raises(EngineError, match=says),
        engine.open(UNIT),
    ):
        pass


def studied(folder: Path, scoring: str, *, strict: bool, speaks_ids: bool) -> tuple[list[Trial], Evidence, FakeCase]:
    case = FakeCase(study=msgspec.structs.replace(STUDY, items_per_bucket=2, latency_contexts=(32,)))
    scales, sensitivities = case.calibrate(), case.diagnose()
    trials: list[Trial] = []
    servers = [plain(folder, d, scoring, strict=strict, speaks_ids=speaks_ids) for d in ("bfloat16", "fp8")]
    with attached(SPEC, *servers) as engine:
        evidence = ablate(
            case.plan, scales, sensitivities, case.items, case.split, engine, [], trials.append, silent, {}
        )
    return trials, evidence, case


@pytest.mark.parametrize("scoring", ["echo", "echo_text"])
def test_a_study_of_any_compatible_server(tmp_path: Path, scoring: str) -> None:
    strict = scoring == "echo_text"
    trials, evidence, case = studied(tmp_path, scoring, strict=strict, speaks_ids=not strict)
    assert (evidence.conditions.scoring, evidence.conditions.readback) == (scoring, "none")
    assert all(t.metrics["kl"] is not None for t in trials if isinstance(t, ScoreTrial))
    verdict = decide(case.plan, case.calibrate(), case.diagnose(), evidence, trials, None, {})
    assert any("could not be read back" in caveat for caveat in verdict.caveats)
    assert any("named" in c or "name tokens by their texts" in c for c in verdict.caveats) is (scoring == "echo_text")


@pytest.mark.parametrize("plain", [False, True], ids=["tokens", "texts"])
def test_a_server_without_likelihoods_is_measured_by_what_it_generates_and_not_judged(
    tmp_path: Path, plain: bool
) -> None:
    trials, evidence, case = studied(tmp_path, "generated", strict=plain, speaks_ids=not plain)
    assert (evidence.conditions.scoring, evidence.conditions.kl_top_k) == ("generated", None)
    scored = [trial for trial in trials if isinstance(trial, ScoreTrial)]
    assert all(trial.metrics["nll"] is trial.metrics["kl"] is None for trial in scored)
    assert {trial.metrics["agreed"] for trial in scored if trial.arm == "bf16"} == {1.0}
    assert all(trial.metrics["hit"] is not None for trial in scored if trial.task == "needle")
    timed = [trial for trial in trials if isinstance(trial, TimingTrial)]
    assert {trial.arm for trial in timed} == {"bf16", "fp8_unit"}
    assert all(len(trial.token_s) == case.plan.study.decode_tokens - 1 for trial in timed)
    verdict = decide(case.plan, case.calibrate(), case.diagnose(), evidence, trials, None, {})
    assert verdict.status == "cannot_tell"
    unmeasured = [reason for reason in verdict.reasons if reason.arm == "fp8_unit" and reason.clause in ("kl", "nll")]
    assert unmeasured
    assert all("not measured" in reason.text and reason.status == "cannot_tell" for reason in unmeasured)
    assert any("give no likelihoods" in caveat for caveat in verdict.caveats)
    shares = [trial.metrics["agreed"] for trial in scored if trial.arm == "fp8_unit" and trial.task == "text"]
    said = f"FP8 with scale 1 goes on as BF16 does for {format_share(fmean(share or 0.0 for share in shares))}"
    assert any(caveat.startswith(said) for caveat in verdict.caveats)
    assert verdict.sentences[0] == "So far: Whether FP8 at scale 1 keeps the margins is open."
    assert verdict.next_step.startswith("Measure the arms on servers that give the likelihoods")


def test_how_each_server_is_scored_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    servers = [plain(tmp_path, dtype, "echo", strict=True) for dtype in ("bfloat16", "fp8")]
    with attached(SPEC, *servers, say=said.append) as engine, engine.open(BF16), engine.open(UNIT):
        pass
    for arm in ("bf16", "fp8_unit"):
        (line,) = [line for line in said if line.startswith(f"server {arm}: scored")]
        assert "tokens known by their texts" in line
        assert "knows no cache_salt" in line
