from __future__ import annotations

from kvtriage.cli.plan.as_markdown import escape, render_markdown, table
from kvtriage.cli.plan.engine_flags import EngineFlags
from kvtriage.kvcache.allocator import Layout
from tests.unit.cli.plan.plans import answer_of, asked
from tests.unit.kvcache.readers.configs import GPT_OSS_20B


def test_tables_have_as_many_cells_as_their_header() -> None:
    answer = answer_of(GPT_OSS_20B, asked(skip="sliding_window"))
    text = render_markdown(answer, in_full=True)
    assert "| reported tokens | 464,665 | 929,341 | 695,981 |" in text
    tables = [part for part in text.split("\n\n") if part.startswith("|")]
    assert len(tables) == 6
    assert len(render_markdown(answer)) < len(text)
    for part in tables:
        assert len({line.replace("\\|", "").count("|") for line in part.splitlines()}) == 1


def test_a_refusal_is_said() -> None:
    text = render_markdown(answer_of(GPT_OSS_20B, asked(skip="1")))
    assert "**vLLM would not start** (AssertionError)" in text
    assert "`--disable-hybrid-kv-cache-manager`" in text
    assert "vllm serve" not in text


def test_what_is_assumed_and_noted_is_labelled_in_words() -> None:
    text = render_markdown(answer_of(GPT_OSS_20B, asked(skip="sliding_window")))
    assert "Neither config.json nor a flag says so; assumed:\n\n- scaling = per_head (" in text
    assert "\n- max_model_len = 32,768" in text
    assert "\n\nNote: no GPU was named" in text
    assert "said:" not in text


def test_a_band_is_told_as_one() -> None:
    text = render_markdown(answer_of(GPT_OSS_20B, asked(memories=(), gpu="h100", weights_gib="13")))
    assert "|  | at worst | likely | at best |" in text
    assert "A band, not a promise" in text


def test_what_to_paste_has_its_environment_and_every_rank_is_told() -> None:
    typed = EngineFlags(layout=Layout.BLHNC, tensor_parallel_size=16)
    text = render_markdown(answer_of(GPT_OSS_20B, asked(engine=typed)))
    assert "```\nVLLM_KV_CACHE_LAYOUT=BLHNC vllm serve MODEL --kv-cache-dtype fp8" in text
    assert "- on each of 16 ranks: 12 full layers: 1 of 8 KV heads, each on 2 ranks" in text


def test_nothing_ends_a_cell_or_begins_a_tag() -> None:
    assert escape("a|b<script>") == "a\\|b&lt;script>"
    assert table(("x",), [("a|b",)]) == "| x |\n|---|\n| a\\|b |"
