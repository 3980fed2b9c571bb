"""`kvtriage plan` on whole models, against figures worked out by hand.

Each folder holds a config.json with the model's geometry and an expected.json. To add a model,
add a folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvtriage.cli.plan.command import plan_command

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
MODELS = sorted(path.parent.name for path in HERE.glob("*/expected.json"))


def plan(model: str, *more: str) -> str:
    arguments = json.loads((HERE / model / "expected.json").read_bytes())["arguments"]
    result = CliRunner().invoke(plan_command, [str(HERE / model), *arguments, *more], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("model", MODELS)
def test_json(model: str) -> None:
    expected: dict[str, Any] = json.loads((HERE / model / "expected.json").read_bytes())
    answer = json.loads(plan(model, "--json"))
    assert answer["worksheet"] == expected["worksheet"]
    (row,) = answer["capacity"]["rows"]
    assert [row["bf16_tokens"], row["fp8_tokens"], row["policy_tokens"]] == expected["capacity"]
    assert answer["vllm_args"] == expected["vllm_args"]


@pytest.mark.parametrize("model", MODELS)
def test_text(model: str) -> None:
    assert plan(model, "--explain") == (HERE / model / "plan.txt").read_text()


def test_the_reference_page_shows_what_the_command_prints() -> None:
    page = (DOCS / "reference" / "plan.md").read_text()
    assert plan("gpt_oss_20b") in page
    for paragraph in plan("gpt_oss_20b", "--explain").split("\n\n"):
        assert paragraph.strip() in page, paragraph


def test_the_concept_page_has_the_figures() -> None:
    page = (DOCS / "concepts" / "worksheet.md").read_text()
    worksheet = json.loads((HERE / "gpt_oss_20b" / "expected.json").read_bytes())["worksheet"]
    for key in ("retained_positions", "skipped_positions", "bf16_bytes", "fp8_bytes", "policy_bytes"):
        assert f"{worksheet[key]:,}" in page, key
    for figure in ("393,216", "1.99225", "771.0 MiB", "385.5 MiB", "387.0 MiB", "1.5 MiB", "1.333", "308", "7,392"):
        assert figure in page, figure
