"""lm-evaluation-harness on the arms of a case: local tasks, our engine, answers paired by document."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtriage.cli.case_folder.opening import open_case
from kvtriage.cli.main import main
from kvtriage.cli.wiring import Wiring
from kvtriage.engines.base import ScoreRequest, ScoreResponse
from kvtriage.engines.fake import FakeEngine, _FakeSession
from kvtriage.errors import EngineError
from kvtriage.records.evidence import Evidence
from kvtriage.records.imported import Imported

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is the extra lm-eval")

from kvtriage.engines.harness import SessionModel

# The harness and its data sets warn of their own matters.
pytestmark = pytest.mark.filterwarnings("ignore")

Fake = Callable[..., Callable[[], Wiring]]

CHOICE = """
task: colours
dataset_path: json
dataset_kwargs:
  data_files:
    test: DATA
output_type: multiple_choice
test_split: test
doc_to_text: "The sky at {{time}} is"
doc_to_choice: ["blue", "black"]
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
metadata:
  version: 3.0
"""

WRITTEN = """
task: echoes
dataset_path: json
dataset_kwargs:
  data_files:
    test: DATA
output_type: generate_until
test_split: test
doc_to_text: "Say {{time}}:"
doc_to_target: "{{time}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 4
  do_sample: false
metric_list:
  - metric: exact_match
metadata:
  version: 1.0
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = folder / "documents.json"
    data.write_text("".join(json.dumps({"time": f"{i} o'clock", "answer": i % 2}) + "\n" for i in range(8)))
    for name, text in (("colours", CHOICE), ("echoes", WRITTEN)):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    return folder


def measured(case: Path, study: Path, model: Path, traffic: Path, wiring: Callable[[], Wiring] | None = None) -> None:
    words = ["run", str(model), "--data", str(traffic), "--study", str(study), "--out", str(case)]
    assert main([*words, "--until", "ablate", "--threads", "1"], wiring) == 0


def imports(case: Path) -> dict[tuple[str, str], Imported]:
    with open_case(case, create=False) as there:
        return {(entry.arm, entry.task): entry for entry in there.imports()}


def test_every_candidate_of_the_real_engine_answers(
    tmp_path: Path, tiny_model: Path, traffic: Path, study_file: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = tmp_path / "case"
    measured(case, study_file, tiny_model, traffic)
    words = ["--tasks", "colours,echoes", "--include-path", str(tasks), "--threads", "1", "--limit", "6"]
    assert main(["lm-eval", str(case), *words, "--candidates", "fp8_unit"]) == 0
    seen = capsys.readouterr()
    assert "fp8_unit: colours acc: of 6 answers" in seen.out
    assert "fp8_unit: echoes exact_match" in seen.out
    found = imports(case)
    assert {(arm, task) for arm, task in found} == {
        (arm, task) for arm in ("bf16", "fp8_unit") for task in ("colours", "echoes")
    }
    for entry in found.values():
        assert len(entry.items) == 6
        assert entry.unscored == 0
        assert entry.conditions["engine"]
        assert entry.conditions["limit"] == "6"
    assert found["bf16", "colours"].conditions["task_version"] == "3.0"
    assert main(["decide", str(case)]) in (0, 3)
    reasons = json.loads((case / "verdict.json").read_bytes())["reasons"]
    assert {r["cell"] for r in reasons if r["clause"] == "imported"} == {"colours acc", "echoes exact_match"}


def test_texts_are_no_longer_than_servers_take(
    tmp_path: Path,
    tiny_model: Path,
    traffic: Path,
    study_file: Path,
    tasks: Path,
    fake: Fake,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, info, fitted = tmp_path / "case", FakeEngine.info, SessionModel._fitted
    measured(case, study_file, tiny_model, traffic, fake())
    monkeypatch.setattr(FakeEngine, "info", lambda self: dataclasses.replace(info(self), longest_text=100))
    limits = set()

    def seen(self: SessionModel, context: list[int], continuation: list[int]) -> tuple[int, ...]:
        limits.add(self._max_model_len)
        return fitted(self, context, continuation)

    monkeypatch.setattr(SessionModel, "_fitted", seen)
    words = ["--tasks", "colours", "--include-path", str(tasks), "--candidates", "fp8_unit"]
    assert main(["lm-eval", str(case), *words], fake()) == 0
    assert capsys.readouterr().err.count("these servers read 100 tokens") == 1
    assert limits == {100}


def test_an_interrupted_run_goes_on_and_comes_to_the_same_numbers(
    tmp_path: Path,
    tiny_model: Path,
    traffic: Path,
    study_file: Path,
    tasks: Path,
    fake: Fake,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed under the second arm: the first is not opened again, and of the second only the rest is asked."""
    score = _FakeSession.score
    asked: list[str] = []
    words = ["--tasks", "colours,echoes", "--include-path", str(tasks), "--candidates", "fp8_unit"]

    def run(name: str, most: int) -> int:
        def counted(self: _FakeSession, request: ScoreRequest) -> ScoreResponse:
            asked.append(self.arm.name)
            if len(asked) > most:
                raise EngineError("the server is gone", hint="a planted fault")
            return score(self, request)

        asked.clear()
        with monkeypatch.context() as patched:
            patched.setattr(_FakeSession, "score", counted)
            return main(["lm-eval", str(tmp_path / name), *words], fake())

    for name in ("whole", "killed"):
        measured(tmp_path / name, study_file, tiny_model, traffic, fake())
    assert run("whole", 1000) == 0
    each = asked.count("bf16")
    assert run("killed", each + 5) != 0
    assert not (tmp_path / "killed" / "imports.jsonl").exists()
    capsys.readouterr()
    assert run("killed", 1000) == 0
    assert asked == ["fp8_unit"] * (each - 5)
    told = capsys.readouterr().err
    assert "answers are already there, going on" in told
    assert "lm-eval under fp8_unit: the rest done in " in told
    assert (tmp_path / "killed" / "imports.jsonl").read_bytes() == (tmp_path / "whole" / "imports.jsonl").read_bytes()


def test_what_cannot_be_asked_is_one_sentence_each(
    tmp_path: Path,
    tiny_model: Path,
    traffic: Path,
    study_file: Path,
    tasks: Path,
    fake: Fake,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = tmp_path / "case"
    measured(case, study_file, tiny_model, traffic, fake())

    def refused(*words: str, code: int = 2) -> str:
        given = ["lm-eval", str(case), "--include-path", str(tasks), *words]
        assert main(given, fake()) == code
        return capsys.readouterr().err

    assert "lm-eval knows no task 'colors'" in refused("--tasks", "colors")
    assert "there is no arm 'bound' to ask" in refused("--tasks", "colours", "--candidates", "bound")
    (tasks / "echoes.yaml").write_text(
        (tasks / "echoes.yaml").read_text().replace("do_sample: false", "do_sample: true")
    )
    assert "asks for sampling" in refused("--tasks", "echoes")
    assert not (case / "imports.jsonl").exists()


def test_an_engine_that_the_case_was_not_measured_with_is_refused(
    tmp_path: Path,
    tiny_model: Path,
    traffic: Path,
    study_file: Path,
    tasks: Path,
    fake: Fake,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = tmp_path / "case"
    measured(case, study_file, tiny_model, traffic, fake())
    with open_case(case, create=False) as there:
        assert there.need(Evidence).conditions.engine == "fake"
    words = ["--tasks", "colours", "--include-path", str(tasks), "--threads", "1"]
    assert main(["lm-eval", str(case), *words]) == 2
    assert "this engine is not the one that the case was measured with" in capsys.readouterr().err
