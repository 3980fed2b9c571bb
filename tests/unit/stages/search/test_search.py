"""search, from the records before it to frontier.json, on an engine whose damage is known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import cast

import msgspec
import pytest

from kvtriage.engines.base import Arm, Engine, Session
from kvtriage.errors import CaseError, EngineError
from kvtriage.kvcache.policy import Fp8
from kvtriage.records.frontier import Frontier, SearchTrial, SetRow, SetTrial
from kvtriage.records.rule import Rule
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.trials import ContinuationTrial
from kvtriage.stages.search import adopt, cost_search, search
from kvtriage.stages.search.texts import choosing_items
from tests.unit.stages.fake_case import STUDY, FakeCase, hybrid, silent, uniform

LENIENT = msgspec.structs.replace(STUDY, items_per_bucket=4, rule=Rule(top1_margin=0.9))


@dataclass
class Searched:
    case: FakeCase
    lines: list[SearchTrial] = field(default_factory=list)

    def run(self, done: Sequence[SearchTrial] = (), engine: Engine | None = None) -> Frontier:
        case = self.case
        return search(
            case.plan,
            case.calibrate(),
            self.sensitivities,
            case.split,
            case.items,
            engine or case.engine,
            done,
            self.lines.append,
            silent,
            {},
        )

    @property
    def sensitivities(self) -> Sensitivities:
        return self.case.diagnose()


def searched(case: FakeCase, **together: float) -> Searched:
    """`together` is keyed by layers: l1_4=0.2 is damage of layers 1 and 4 while neither is native."""
    groups = {frozenset(map(int, key[1:].split("_"))): cost for key, cost in together.items()}
    case.engine.together = groups
    return Searched(case)


def row(frontier: Frontier, name: str) -> SetRow:
    return next(row for row in frontier.rows if name in row.names)


def test_a_healthy_model_needs_no_layer_in_bf16() -> None:
    frontier = searched(FakeCase(spec=uniform(), study=LENIENT)).run()
    assert (frontier.found, frontier.status) == ((), "met")
    assert "none has to stay in BF16" in frontier.explanation
    assert row(frontier, "found").names == ("found", "none")


def test_layers_that_only_harm_together_are_found_though_no_probe_accuses_them() -> None:
    job = searched(FakeCase(spec=uniform(), study=LENIENT), l1_4=0.3, l2_4=0.3)
    assert not job.sensitivities.suspects_stand_out
    frontier = job.run()
    assert (frontier.found, frontier.status) == ((4,), "met")
    assert row(frontier, "none").kl_status == "unmet"
    assert row(frontier, "found").kl_status == "met"


def test_what_scales_repair_stays_in_fp8() -> None:
    """Layer 2 is the worst by far at scale 1, and harmless under its own scales; layer 3 is not."""
    case = FakeCase(spec=uniform(), study=LENIENT, range_={2: 0.9}, mantissa={3: 0.2})
    assert searched(case).run().found == (3,)


def test_a_backend_without_scales_per_head_is_searched_under_one_scale() -> None:
    study = msgspec.structs.replace(LENIENT, backend="triton_attn")
    frontier = searched(FakeCase(spec=uniform(), study=study, spread={5: 0.3})).run()
    assert (frontier.scaling, frontier.found) == ("per_tensor", (5,))


def test_a_whole_attention_type_is_a_move() -> None:
    """Each sliding layer harms, and the engine takes them with one word."""
    damage = dict.fromkeys((0, 1, 3, 4), 0.03)
    frontier = searched(FakeCase(spec=hybrid(), study=LENIENT, mantissa=damage)).run()
    assert frontier.found is not None
    assert set(frontier.found) < {0, 1, 3, 4}
    assert row(frontier, "all sliding").kl_status == "met"
    assert row(frontier, "found").held_bytes <= row(frontier, "all sliding").held_bytes


def test_no_rival_that_keeps_the_margin_is_cheaper_and_none_as_cheap_drifts_less() -> None:
    for together in ({"l0_5": 0.2}, {"l1_2": 0.1, "l3_4": 0.1}, {"l0_1_2": 0.3, "l4_5": 0.04}):
        frontier = searched(FakeCase(spec=uniform(), study=LENIENT, mantissa={5: 0.02}), **together).run()
        found = row(frontier, "found")
        for rival in frontier.rows:
            if rival.kl_status == "met" and rival is not found:
                assert rival.held_bytes >= found.held_bytes
            if rival.held_bytes <= found.held_bytes and rival.beside_found is not None:
                assert rival.beside_found.high is not None
                assert rival.beside_found.high > 0


def test_claims_are_of_texts_that_chose_nothing() -> None:
    frontier = searched(FakeCase(spec=uniform(), study=LENIENT), l1_4=0.3).run()
    assert not set(frontier.claim_texts) & set(frontier.choosing_texts)
    assert {name.split("-")[0] for name in frontier.claim_texts} == {"evaluation"}
    assert "evaluation" not in "".join(frontier.choosing_texts)
    assert {row.texts for row in frontier.rows} == {len(frontier.claim_texts)}


def test_another_margin_that_fails_makes_way_for_a_stricter_set() -> None:
    """The cheapest set by KL drifts by 0.04 and changes too many tokens; the next one is verified in its turn."""
    study = msgspec.structs.replace(LENIENT, rule=Rule(nll_margin=0.02, top1_margin=0.9))
    case = FakeCase(spec=uniform(), study=study, mantissa={1: 0.03, 4: 0.08, 5: 0.005})
    frontier = searched(case).run()
    assert [entry.status for entry in frontier.verified] == ["unmet", "met"]
    assert "NLL" in frontier.verified[0].text
    assert frontier.found == frontier.verified[1].skip_layers == (1, 4)


def test_margins_that_nothing_keeps_leave_bf16() -> None:
    study = msgspec.structs.replace(STUDY, rule=Rule(kl_margin=1e-6, range_margin=1e-7))
    job = searched(FakeCase(spec=uniform(), study=study))
    frontier = job.run()
    assert (frontier.found, frontier.status) == (None, "none")
    assert "BF16 stays" in frontier.explanation
    assert adopt(job.sensitivities, frontier) == job.sensitivities


def test_a_killed_search_measures_nothing_twice() -> None:
    whole = searched(FakeCase(spec=uniform(), study=LENIENT), l1_4=0.3, l2_4=0.3)
    frontier = whole.run()
    for kept in (0, 3, len(whole.lines)):
        again = searched(FakeCase(spec=uniform(), study=LENIENT), l1_4=0.3, l2_4=0.3)
        assert again.run(whole.lines[:kept]) == frontier
        assert [*whole.lines[:kept], *again.lines] == whole.lines
    measured = [(line.skip_layers, item) for line in whole.lines if isinstance(line, SetTrial) for item in line.items]
    assert len(measured) == len(set(measured))


@pytest.mark.parametrize("servers", [False, True])
def test_what_bf16_writes_is_written_once_and_read_by_every_verified_set(servers: bool) -> None:
    """A server need not write the same twice, and a set is compared with what BF16 said of that very text."""
    study = msgspec.structs.replace(
        LENIENT, generation_items=2, generated_tokens=8, rule=Rule(nll_margin=0.02, top1_margin=0.9)
    )

    def job() -> Searched:
        case = FakeCase(spec=uniform(), study=study, mantissa={1: 0.03, 4: 0.08, 5: 0.005})
        case.engine.one_arm_at_a_time = servers
        return Searched(case)

    whole = job()
    frontier = whole.run()
    assert len(frontier.verified) == 2
    written = [index for index, line in enumerate(whole.lines) if isinstance(line, ContinuationTrial)]
    assert len(written) == 2
    for kept in (written[0] + 1, written[1] + 1, len(whole.lines) - 1):
        again = job()
        assert again.run(whole.lines[:kept]) == frontier
        assert [*whole.lines[:kept], *again.lines] == whole.lines


def test_lines_of_other_conditions_or_texts_are_refused() -> None:
    job = searched(FakeCase(spec=uniform(), study=LENIENT), l1_4=0.3)
    job.run()
    first = cast(SetTrial, job.lines[0])
    with pytest.raises(CaseError, match="other conditions"):
        job.run([msgspec.structs.replace(first, conditions="others")])
    with pytest.raises(CaseError, match=r"line 1 of search\.jsonl"):
        job.run([msgspec.structs.replace(first, items=("a text of mine",) * len(first.items))])


@dataclass
class Serving:
    """The case's engine with other facts about it; it remembers the arms it was opened for."""

    case: FakeCase
    facts: dict[str, object]
    arms: list[Arm] = field(default_factory=list)

    def __getattr__(self, name: str) -> object:
        return getattr(self.case.engine, name)

    def info(self) -> object:
        return replace(self.case.engine.info(), **self.facts)  # type: ignore[arg-type]

    def open(self, arm: Arm) -> AbstractContextManager[Session]:
        self.arms.append(arm)
        return self.case.engine.open(arm)

    @property
    def servers(self) -> int:
        """That the arms take, BF16's aside: what is rounded head by head takes none."""
        return sum(any(isinstance(fmt, Fp8) and fmt.heads is None for fmt in arm.policy.formats) for arm in self.arms)


