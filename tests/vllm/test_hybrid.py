"""A small hybrid model through real servers: four arms, each as the embedded engine has it, asked in every way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from kvtriage.engines.base import Arm, Engine, ScoreRequest, ScoreResponse
from kvtriage.engines.embedded.tokenizer import load_tokenizer
from kvtriage.engines.info import Scoring
from kvtriage.engines.vllm.attach import AttachedFleet
from kvtriage.engines.vllm.dialect import VLLM, Dialect, learn_dialect
from kvtriage.engines.vllm.engine import VllmEngine
from kvtriage.engines.vllm.timing import closed_loop, stream_body
from kvtriage.errors import PolicyNotApplied
from kvtriage.kvcache.policy import CachePolicy, Fp8, Scaling
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.stages.arms import check_applied
from kvtriage.stages.search.proving import as_probe
from tests.vllm.conftest import KEY, TEXTS, Serve

BACKEND = "CPU_ATTN (kvtriage_vllm_cpu.backend.Backend)"
TOLERANCE_NATS = 0.02
"""Between the engines' means over 300 tokens."""
ROUNDING_NATS = 1e-3
"""Between two readings of one text by one server: it may take the positions in other batches."""


def mean_nll(engine: Engine, arm: Arm) -> tuple[float, list[int]]:
    """Over all texts, nats per token; and the most likely token at each scored position."""
    with engine.open(arm) as session:
        answers = [session.score(request) for request in TEXTS]
    return fmean(nll for answer in answers for nll in answer.nll), [t for answer in answers for t in answer.top1]


def right(answer: ScoreResponse, request: ScoreRequest) -> list[bool]:
    """Where the most likely token is the one that stands there: all that is known of it by its text."""
    return [one == other for one, other in zip(answer.top1, request.token_ids[request.score_from :], strict=True)]


def test_four_arms_do_what_they_do_in_the_embedded_engine(vllm: Engine, embedded: Engine, four_arms: list[Arm]) -> None:
    info = vllm.info()
    assert (info.backend, info.native_dtype, info.compute_dtype) == (BACKEND, "bfloat16", "float32")
    assert info.per_head_scales
    pools = []
    for arm in four_arms:
        with vllm.open(arm) as session:
            applied = session.applied()
            check_applied(arm, applied, info, vllm.spec)
            made = session.generate([TEXTS[0].token_ids], 4)
            assert len(made.token_ids[0]) == 4
            assert len(made.token_s) == 3
        assert applied.pool is not None
        pools.append(applied.pool.tokens)
        (here, here_top1), (there, there_top1) = mean_nll(embedded, arm), mean_nll(vllm, arm)
        assert there == pytest.approx(here, abs=TOLERANCE_NATS), arm.name
        assert fmean(map(int.__eq__, here_top1, there_top1)) > 0.9, arm.name
    native, unit, per_head, skipped = pools
    assert native < skipped < unit
    assert per_head == unit


def test_what_bf16s_server_rounds_is_what_a_sets_own_server_stores(vllm: Engine, four_arms: list[Arm]) -> None:
    """On which a search rests that starts no server for a set."""
    stored = four_arms[3]
    rounded = replace(stored, name="skip, rounded", policy=as_probe(stored.policy, vllm.spec))
    with vllm.open(four_arms[0]) as one, vllm.open(stored) as own, vllm.open(rounded) as other:
        assert set(other.applied().dtypes) == {"bfloat16", "probe"}
        for request in TEXTS:
            native, there, here = (session.score(request) for session in (one, own, other))
            assert fmean(here.nll) == pytest.approx(fmean(there.nll), abs=ROUNDING_NATS)
            drifts = [fmean(answer.distribution.kl_from(native.distribution)) for answer in (there, here)]
            assert drifts[1] == pytest.approx(drifts[0], rel=0.05)
            assert drifts[0] > 0.0


def test_servers_that_run_already_are_attached_to_and_left_running(
    serve: Serve, hybrid: tuple[Path, CacheSpec], embedded: Engine, four_arms: list[Arm]
) -> None:
    folder, geometry = hybrid
    with serve(folder) as server:
        urls = {"bf16": server.client.url, "fp8_unit": server.client.url}
        tokenizer = load_tokenizer(folder, False)
        with AttachedFleet(urls, (folder.name,), KEY) as fleet:
            engine = VllmEngine(geometry, tokenizer, fleet, print)
            assert engine.info().server == ("attached",)
            here, there = mean_nll(embedded, four_arms[0])[0], mean_nll(engine, four_arms[0])[0]
            assert there == pytest.approx(here, abs=TOLERANCE_NATS)
            probe = Arm("one layer", CachePolicy.only(geometry.num_layers, (2,), Fp8(Scaling.UNIT)))
            answers = engine.probe(TEXTS[:1], [probe], lambda done, total: None)
            assert answers[0][0] == pytest.approx(
                embedded.probe(TEXTS[:1], [probe], lambda done, total: None)[0][0], rel=0.5
            )
            with pytest.raises(PolicyNotApplied, match="the server's cache dtype is auto"), engine.open(four_arms[1]):
                pass
        assert server.is_running
        client, (model,) = server.client, [entry["id"] for entry in server.client.get_json("/v1/models")["data"]]
        assert learn_dialect(client, model) == VLLM

        def ask(dialect: Dialect, request: ScoreRequest) -> ScoreResponse:
            answer = client.post_json("/v1/completions", dialect.body(model, request))
            return dialect.read(request, answer, tokenizer.encode)

        generated = Dialect(Scoring.GENERATED, None, frozenset({"ignore_eos"}))
        for request in TEXTS:
            own = ask(VLLM, request)
            for echo in (Dialect(Scoring.ECHO), Dialect(Scoring.ECHO_TEXT, extras=frozenset())):
                echoed = ask(echo, request)
                assert echoed.nll == pytest.approx(own.nll, abs=ROUNDING_NATS)
                assert max(echoed.distribution.kl_from(ask(echo, request).distribution)) < ROUNDING_NATS
                assert fmean(map(int.__eq__, right(echoed, request), right(own, request))) > 0.95
            assert fmean(map(int.__eq__, ask(Dialect(Scoring.ECHO), request).top1, own.top1)) > 0.95
            by_id, by_text = ask(Dialect(Scoring.GENERATED, None), request), ask(generated, request)
            assert by_id.top1 == by_text.top1
        body = stream_body(model, TEXTS[0].token_ids, 5, "salt")
        (known,), (counted,) = (closed_loop(client, [words], 1) for words in (body, generated.adapt(body)))
        assert (len(known.token_ids), len(known.arrival_s)) == (5, 5)
        assert (counted.token_ids, len(counted.arrival_s)) == ((), 5)
