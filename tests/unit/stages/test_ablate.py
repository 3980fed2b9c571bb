"""ablate: the arms, the pairing, resuming, and everything it refuses to record."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from kvtriage.engines.base import Arm, Generation, ScoreRequest, ScoreResponse
from kvtriage.engines.fake import FakeEngine
from kvtriage.engines.info import Applied, Pool, Readback
from kvtriage.errors import CaseError, EngineError, PolicyNotApplied, StudyError
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.records.evidence import ArmRecord
from kvtriage.records.trials import CapacityTrial, PoolTrial, ScoreTrial, TimingTrial, Trial
from kvtriage.stages.ablate import ArmCost, cost_arm, design_arms
from kvtriage.tasks.base import TaskItem
from tests.unit.stages.fake_case import STUDY, FakeCase, hybrid, uniform


def arms_of(case: FakeCase) -> dict[str, ArmRecord]:
    return {arm.name: arm for arm in design_arms(case.plan, case.calibrate(), case.diagnose(), case.engine.info())}


def test_the_four_ways_and_their_company() -> None:
    arms = arms_of(FakeCase(spec=hybrid()))
    assert {name: arm.role for name, arm in arms.items()} == {
        "bf16": "baseline",
        "bf16_repeat": "noise",
        "fp8_unit": "candidate",
        "fp8_per_tensor": "candidate",
        "fp8_per_head": "candidate",
        "fp8_per_head_skip": "candidate",
        "bound": "bound",
        "fp8_full_only": "contrast",
        "fp8_sliding_only": "contrast",
    }
    assert all(arm.same_as is None for arm in arms.values())
    assert arms["fp8_per_head_skip"].skip_layers == (0, 1, 3, 4)
    assert arms["bf16"].skip_layers == ()


def test_proven_suspects_are_also_skipped_without_scales() -> None:
    arms = arms_of(FakeCase(spec=uniform(), mantissa={4: 0.1}))
    for scaling in ("unit", "per_tensor", "per_head"):
        assert arms[f"fp8_{scaling}_skip"].skip_layers == (4,)
    assert not {"fp8_full_only", "fp8_sliding_only"} & arms.keys()


def test_equal_arms_run_once() -> None:
    """One KV head: per-head scales are per-tensor scales. A skipped type: that is FP8 in the other."""
    arms = arms_of(FakeCase(spec=hybrid(kv_heads=1), mantissa={0: 0.1, 1: 0.1, 3: 0.1, 4: 0.1}))
    assert arms["fp8_per_head"].same_as == "fp8_per_tensor"
    assert arms["fp8_full_only"].same_as == "fp8_unit_skip"


def test_a_backend_without_per_head_scales_skips_per_tensor() -> None:
    case = FakeCase(spec=uniform(), study=msgspec.structs.replace(STUDY, backend="triton_attn"), mantissa={4: 0.1})
    assert arms_of(case)["fp8_per_tensor_skip"].skip_layers == (4,)
    assert "fp8_per_head_skip" not in arms_of(case)


def test_an_engine_without_per_head_scales_has_no_such_arm() -> None:
    case = FakeCase()
    case.engine = dataclasses.replace(case.engine, per_head_scales=False)
    assert not [name for name in arms_of(case) if "per_head" in name]


def test_every_arm_answers_every_item_once() -> None:
    case = FakeCase()
    evidence, trials = case.ablate()
    own = [arm.name for arm in evidence.arms if arm.same_as is None]
    scored = Counter((t.arm, t.task, t.item_id) for t in trials if isinstance(t, ScoreTrial))
    assert scored == Counter((arm, item.task, item.request.item_id) for arm in own for item in case.items)
    assert {t.conditions for t in trials} == {evidence.conditions_hash}
    assert evidence.trials == len(trials)
    assert 0 < evidence.noise_floor_kl < 1e-5


def test_texts_that_servers_have_no_room_for_are_refused_before_the_first_trial() -> None:
    """What is written behind a text counts too: the arms read both."""
    study = msgspec.structs.replace(STUDY, generation_items=1, generated_tokens=8)
    longest = max(STUDY.buckets) + 8

    def ablated(room: int) -> int:
        case = FakeCase(study=study)
        info = dataclasses.replace(case.engine.info(), longest_text=room)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(FakeEngine, "info", lambda self: info)
            return len(case.ablate()[1])

    assert ablated(longest) > 0
    with pytest.raises(StudyError, match=f"a text of {longest} tokens is to be read, and these servers read"):
        ablated(longest - 1)


def one_by_one(case: FakeCase) -> FakeCase:
    """The case with an engine whose arms are dear to change."""
    case.engine = dataclasses.replace(case.engine, one_arm_at_a_time=True)
    return case


def test_an_engine_with_dear_arms_opens_each_once_and_measures_the_same() -> None:
    evidence, trials = FakeCase().ablate()
    case = one_by_one(FakeCase())
    evidence_again, found = case.ablate()
    assert comparable(found) == comparable(trials)
    assert evidence_again == evidence
    assert case.engine.opened == len([arm for arm in evidence.arms if arm.same_as is None])
    names = list(dict.fromkeys(t.arm for t in found))
    assert names[:2] == ["bf16", "bound"], "the bound is a probe on the server of BF16"
    assert names[2:] == [arm.name for arm in evidence.arms if arm.name not in ("bf16", "bound")]


@pytest.mark.parametrize("kept", [0, 1, 7, 40, 60, 75, 10_000])
def test_arm_by_arm_goes_on_with_the_references_it_lacks(kept: int) -> None:
    evidence, trials = one_by_one(FakeCase()).ablate()
    before = trials[:kept]
    resumed = one_by_one(FakeCase())
    evidence_again, rest = resumed.ablate(list(before))
    assert comparable(before + rest) == comparable(trials)
    assert evidence_again == evidence
    scored = [t for t in rest if isinstance(t, ScoreTrial)]
    lacking = {t.item_id for t in scored}
    own = {t.item_id for t in scored if t.arm == "bf16"}
    assert resumed.engine.scored == len(scored) + len(lacking - own)


def test_arm_by_arm_an_arm_is_checked_before_its_first_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def stay_native(applied: Applied) -> Applied:
        if "probe" in applied.dtypes:
            return applied
        return dataclasses.replace(applied, dtypes=("bfloat16",) * 6, k_scales=((),) * 6, v_scales=((),) * 6)

    found: list[Trial] = []
    case = one_by_one(FakeCase())
    with pytest.raises(PolicyNotApplied, match="'fp8_unit': layer 0 is stored as bfloat16"):
        patched(case, monkeypatch, "applied", stay_native).ablate(sink=found.append)
    assert {t.arm for t in found} == {"bf16", "bf16_repeat", "bound"}


@pytest.mark.parametrize("dear", [False, True])
def test_what_a_server_reserved_is_recorded_once(dear: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(tokens=93184, blocks=728, block_size=128, max_concurrency=45.5, memory_bytes=2**30)

    def reserve(applied: Applied) -> Applied:
        return dataclasses.replace(applied, pool=pool)

    case = patched(one_by_one(FakeCase()) if dear else FakeCase(), monkeypatch, "applied", reserve)
    _, trials = case.ablate()
    found = [t for t in trials if isinstance(t, PoolTrial)]
    assert len(found) == len({t.arm for t in found}) == 9
    assert {(t.tokens, t.blocks, t.block_size, t.max_concurrency, t.memory_bytes) for t in found} == {
        (93184, 728, 128, 45.5, 2**30)
    }
    _, rest = case.ablate(trials)
    assert rest == []


def test_an_engine_that_answers_for_some_arms_runs_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    case = FakeCase()
    some = dataclasses.replace(case.engine.info(), arms=frozenset({"bf16", "fp8_unit"}))
    monkeypatch.setattr(FakeEngine, "info", lambda _: some)
    evidence, trials = case.ablate()
    assert [arm.name for arm in evidence.arms] == ["bf16", "fp8_unit"]
    assert {t.arm for t in trials} == {"bf16", "fp8_unit"}


@pytest.mark.parametrize(("readback", "stops"), [(Readback.CONFIG, True), (Readback.NONE, False)])
def test_what_cannot_be_read_back_is_said_in_the_conditions(
    readback: Readback, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without scales to see, the dtypes still have to be right; without those, nothing can be compared."""

    def hide_scales(applied: Applied) -> Applied:
        return dataclasses.replace(applied, k_scales=((),) * 6, v_scales=((),) * 6)

    def stay_native(applied: Applied) -> Applied:
        return dataclasses.replace(hide_scales(applied), dtypes=("bfloat16",) * 6)

    case = patched(FakeCase(), monkeypatch, "applied", hide_scales)
    blind = dataclasses.replace(case.engine.info(), readback=readback)
    monkeypatch.setattr(FakeEngine, "info", lambda _: blind)
    evidence, _ = case.ablate()
    assert evidence.conditions.readback == readback
    patched(case, monkeypatch, "applied", stay_native)
    with pytest.raises(PolicyNotApplied) if stops else contextlib.nullcontext():
        case.ablate()


