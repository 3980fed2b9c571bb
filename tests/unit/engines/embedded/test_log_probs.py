"""Divergences of whole distributions, tokens that cannot come among them."""

from __future__ import annotations

import math

import pytest
import torch

from kvtriage.engines.embedded.log_probs import LogProbs, normalise


def test_a_token_that_cannot_come_costs_nothing() -> None:
    """A logit of −∞, as models have for the padding of their vocabulary, makes no NaN."""
    reference = LogProbs(normalise(torch.tensor([[0.0, 0.0, -math.inf], [0.0, 1.0, 2.0]])))
    own = LogProbs(normalise(torch.tensor([[1.0, 0.0, -math.inf], [0.0, 1.0, 2.0]])))
    odds = math.e / (1 + math.e)
    expected = math.log(0.5) - 0.5 * (math.log(odds) + math.log(1 - odds))
    assert own.kl_from(reference) == pytest.approx((expected, 0.0), abs=1e-6)
    assert reference.kl_from(reference) == (0.0, 0.0)


def test_a_token_that_came_and_cannot_any_more_costs_everything() -> None:
    reference, own = (LogProbs(normalise(torch.tensor([row]))) for row in ([0.0, 0.0], [0.0, -math.inf]))
    assert own.kl_from(reference) == (math.inf,)
