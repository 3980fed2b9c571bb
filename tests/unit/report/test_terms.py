"""Terms are explained where they stand, and only there."""

from __future__ import annotations

from kvtriage.report import render_comparison
from kvtriage.report.terms import explain_terms
from tests.unit.report.cases import render, smollm_like, view_of


def test_only_what_is_said_is_explained() -> None:
    assert explain_terms(["Stay with BF16."]) == ()
    both = explain_terms(["0.1 nats per token", "scale-free bound"])
    assert [meaning.partition(":")[0] for meaning in both] == ["Nats per token", "The scale-free bound"]
    assert explain_terms(["near the scale-free bound"]) == both[1:]


def test_two_cases_side_by_side_share_one_explanation() -> None:
    view = view_of(smollm_like())
    (nats,) = explain_terms(["nats per token"])
    assert render_comparison(view, view, ("one", "other")).html.count(nats.partition("'")[0]) == 1


def test_the_page_explains_what_its_first_sentences_say() -> None:
    html = render(smollm_like())
    (nats,) = explain_terms(["nats per token"])
    assert 0 < html.index('<dl class="brief">') < html.index(nats.partition("'")[0]) < html.index('id="price"')