def test_arms_take_turns_on_each_timed_shape() -> None:
    evidence, trials = FakeCase().ablate()
    timed = [t for t in trials if isinstance(t, TimingTrial)]
    names = [arm.name for arm in evidence.arms if arm.role in ("baseline", "candidate")]
    assert [t.arm for t in timed] == names * 8
    assert {(t.phase, t.context_len, t.batch) for t in timed} == {
        *(("latency", n, 1) for n in (32, 64, 96)),
        ("throughput", 64, 2),
    }
    assert all(len(t.token_s) == STUDY.decode_tokens - 1 for t in timed)


def test_capacity_is_what_was_held() -> None:
    _, trials = FakeCase().ablate()
    found = [t for t in trials if isinstance(t, CapacityTrial)]
    assert all(t.held_bytes == t.worksheet_bytes > 0 for t in found)
    tokens = {(t.arm, t.context_len, t.batch): t.capacity_tokens for t in found}
    assert tokens["fp8_unit", 99, 1] > 1.9 * tokens["bf16", 99, 1]
    assert len(tokens) == len(found)


def comparable(trials: list[Trial]) -> list[Trial]:
    return sorted(trials, key=lambda trial: msgspec.json.encode(trial))


@pytest.mark.parametrize("kept", [0, 1, 7, 40, 60, 75, 10_000])
def test_a_run_that_goes_on_ends_as_one_that_was_never_stopped(kept: int) -> None:
    evidence, trials = FakeCase().ablate()
    before = trials[:kept]
    resumed = FakeCase()
    evidence_again, rest = resumed.ablate(list(before))
    assert comparable(before + rest) == comparable(trials)
    assert evidence_again == evidence
    if kept > len(trials):
        assert rest == []
        assert resumed.engine.scored == 0


