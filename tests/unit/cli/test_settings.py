from __future__ import annotations

from pathlib import Path

import pytest

from kvtriage.cli.main import main
from kvtriage.cli.settings import QUICK, load_study
from kvtriage.errors import StudyError
from kvtriage.records.study import Study


def test_nothing_said_gives_the_defaults() -> None:
    assert load_study(None, {}, quick=False) == Study()


def test_a_flag_wins_over_the_file_and_the_file_over_quick(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text("items_per_bucket = 6\nprobe_items = 3\n[rule]\nkl_margin = 0.1\n")
    study = load_study(file, {"items_per_bucket": 5}, quick=True)
    assert (study.items_per_bucket, study.probe_items, study.rule.kl_margin) == (5, 3, 0.1)
    assert study.calibration_items == QUICK["calibration_items"]


def test_a_study_table_counts_as_said(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text("[study]\nitems_per_bucket = 6\n")
    assert load_study(file, {}, quick=True).items_per_bucket == 6


@pytest.mark.parametrize(
    ("text", "named"),
    [("items = = 3", "is not TOML"), ("items_per_buckets = 3", "items_per_buckets"), ("buckets = []", "buckets")],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "study.toml"
    file.write_text(text)
    with pytest.raises(StudyError, match=named):
        load_study(file, {}, quick=False)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="cannot read"):
        load_study(tmp_path / "none.toml", {}, quick=False)


@pytest.mark.parametrize(
    ("flag", "value", "named"),
    [
        ("--buckets", "256,many", "is not a list of token counts"),
        ("--memory", "16 elephants", "is not an amount"),
        ("--memory", "0.5b", "is not an amount"),
        ("--threads", "1000000000", "1000000000 threads on a machine of"),
    ],
)
def test_a_wrong_flag_is_refused(capsys: pytest.CaptureFixture[str], flag: str, value: str, named: str) -> None:
    assert main(["run", "m", "--data", "d", "--out", "c", flag, value]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert named in error
    assert hint == "hint: 'kvtriage run --help' shows how to call it"


def test_a_rule_table_may_begin_from_a_shipped_rule(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text('[rule]\nname = "fanout"\nkl_margin = 0.02\n')
    rule = load_study(file, {}, quick=False).rule
    assert (rule.name, rule.kl_margin, rule.correction, rule.range_forbids) == ("fanout", 0.02, "none", False)
    file.write_text('[rule]\nname = "lenient"\n')
    with pytest.raises(StudyError, match="no rule 'lenient'"):
        load_study(file, {}, quick=False)


def test_a_rule_is_given_once(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text("items_per_bucket = 6\n")
    assert load_study(file, {}, quick=False, rule="fanout").rule.name == "fanout"
    file.write_text("[rule]\nkl_margin = 0.02\n")
    with pytest.raises(StudyError, match="--rule gives another"):
        load_study(file, {}, quick=False, rule="fanout")
