from __future__ import annotations

from kvtriage.cli.plan.as_markdown import escape, render_markdown, table
from tests.unit.cli.plan.plans import answer_of, asked
from tests.unit.kvcache.readers.configs import GPT_OSS_20B


def test_tables_have_as_many_cells_as_their_header() -> None:
    text = render_markdown(answer_of(GPT_OSS_20B, asked(skip="sliding_window")))
    assert "| reported tokens | 464,665 | 929,341 | 695,981 |" in text
    tables = [part for part in text.split("\n\n") if part.startswith("|")]
    assert len(tables) == 6
    for part in tables:
        assert len({line.replace("\\|", "").count("|") for line in part.splitlines()}) == 1


def test_a_refusal_is_said() -> None:
    text = render_markdown(answer_of(GPT_OSS_20B, asked(skip="1")))
    assert "**vLLM would not start** (AssertionError)" in text
    assert "`--disable-hybrid-kv-cache-manager`" in text


def test_nothing_ends_a_cell_or_begins_a_tag() -> None:
    assert escape("a|b<script>") == "a\\|b&lt;script>"
    assert table(("x",), [("a|b",)]) == "| x |\n|---|\n| a\\|b |"