def test_trials_of_other_conditions_are_not_gone_on_from() -> None:
    _, trials = FakeCase().ablate()
    other = FakeCase(study=msgspec.structs.replace(STUDY, memory_bytes=1024))
    with pytest.raises(CaseError, match="other conditions"):
        other.ablate(trials)


def _put(kind: type[Trial], **changes: object) -> Callable[[list[Trial]], list[Trial]]:
    """Change the first trial of one kind."""

    def edit(trials: list[Trial]) -> list[Trial]:
        at = next(i for i, trial in enumerate(trials) if isinstance(trial, kind))
        return [*trials[:at], msgspec.structs.replace(trials[at], **changes), *trials[at + 1 :]]

    return edit


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda trials: [*trials[:9], trials[8]], "line 10 of trials.jsonl repeats a measurement"),
        (lambda trials: [*trials, *trials], "repeats a measurement"),
        (_put(ScoreTrial, arm="zzz"), "is of arm 'zzz'"),
        (_put(ScoreTrial, item_id="zzz"), "scores item 'zzz'"),
        (_put(ScoreTrial, task="zzz"), "of task 'zzz'"),
        (_put(ScoreTrial, bucket=-64), "of bucket -64"),
        (_put(ScoreTrial, scored_tokens=1), "scores 1 tokens"),
        (_put(TimingTrial, context_len=33), "does not ask for"),
        (_put(TimingTrial, ttft_s=-1.0), "negative"),
        (_put(TimingTrial, token_s=(0.1, math.nan)), "not a number"),
    ],
)
def test_trials_that_this_study_cannot_have_made_stop_it(
    edit: Callable[[list[Trial]], list[Trial]], named: str
) -> None:
    case = FakeCase(spec=uniform())
    _, trials = case.ablate()
    with pytest.raises(CaseError) as caught:
        case.ablate(edit(trials))
    assert named in caught.value.message
    assert "remove it to measure again" in caught.value.hint


