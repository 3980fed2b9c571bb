from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

import msgspec
import pytest

from kvtriage.cli.rules import SHIPPED, load_rule, shipped_rule
from kvtriage.errors import StudyError
from kvtriage.records.rule import Rule
from kvtriage.records.study import Study
from kvtriage.records.study_limits import validate_study


def test_strict_is_the_default() -> None:
    assert shipped_rule("strict") == Rule()


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_rule_names_every_key_and_is_valid(name: str) -> None:
    text = resources.files("kvtriage.records").joinpath("rules", f"{name}.toml").read_text(encoding="utf-8")
    assert set(tomllib.loads(text)) == set(Rule.__struct_fields__)
    assert load_rule(name).name == name
    validate_study(msgspec.structs.replace(Study(), rule=load_rule(name)))


def test_fanout_is_the_plain_one() -> None:
    plain = msgspec.structs.replace(Rule(), name="fanout", correction="none", range_forbids=False)
    assert shipped_rule("fanout") == plain


@pytest.mark.parametrize("text", ["kl_margin = 0.02", "[rule]\nkl_margin = 0.02"])
def test_a_file_is_a_rule_and_goes_by_its_own_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tight.toml"
    file.write_text(text)
    assert load_rule(str(file)) == Rule(name="tight", kl_margin=0.02)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("strikt", None, "there is no rule 'strikt'"),
        ("gone.toml", None, "cannot read"),
        ("rule.toml", "rule = 3", "is not a table"),
        ("rule.toml", "kl_margn = 3", "has an unknown key 'kl_margn'"),
        ("rule.toml", "= 3", "is not TOML"),
    ],
)
def test_what_is_no_rule(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(StudyError, match=said):
        load_rule(str(tmp_path / name) if name.endswith(".toml") else name)
