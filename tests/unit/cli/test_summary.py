"""What diagnose prints."""

from __future__ import annotations

import msgspec

from kvtriage.cli.summary import render_sensitivities
from tests.unit.stages.fake_case import STUDY, FakeCase, uniform


def test_the_worst_layers_come_first_and_estimates_are_marked() -> None:
    found = FakeCase(spec=uniform(), mantissa={4: 0.08, 1: 0.02}).diagnose()
    lines = render_sensitivities(found).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["4", "1"]
    assert "0 %, 0 %, 100 %" in lines[1]
    assert any(line.startswith("    4  ") for line in lines)
    assert "(~ estimated)" in lines
    assert found.findings[0] in lines
    assert lines[-1].endswith("measured.")


def test_without_an_anatomy_there_is_less_to_say() -> None:
    found = FakeCase(spec=uniform(), study=msgspec.structs.replace(STUDY, probes="exact")).diagnose()
    bare = msgspec.structs.replace(found, anatomy=(), repairs=(), findings=())
    text = render_sensitivities(bare)
    assert "~" not in text
    assert "%" not in text.splitlines()[1]
    assert text.splitlines()[-1].startswith("Suspects: ")