OTHERWISE_ROUNDED: list[dict[str, object]] = [{"probe_numerics": "storage"}, {"rounding": "towards zero"}]
"""What BF16's server cannot show of an FP8 server."""


@pytest.mark.parametrize("facts", [{}, *OTHERWISE_ROUNDED])
def test_servers_that_run_already_are_of_other_arms(facts: dict[str, object]) -> None:
    """A set is verified inside BF16's server, or not at all, and that is said."""
    job = searched(FakeCase(spec=uniform(), study=LENIENT), l1_4=0.3)
    serving = Serving(job.case, {"arms": frozenset({"bf16"}), **facts})
    frontier = job.run(engine=cast(Engine, serving))
    assert (frontier.status, len(frontier.found or ())) == ("unverified" if facts else "met", 1)
    assert serving.servers == 0
    assert bool(serving.arms) is not bool(facts)


@pytest.mark.parametrize("facts", [{}, *OTHERWISE_ROUNDED])
def test_an_engine_of_servers_starts_none_for_a_set_that_bf16s_can_round(facts: dict[str, object]) -> None:
    job = searched(FakeCase(spec=uniform(), study=LENIENT), l1_4=0.3)
    job.case.engine.one_arm_at_a_time = True
    serving = Serving(job.case, facts)
    frontier = job.run(engine=cast(Engine, serving))
    assert frontier.status == "met"
    assert len(serving.arms) == 2 * len(frontier.verified)
    assert serving.servers == (len(frontier.verified) if facts else 0)
    assert ("inside BF16's server" in " ".join(frontier.notes)) is not bool(facts)