def patched(case: FakeCase, monkeypatch: pytest.MonkeyPatch, method: str, change: Any) -> FakeCase:
    """`change(result)` in place of what the fake session's method returns."""
    with case.engine.open(Arm("bf16", CachePolicy.native(case.spec.num_layers))) as session:
        kind = type(session)
    original = getattr(kind, method)
    monkeypatch.setattr(kind, method, lambda *args: change(original(*args)))
    return case


def test_another_policy_than_asked_stops_before_the_first_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def stay_native(applied: Applied) -> Applied:
        return dataclasses.replace(applied, dtypes=("bfloat16",) * 6, k_scales=((),) * 6, v_scales=((),) * 6)

    with pytest.raises(PolicyNotApplied, match="'fp8_unit': layer 0 is stored as bfloat16"):
        patched(FakeCase(), monkeypatch, "applied", stay_native).ablate()


def test_a_scale_that_is_not_live_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def default_scale(applied: Applied) -> Applied:
        fallen = tuple((1.0,) * len(k) if index == 3 else k for index, k in enumerate(applied.k_scales))
        return dataclasses.replace(applied, k_scales=fallen)

    with pytest.raises(PolicyNotApplied, match="'fp8_per_tensor': layer 3"):
        patched(FakeCase(), monkeypatch, "applied", default_scale).ablate()


def test_bytes_that_are_not_the_worksheets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more(generation: Generation) -> Generation:
        return dataclasses.replace(generation, held_bytes=(generation.held_bytes or 0) + 1)

    with pytest.raises(EngineError, match="the worksheet says"):
        patched(FakeCase(), monkeypatch, "generate", one_more).ablate()


def test_fp8_without_any_drift_is_an_error() -> None:
    case = FakeCase(mantissa=dict.fromkeys(range(6), 0.0))
    with pytest.raises(EngineError, match="exactly zero"):
        case.ablate()


def test_the_cost_counts_what_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    case = FakeCase(spec=hybrid())
    with case.engine.open(Arm("bf16", CachePolicy.native(case.spec.num_layers))) as session:
        kind: Any = type(session)
    spent: Counter[tuple[str, str]] = Counter()
    score, generate = kind.score, kind.generate

    def counted_score(session: Any, request: ScoreRequest) -> ScoreResponse:
        spent[session.arm.name, "read"] += len(request.token_ids)
        response: ScoreResponse = score(session, request)
        return response

    def counted_generate(session: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generation:
        spent[session.arm.name, "read"] += sum(map(len, prompts))
        spent[session.arm.name, "decoded"] += len(prompts) * (new_tokens - 1)
        generation: Generation = generate(session, prompts, new_tokens)
        return generation

    monkeypatch.setattr(kind, "score", counted_score)
    monkeypatch.setattr(kind, "generate", counted_generate)
    evidence, _ = case.ablate()
    assert {arm.role for arm in evidence.arms} == {"baseline", "noise", "candidate", "bound", "contrast"}
    for arm in evidence.arms:
        if arm.same_as is None:
            found = ArmCost(spent[arm.name, "read"], spent[arm.name, "decoded"])
            assert found == cost_arm(case.plan, case.items, arm.role), arm.name


def test_what_texts_share_is_priced_once_where_an_engine_reads_it_once() -> None:
    ids = tuple(range(512))
    tokens = {"text": ids, "needle": (*ids[:300], *reversed(ids[300:])), "alone": tuple(reversed(ids))}
    items = [TaskItem("text", 512, ScoreRequest(name, token_ids, 480)) for name, token_ids in tokens.items()]
    plan = FakeCase().plan
    whole, once = (cost_arm(plan, items, "noise", read_once=read_once) for read_once in (False, True))
    assert (whole.read_tokens, once.read_tokens) == (3 * 512, 3 * 512 - 256)
    assert whole.decoded_tokens == once.decoded_tokens == 0
    looks = msgspec.structs.replace(plan, study=msgspec.structs.replace(plan.study, looks=3))
    assert cost_arm(looks, items, "noise", read_once=True) == whole, "no look has two of them"
