from __future__ import annotations

from tests.unit.kvcache.readers.models_page import PAGE, render


def test_the_page_says_what_the_readers_say() -> None:
    """Write it anew with: python -m tests.unit.kvcache.readers.models_page"""
    assert PAGE.read_text() == render()