def test_the_found_set_takes_the_place_of_the_suspects() -> None:
    job = searched(FakeCase(spec=uniform(), study=LENIENT), l1_4=0.3, l2_4=0.3)
    adopted = adopt(job.sensitivities, job.run())
    assert (adopted.suspects, adopted.suspects_stand_out) == ((4,), True)
    assert "keeps all margins jointly" in adopted.explanation
    assert adopt(job.sensitivities, None) == job.sensitivities


def test_the_cost_is_said_before() -> None:
    job = searched(FakeCase(spec=uniform(), study=LENIENT), l1_4=0.3, l2_4=0.3)
    case = job.case
    cost = cost_search(case.plan, case.split, case.items, case.spec)
    assert cost.read_tokens == cost.probed_tokens + cost.verified_tokens + cost.claimed_tokens
    frontier = job.run()
    assert frontier.measured_sets <= cost.sets
    assert len(frontier.verified) <= cost.verified


def test_every_task_has_its_part_in_the_cost() -> None:
    """One round of all arms reads what the items that choose come to, and what BF16 writes."""
    study = msgspec.structs.replace(
        LENIENT,
        buckets=(64,),
        needle_depths=(),
        window_needles=1,
        generation_items=2,
        generated_tokens=8,
    )
    case = FakeCase(spec=hybrid(window=36), study=study)
    cost = cost_search(case.plan, case.split, case.items, case.spec)
    items = choosing_items(case.split, study, case.engine.tokenizer, case.spec.windows)
    assert {item.task for item in items} == {"text", "window_inside", "window_past", "generation"}
    read = sum(len(item.request.token_ids) + item.continued for item in items)
    assert cost.verified_tokens == (cost.verified + 1) * read + 2 * 64
    assert cost.written_tokens == 16


