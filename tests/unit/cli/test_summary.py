"""What is printed: the verdict in five lines, whole in a pipe and folded on a terminal; what diagnose found."""

from __future__ import annotations

import msgspec
import pytest

from kvtriage.cli.summary import print_told, render_choice, render_scales, render_sensitivities, render_verdict
from kvtriage.records.scales import HeldOutRow
from kvtriage.records.verdict import RepairChoice
from tests.unit.report.cases import gemma_like, smollm_like
from tests.unit.stages.fake_case import STUDY, FakeCase, uniform


def test_in_a_pipe_each_of_the_five_is_one_line() -> None:
    case = smollm_like()
    told = render_verdict(case.verdict, case.plan).splitlines()
    assert [line[:9].strip() for line in told[:5]] == ["verdict", "choice", "why", "cache", "next"]
    assert told[5:] == ["", "vllm serve case/checkpoint --kv-cache-dtype fp8"]


def test_terms_are_explained_beside_what_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    print_told("drifts 0.0109 nats per token")
    seen = capsys.readouterr()
    assert seen.out == "drifts 0.0109 nats per token\n"
    assert seen.err.startswith("note: nats per token: ")
    assert len(seen.err.splitlines()) == 1
    print_told("stays with BF16")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("width", [40, 80])
def test_on_a_terminal_lines_are_folded_and_hang(width: int) -> None:
    case = gemma_like()
    told = render_verdict(case.verdict, case.plan, width).splitlines()
    assert max(len(line) for line in told[:-1]) <= width
    assert " ".join(" ".join(told).split()) == " ".join(render_verdict(case.verdict, case.plan).split())
    names = {line[:9].strip() for line in told[: told.index("")]}
    assert names == {"", "verdict", "choice", "why", "cache", "next"}


def test_hostile_text_is_one_printable_line() -> None:
    case = smollm_like()
    hostile = "x\x1b[2J\nchoice   none\u202e"
    verdict = msgspec.structs.replace(case.verdict, headline=hostile, next_step=hostile, vllm_args=(hostile,))
    told = render_verdict(verdict, case.plan)
    assert len(told.splitlines()) == 7
    assert told.replace("\n", "").isprintable()


def test_a_choice_names_its_layers() -> None:
    assert render_choice(None, 18) == "none"
    choice = RepairChoice(scaling="per_head", skip_layers=(5, 11))
    assert render_choice(choice, 18) == "FP8 with per-head scales, 2 of 18 layers in BF16 (5, 11)"


def test_the_worst_layers_come_first_and_estimates_are_marked() -> None:
    found = FakeCase(spec=uniform(), mantissa={4: 0.08, 1: 0.02}).diagnose()
    lines = render_sensitivities(found).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["4", "1"]
    assert "0 %, 0 %, 100 %" in lines[1]
    assert any(line.startswith("    4  ") for line in lines)
    assert "(~ estimated)" in lines
    assert found.findings[0] in lines
    assert lines[-1].endswith("of the price of measuring all.")
    assert any(line.startswith("(dB: signal over the noise") for line in lines)


def test_the_worst_head_of_each_scaling_is_shown() -> None:
    scales = smollm_like().scales
    rows = tuple(
        HeldOutRow(scaling=scaling, layer_idx=0, tensor="v", head=head, saturated=share, below_normal=0.5, amax=1.0)
        for scaling, worst in (("unit", 0.25), ("per_tensor", 0.031), ("per_head", 0.0))
        for head, share in enumerate((worst / 2, worst))
    )
    lines = render_scales(msgspec.structs.replace(scales, held_out=rows)).splitlines()
    assert [line.split() for line in lines] == [
        ["held-out", "text,", "worst", "head", "scale", "1", "per", "tensor", "per", "head"],
        ["K", "saturated", "-", "-", "-"],
        ["K", "below", "the", "normal", "range", "-", "-", "-"],
        ["V", "saturated", "25.0", "%", "3.1", "%", "0", "%"],
        ["V", "below", "the", "normal", "range", "50.0", "%", "50.0", "%", "50.0", "%"],
    ]
    assert len({len(line) for line in lines}) == 1


def test_without_an_anatomy_there_is_less_to_say() -> None:
    found = FakeCase(spec=uniform(), study=msgspec.structs.replace(STUDY, probes="exact")).diagnose()
    bare = msgspec.structs.replace(found, anatomy=(), repairs=(), findings=())
    text = render_sensitivities(bare)
    assert "~" not in text
    assert "%" not in text.splitlines()[1]
    assert text.splitlines()[-1].startswith("Suspects: ")
