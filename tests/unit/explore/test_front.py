"""Sets grow by what is most worth it, and the best of them are those that nobody would pass over."""

from __future__ import annotations

from bench.explorer import hybrid
from kvtriage.explore.front import MOST_STEPS, build_front
from kvtriage.explore.policies import engine_args, policy_of
from kvtriage.explore.subject import Subject
from kvtriage.kvcache.allocator import Capacity
from kvtriage.kvcache.engine_args import reserve
from tests.unit.explore.subjects import ask, measured
from tests.unit.kvcache.models import GPT_OSS_20B
from tests.unit.report.cases import gemma_like, smollm_like


def test_no_best_set_is_beaten() -> None:
    for subject in (measured(gemma_like()), measured(smollm_like()), hybrid(12)):
        points = build_front(subject, ask(subject, scaling="unit", context="4096")).points
        best = [point for point in points if point.best]
        assert best
        for point in best:
            beaten = [o for o in points if o.tokens >= point.tokens and o.loss <= point.loss and o != point]
            assert all((o.tokens, o.loss) == (point.tokens, point.loss) for o in beaten)


def test_the_worst_layer_is_won_back_first() -> None:
    subject = measured(smollm_like())
    points = {point.name: point for point in build_front(subject, ask(subject, scaling="unit", context="4096")).points}
    assert points["1 most worth it in BF16"].skip_layers == (11,)
    assert points["all BF16"].loss == 0
    assert points["1 most worth it in BF16"].loss < points["all FP8"].loss


def test_every_point_is_priced_as_it_would_be_alone() -> None:
    subject = Subject("g", "g", GPT_OSS_20B)
    choice = ask(subject)
    for point in build_front(subject, choice).points:
        line = reserve(
            GPT_OSS_20B,
            policy_of(subject, point.skip_layers, choice.scaling),
            engine_args(subject, choice),
            choice.memory_bytes,
        )
        assert isinstance(line, Capacity)
        assert line.reported_tokens == point.tokens


def test_without_probes_layers_stand_in_for_damage() -> None:
    front = build_front(hybrid(12), ask(hybrid(12)))
    assert (front.loss_name, front.better) == ("layers in FP8", "fewer layers in FP8")
    assert {point.loss for point in front.points if point.name == "all FP8"} == {12.0}


def test_a_deep_model_has_no_more_points_than_anybody_reads() -> None:
    subject = hybrid(1000)
    assert len(build_front(subject, ask(subject)).points) <= MOST_STEPS + 8


def test_what_is_refused_is_left_out() -> None:
    assert build_front(hybrid(12), ask(hybrid(12), memory="1048576")).points == ()