def test_layers_probed_at_scale_1_alone_are_ranked_by_that() -> None:
    """The study's backend takes scales per head, and the engine that searches does not."""
    case = FakeCase(spec=uniform(), study=LENIENT, mantissa={2: 0.2})
    job = searched(case)
    case.engine.per_head_scales = False
    frontier = job.run()
    assert (frontier.scaling, frontier.found) == ("per_tensor", (2,))


@pytest.mark.parametrize("server", [(), ("VLLM_KV_CACHE_LAYOUT=BLHNC",)])
@pytest.mark.parametrize("facts", [{}, *OTHERWISE_ROUNDED[:1]])
def test_a_set_whose_server_needs_a_flag_waits_for_it(server: tuple[str, ...], facts: dict[str, object]) -> None:
    """To be stored: inside BF16's server it is verified without, and what the ablation will ask for is said."""
    job = searched(FakeCase(spec=hybrid(), study=LENIENT, mantissa={2: 0.4}))
    job.case.engine.one_arm_at_a_time = True
    frontier = job.run(engine=cast(Engine, Serving(job.case, {"server": server, **facts})))
    # Two full layers in BF16 hold fewer bytes than one: alone it would be padded.
    assert (frontier.found, frontier.status) == ((2, 5), "met" if server or not facts else "unverified")
    assert "VLLM_KV_CACHE_LAYOUT=BLHNC" in frontier.explanation
    told = [note for note in frontier.notes if note.startswith("the ablation has to be told")]
    assert bool(told) is (not server and not facts)


def test_what_was_chosen_keeps_the_margin_on_texts_that_it_never_saw() -> None:
    """Damage with a scatter by text, groups at random: of what is claimed nothing is shown to be wrong."""
    kept = 0
    for seed in range(10):
        draw = random.Random(seed)
        case = FakeCase(
            spec=uniform(), study=LENIENT, mantissa={layer: draw.lognormvariate(-5, 1) for layer in range(6)}
        )
        case.engine.together = {
            frozenset(draw.sample(range(6), draw.choice([2, 3]))): draw.lognormvariate(-3, 1) for _ in range(3)
        }
        frontier = Searched(case).run()
        found = frontier.found_row
        assert found is not None
        assert found.kl_status != "unmet"
        kept += found.kl_status == "met"
    assert kept >= 9


def test_a_memory_without_room_for_one_sequence_is_refused() -> None:
    study = msgspec.structs.replace(LENIENT, memory_bytes=1024)
    with pytest.raises(EngineError, match="not even in BF16"):
        searched(FakeCase(spec=uniform(), study=study)).run()


def test_no_stricter_set_is_sought_for_what_none_could_show() -> None:
    """One continuation has no interval, whatever the set; of two, stricter sets are sought."""

    def verified(items: int, nll_margin: float) -> int:
        rule = Rule(top1_margin=0.9, nll_margin=nll_margin)
        study = msgspec.structs.replace(LENIENT, generation_items=items, generated_tokens=8, rule=rule)
        frontier = Searched(FakeCase(spec=uniform(), study=study, mantissa={1: 0.03, 4: 0.08, 5: 0.005})).run()
        assert frontier.found is not None
        return len(frontier.verified)

    assert verified(1, nll_margin=0.05) == 1
    assert verified(1, nll_margin=0.02) > 1
