"""Every bad input: one sentence, one hint, its exit code, and nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtriage.cli.main import main
from kvtriage.cli.wiring import Wiring

Fake = Callable[..., Callable[[], Wiring]]


def _configure(model: Path, **changes: object) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _drop_key(model: Path) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "num_hidden_layers"}))


def _truncate(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _point_outside(model: Path) -> None:
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def _link_outside(model: Path, name: str) -> None:
    secret = model.parent / "secret"
    secret.write_text("{{ secret }}")
    (model / name).symlink_to(secret)


BROKEN_MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights missing": (lambda model: (model / "model.safetensors").unlink(), "model.safetensors"),
    "weights truncated": (_truncate, "model.safetensors"),
    "index leads outside": (_point_outside, "../elsewhere.safetensors"),
    "config missing": (lambda model: (model / "config.json").unlink(), "config.json"),
    "config is not JSON": (lambda model: (model / "config.json").write_text("{"), "config.json"),
    "config lacks a key": (_drop_key, "num_hidden_layers"),
    "architecture unknown": (lambda model: _configure(model, architectures=["HyenaForCausalLM"]), "HyenaForCausalLM"),
    "remote code": (lambda model: _configure(model, auto_map={"AutoModel": "m.M"}), "code of its own"),
    "layers too few": (lambda model: _configure(model, num_hidden_layers=3), "means 3 layers, and the weights hold"),
    "layers too many": (lambda model: _configure(model, num_hidden_layers=4096), "4 in model.layers (0 to 3)"),
    "weights quantised": (
        lambda model: _configure(model, quantization_config={"quant_method": "awq"}),
        "another method",
    ),
    "template from elsewhere": (lambda model: _link_outside(model, "chat_template.jinja"), "chat_template.jinja"),
    "tokenizer missing": (lambda model: (model / "tokenizer.json").unlink(), "tokenizer"),
}


def _refused(capsys: pytest.CaptureFixture[str], out: Path, args: list[str], code: int = 2) -> str:
    """Run `args`, check the form of the answer, and return its sentence."""
    before = sorted(out.parent.rglob("*"))
    assert main(args) == code
    seen = capsys.readouterr()
    assert seen.out == ""
    lines = seen.err.splitlines()
    assert [line.split(":")[0] for line in lines[-2:]] == ["error", "hint"], seen.err
    assert sum(line.startswith(("error:", "hint:")) for line in lines) == 2
    assert "Traceback" not in seen.err
    assert len(lines[-1]) > len("hint: ")
    assert sorted(out.parent.rglob("*")) == before, "something was left behind"
    return lines[-2]


@pytest.mark.parametrize("how", BROKEN_MODELS)
def test_a_broken_model(
    capsys: pytest.CaptureFixture[str], model_copy: Path, traffic: Path, tmp_path: Path, study_file: Path, how: str
) -> None:
    break_it, named = BROKEN_MODELS[how]
    break_it(model_copy)
    out = tmp_path / "cases" / "case"
    out.parent.mkdir()
    args = ["run", str(model_copy), "--data", str(traffic), "--out", str(out), "--study", str(study_file)]
    assert named in _refused(capsys, out, args)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "empty"),
        ('{"txet": "hello"}\n', "line 1"),
        ("not json\n", "line 1"),
        ('{"text": "a few words"}\n' * 3, "needs 512"),
    ],
)
def test_bad_data(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path, study_file: Path, text: str, named: str
) -> None:
    data, out = tmp_path / "traffic.jsonl", tmp_path / "case"
    data.write_text(text)
    args = ["run", str(tiny_model), "--data", str(data), "--out", str(out), "--study", str(study_file)]
    assert named in _refused(capsys, out, args)


def test_contexts_beyond_the_limit(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, traffic: Path, tmp_path: Path, study_file: Path
) -> None:
    out = tmp_path / "case"
    args = ["run", str(tiny_model), "--data", str(traffic), "--out", str(out), "--study", str(study_file)]
    assert "4,096 tokens" in _refused(capsys, out, [*args, "--buckets", "256,4096"])


@pytest.mark.parametrize("until", ["plan", "report"])
def test_a_device_that_is_not_there(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, traffic: Path, tmp_path: Path, study_file: Path, until: str
) -> None:
    out = tmp_path / "case"
    args = ["run", str(tiny_model), "--data", str(traffic), "--out", str(out), "--study", str(study_file)]
    assert "abacus" in _refused(capsys, out, [*args, "--until", until, "--device", "abacus"])


@pytest.mark.parametrize(("until", "code"), [("ablate", 2), ("plan", 0)])
def test_open_loops_on_an_engine_that_answers_one_after_another(
    capsys: pytest.CaptureFixture[str],
    tiny_model: Path,
    traffic: Path,
    tmp_path: Path,
    study_file: Path,
    until: str,
    code: int,
) -> None:
    """What comes before may be done by any engine."""
    study, out = tmp_path / "loaded.toml", tmp_path / "case"
    study.write_text("request_rates = [2.0]\n" + study_file.read_text())
    args = ["run", str(tiny_model), "--data", str(traffic), "--out", str(out), "--study", str(study), "--until", until]
    if code:
        assert "one after another" in _refused(capsys, out, args)
    else:
        assert main(args) == 0


def test_out_is_wanted(capsys: pytest.CaptureFixture[str], tiny_model: Path, traffic: Path, tmp_path: Path) -> None:
    assert "--out" in _refused(capsys, tmp_path / "case", ["run", str(tiny_model), "--data", str(traffic)])


def test_a_folder_with_other_files(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, traffic: Path, tmp_path: Path
) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter.tex").write_text("mine")
    args = ["run", str(tiny_model), "--data", str(traffic), "--out", str(out)]
    assert "chapter.tex" in _refused(capsys, out, args)


@pytest.mark.parametrize("verb", ["calibrate", "diagnose", "ablate", "decide", "report"])
def test_a_verb_without_a_case(capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str) -> None:
    out = tmp_path / "case"
    assert "not a case folder" in _refused(capsys, out, [verb, str(out)])


@pytest.mark.parametrize("verb", ["run", "plant"])
def test_nothing_is_written_into_the_model(
    capsys: pytest.CaptureFixture[str], model_copy: Path, traffic: Path, verb: str
) -> None:
    out = model_copy / "new"
    args = {
        "run": ["run", str(model_copy), "--data", str(traffic)],
        "plant": ["faults", "plant", str(model_copy), "--fault", "v_underflow"],
    }[verb]
    assert "lies in the model folder" in _refused(capsys, out, [*args, "--out", str(out)])


@pytest.mark.parametrize("what", ["model", "data", "out"])
@pytest.mark.parametrize("name", ["a" * 5000, os.fsdecode(b"m\xff")], ids=["too long", "not UTF-8"])
def test_a_path_that_no_record_can_hold(
    capsys: pytest.CaptureFixture[str],
    model_copy: Path,
    traffic: Path,
    tmp_path: Path,
    study_file: Path,
    what: str,
    name: str,
) -> None:
    places = {"model": model_copy, "data": traffic, "out": tmp_path / "case"}
    if len(name) < 255 and what == "model":
        places[what] = Path(shutil.copytree(model_copy, tmp_path / name))
    else:
        places[what] = tmp_path / name
    args = ["run", str(places["model"]), "--data", str(places["data"]), "--study", str(study_file)]
    assert _refused(capsys, tmp_path / "case", [*args, "--out", str(places["out"])]).isprintable()


@pytest.fixture
def calibrated(tiny_model: Path, traffic: Path, tmp_path: Path, study_file: Path, fake: Fake) -> Path:
    """A case with scales.json."""
    args = ["run", str(tiny_model), "--data", str(traffic), "--study", str(study_file), "--until", "calibrate"]
    assert main([*args, "--out", str(tmp_path / "case")], fake()) == 0
    return tmp_path / "case"


@pytest.mark.parametrize("out", ["case/plan.json", "case/new.json", "mine.txt", "nodir/x.json", "", "/"])
def test_export_writes_over_nothing(
    capsys: pytest.CaptureFixture[str], calibrated: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(calibrated.parent)
    Path("mine.txt").write_text("precious")
    plan = (calibrated / "plan.json").read_bytes()
    capsys.readouterr()
    _refused(capsys, calibrated, ["export", str(calibrated), "--format", "sglang", "--out", out])
    assert Path("mine.txt").read_text() == "precious"
    assert (calibrated / "plan.json").read_bytes() == plan


def test_an_edited_checkpoint_is_told_and_its_hint_works(
    capsys: pytest.CaptureFixture[str], calibrated: Path, fake: Fake
) -> None:
    config = calibrated / "checkpoint" / "config.json"
    whole = config.read_bytes()
    _configure(calibrated / "checkpoint", hidden_size=5)
    capsys.readouterr()
    assert main(["calibrate", str(calibrated)], fake()) == 2
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert error.startswith("error: checkpoint is not the one that belongs to scales.json: ")
    assert f"remove {calibrated / 'checkpoint'} and run" in hint
    shutil.rmtree(calibrated / "checkpoint")
    assert main(["calibrate", str(calibrated)], fake()) == 0
    assert config.read_bytes() == whole
