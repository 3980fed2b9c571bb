"""A class of layers is priced once, and the price is that of each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.explorer import hybrid
from kvtriage.explore.choice import read_ranges
from kvtriage.explore.policies import engine_args, policy_of
from kvtriage.explore.subject import Subject
from kvtriage.explore.toggles import price_toggles
from kvtriage.kvcache.allocator import Capacity
from kvtriage.kvcache.engine_args import reserve
from kvtriage.kvcache.prices.explain import RequestPrice, price_request
from kvtriage.kvcache.spec import CacheSpec
from tests.unit.explore.subjects import ask
from tests.unit.kvcache.architectures import EVERY_KIND


@pytest.mark.parametrize("spec", EVERY_KIND)
@pytest.mark.parametrize("tp", ["1", "2"])
def test_a_toggle_is_the_difference_of_two_whole_prices(spec: CacheSpec, tp: str) -> None:
    subject = Subject("m", "m", spec)
    for kept in ((), subject.holders[::3], subject.holders[:-1]):
        choice = replace(ask(subject, tp=tp, context=str(min(4096, spec.max_model_len))), skip_layers=kept)
        args = engine_args(subject, choice)
        before = policy_of(subject, kept, choice.scaling)
        toggles = {layer: toggle for toggle in price_toggles(subject, choice) for layer in toggle.layers}
        assert tuple(sorted(toggles)) == subject.holders
        for layer, toggle in toggles.items():
            after = policy_of(subject, set(kept) ^ {layer}, choice.scaling)
            lines = [reserve(spec, policy, args, choice.memory_bytes) for policy in (before, after)]
            tokens = [line.reported_tokens for line in lines if isinstance(line, Capacity) and line.breaks is None]
            assert toggle.tokens == (tokens[1] - tokens[0] if len(tokens) == 2 else None)
            prices = [price_request(spec, policy, args, choice.context_len) for policy in (before, after)]
            held = [price.held.reserved_bytes for price in prices if isinstance(price, RequestPrice)]
            assert toggle.held_bytes == (held[1] - held[0] if len(held) == 2 else None)


def test_words_say_which_way_it_goes() -> None:
    subject = hybrid(12)
    full, sliding = (
        next(toggle for toggle in price_toggles(subject, ask(subject)) if layer in toggle.layers) for layer in (5, 0)
    )
    assert full.layers == read_ranges("5,11", 12)
    assert "vLLM would refuse" in full.text or full.text.startswith("+")
    assert "tokens" in sliding.text


def test_a_way_back_from_a_refusal_is_told() -> None:
    """One full layer alone cannot be kept beside windows of FP8: the engine refuses, and toggling it back starts."""
    subject = hybrid(12)
    now = ask(subject, skip="5")
    back = next(toggle for toggle in price_toggles(subject, now) if 5 in toggle.layers)
    assert back.refusal is None
    assert back.text.startswith(("vLLM would start, with", "-"))
