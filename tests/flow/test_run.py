"""The whole job through the door: stopped, gone on with, and verb by verb."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtriage.cli.case_folder.opening import open_case
from kvtriage.cli.main import main
from kvtriage.cli.wiring import Wiring

Fake = Callable[..., Callable[[], Wiring]]

RECORDS = ("plan.json", "scales.json", "sensitivities.json", "evidence.json", "verdict.json")


@pytest.fixture
def args(tiny_model: Path, traffic: Path, study_file: Path, tmp_path: Path) -> list[str]:
    """`kvtriage run` on the tiny model into tmp_path/case."""
    return [
        *("run", str(tiny_model), "--data", str(traffic)),
        *("--study", str(study_file), "--out", str(tmp_path / "case"), "--items", "8"),
    ]


def _measured(case: Path) -> dict[str, object]:
    """What a case says, without what a run costs: its memory, and hashes of records that hold it."""
    found: dict[str, object] = {"trials.jsonl": (case / "trials.jsonl").read_bytes()}
    for name in RECORDS:
        record = json.loads((case / name).read_bytes())
        found[name] = {key: value for key, value in record.items() if key not in ("peak_bytes", "inputs")}
    return found


def _files(case: Path) -> dict[str, bytes]:
    return {name: (case / name).read_bytes() for name in (*RECORDS, "trials.jsonl")}


class TestRun:
    def test_the_real_engine_from_end_to_end(
        self, args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code = main([*args, "--threads", "1"])
        seen = capsys.readouterr()
        case = tmp_path / "case"
        verdict = json.loads((case / "verdict.json").read_bytes())
        assert code == {"decided": 0, "cannot_tell": 3}[verdict["status"]], seen.err
        first = [line.split(" ")[0] for line in seen.out.splitlines()[:5]]
        assert first == ["verdict", "choice", "why", "cache", "next"]
        assert (verdict["choice"] is None) == (code == 3)
        assert {entry.name for entry in case.iterdir()} == {
            *(*RECORDS, "probes.jsonl", "trials.jsonl", "report.html", "report.json", ".lock"),
            *("checkpoint", "checkpoint-per-tensor"),
        }
        for stage in ("engine", "calibrate", "diagnose", "ablate", "decide", "report"):
            assert f"{stage}: done in " in seen.err
        assert "kv_cache_scheme" in (case / "checkpoint" / "config.json").read_text()

    def test_a_checkpoint_with_scales_of_its_own_is_studied_with_a_warning(
        self, args: list[str], traffic: Path, study_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([*args, "--threads", "1", "--until", "calibrate"]) == 0
        scaled, case = tmp_path / "case" / "checkpoint", tmp_path / "second"
        again = ["run", str(scaled), "--data", str(traffic), "--study", str(study_file), "--out", str(case)]
        assert "engine: layers are streamed from disk" in capsys.readouterr().err
        assert main([*again, "--threads", "1"]) in (0, 3)
        said = "already switches the engine's auto cache dtype to FP8 (quantization_config of compressed-tensors "
        assert said in capsys.readouterr().err
        assert said in json.loads((case / "plan.json").read_bytes())["warnings"][0]
        assert (case / "verdict.json").exists()
        assert not {"checkpoint", "checkpoint-per-tensor"} & {entry.name for entry in case.iterdir()}

    def test_flags_never_name_a_checkpoint_that_is_not_there(self, args: list[str], tmp_path: Path, fake: Fake) -> None:
        main([*args, "--until", "ablate"], wiring=fake(spread={1: 0.4}))
        shutil.rmtree(tmp_path / "case" / "checkpoint")
        assert main(["decide", str(tmp_path / "case")]) == 0
        verdict = json.loads((tmp_path / "case" / "verdict.json").read_bytes())
        assert verdict["choice"] == {"scaling": "per_head", "skip_layers": []}
        assert verdict["vllm_args"][0] == "--kv-cache-dtype"

    def test_a_case_is_decided_by_the_rule_it_was_begun_with(
        self, args: list[str], tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([*args, "--rule", "fanout"], wiring=fake()) == 0
        case = tmp_path / "case"
        for record in ("plan.json", "verdict.json"):
            found = json.loads((case / record).read_bytes())
            assert (found["study"]["rule"]["name"] if "study" in found else found["rule"]) == "fanout"
        assert main(args, wiring=fake()) == 2
        assert "rule.name is fanout there and strict here" in capsys.readouterr().err
        assert main(["decide", str(case), "--explain"]) == 0
        assert "rule fanout" in capsys.readouterr().out

    def test_a_decided_verdict_ends_with_the_command_to_paste(
        self, args: list[str], tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(args, wiring=fake()) == 0
        out = capsys.readouterr().out.splitlines()
        assert len(out) == 7
        assert out[-1].startswith("vllm serve ")
        assert "--kv-cache-dtype fp8" in out[-1]
        verdict = json.loads((tmp_path / "case" / "verdict.json").read_bytes())
        assert verdict["choice"] == {"scaling": "unit", "skip_layers": []}
        assert verdict["repair"] == "none"

    @pytest.mark.parametrize(
        ("damage", "scaling", "folder"),
        [
            ({"range_": {1: 0.4}}, "per_tensor", "checkpoint-per-tensor"),
            ({"spread": {1: 0.4}}, "per_head", "checkpoint"),
        ],
    )
    def test_the_command_names_the_checkpoint_that_holds_the_scales(
        self,
        args: list[str],
        tmp_path: Path,
        fake: Fake,
        damage: dict[str, dict[int, float]],
        scaling: str,
        folder: str,
    ) -> None:
        assert main(args, wiring=fake(**damage)) == 0
        verdict = json.loads((tmp_path / "case" / "verdict.json").read_bytes())
        assert verdict["choice"] == {"scaling": scaling, "skip_layers": []}
        assert verdict["vllm_args"][0] == str(tmp_path / "case" / folder)

    def test_a_finished_case_is_left_alone(
        self, args: list[str], tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(args, wiring=fake())
        before, first = _files(tmp_path / "case"), capsys.readouterr().out
        assert main(args, wiring=fake(after=0)) == 0
        seen = capsys.readouterr()
        assert _files(tmp_path / "case") == before
        assert seen.out == first
        for name in RECORDS[1:]:
            assert f"{name} is already there" in seen.err

    def test_each_verb_alone_gives_the_same(self, args: list[str], tmp_path: Path, fake: Fake) -> None:
        main(args, wiring=fake())
        whole = _measured(tmp_path / "case")
        (tmp_path / "case").rename(tmp_path / "whole")
        case = str(tmp_path / "case")
        assert main([*args, "--until", "plan"], wiring=fake()) == 0
        assert {entry.name for entry in (tmp_path / "case").iterdir()} == {"plan.json", ".lock"}
        for verb in ("calibrate", "diagnose", "ablate", "decide", "report"):
            assert main([verb, case], wiring=fake()) == 0
        assert _measured(tmp_path / "case") == whole
        assert (tmp_path / "case" / "report.html").exists()

    def test_calibrate_says_what_it_found_and_what_it_warns_of(
        self, args: list[str], study_file: Path, tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
    ) -> None:
        short = tmp_path / "short.toml"
        short.write_text(study_file.read_text().replace("calibration_tokens = 512", "calibration_tokens = 256"))
        args = [str(short) if word == str(study_file) else word for word in args]
        main([*args, "--until", "plan"], wiring=fake())
        capsys.readouterr()
        case = tmp_path / "case"
        assert main(["calibrate", str(case)], wiring=fake()) == 0
        seen = capsys.readouterr()
        assert [line.split()[0] for line in seen.out.splitlines()] == ["held-out", "K", "K", "V", "V"]
        assert "warning: calibrated on texts of 256 tokens while the study reaches 512" in seen.err
        for scales, name in (("per head", "checkpoint"), ("per tensor", "checkpoint-per-tensor")):
            assert f"checkpoint for vLLM, scales {scales}: {case / name}\n" in seen.err

    def test_scales_are_not_passed_off_as_those_of_another_arithmetic(
        self, args: list[str], tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main([*args, "--until", "calibrate"], wiring=fake())
        capsys.readouterr()
        calibrate = ["calibrate", str(tmp_path / "case")]
        assert main(calibrate, wiring=fake(after=0)) == 0
        assert main([*calibrate, "--compute-dtype", "bfloat16"], wiring=fake(after=0)) == 2
        error, hint = capsys.readouterr().err.splitlines()[-2:]
        assert error == "error: scales.json was made in float64, and no verb edits an earlier record"
        assert hint == "hint: start a new case folder, or leave --compute-dtype away"

    @pytest.mark.parametrize("verb", ["calibrate", "diagnose", "search"])
    def test_until_a_verb_prints_what_it_prints_alone(
        self, verb: str, args: list[str], tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([*args, "--until", verb], wiring=fake(mantissa={2: 0.5})) == 0
        told = capsys.readouterr().out
        assert main([verb, str(tmp_path / "case")], wiring=fake(mantissa={2: 0.5})) == 0
        assert told == capsys.readouterr().out != ""

    def test_decide_prints_the_record(
        self, args: list[str], tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(args, wiring=fake())
        capsys.readouterr()
        assert main(["decide", str(tmp_path / "case"), "--json"]) == 0
        assert capsys.readouterr().out == (tmp_path / "case" / "verdict.json").read_text()

    def test_export(self, args: list[str], tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
        main([*args, "--until", "calibrate"], wiring=fake())
        capsys.readouterr()
        file = tmp_path / "kv.json"
        export = ["export", str(tmp_path / "case"), "--format", "sglang", "--out", str(file), "--tp-size", "2"]
        assert main(export) == 0
        assert capsys.readouterr().out == f"{file}\n"
        factors = json.loads(file.read_bytes())["kv_cache"]["scaling_factor"]
        assert factors.keys() == {"0", "1"}
        assert factors["0"].keys() == {"0", "1", "2", "3"}


class TestDryRun:
    def test_it_names_the_arms_and_writes_nothing(
        self, args: list[str], tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([*args, "--dry-run"], wiring=fake()) == 0
        rows = [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()]
        assert rows == [
            *("calibrate", "diagnose", "bf16", "bf16_repeat", "fp8", "fp8_skip", "bound", "total"),
        ]
        assert list(tmp_path.iterdir()) == []

    def test_after_diagnose_it_knows_the_layers(
        self, args: list[str], tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main([*args, "--until", "diagnose"], wiring=fake(mantissa={2: 0.5}))
        before = sorted((tmp_path / "case").iterdir())
        capsys.readouterr()
        assert main(["ablate", str(tmp_path / "case"), "--dry-run"], wiring=fake()) == 0
        assert "layer 2 in BF16" in capsys.readouterr().out
        assert sorted((tmp_path / "case").iterdir()) == before


class TestStopped:
    @pytest.mark.parametrize("after", [0, 1, 2, 15, 40, 75])
    def test_an_interrupted_job_goes_on_to_the_same_end(
        self, args: list[str], tmp_path: Path, fake: Fake, after: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(args, wiring=fake())
        whole = _measured(tmp_path / "case")
        (tmp_path / "case").rename(tmp_path / "whole")
        assert main(args, wiring=fake(after=after)) == 130
        assert "stopped; run the same command to go on" in capsys.readouterr().err
        assert not (tmp_path / "case" / "evidence.json").exists()
        assert main(args, wiring=fake()) == 0
        assert _measured(tmp_path / "case") == whole

    def test_a_killed_process_goes_on_to_the_same_end(self, args: list[str], tmp_path: Path, fake: Fake) -> None:
        main(args, wiring=fake())
        whole = _measured(tmp_path / "case")
        (tmp_path / "case").rename(tmp_path / "whole")
        script = (
            "import contextlib, sys, time\n"
            "from kvtriage.cli.wiring import Wiring\n"
            "from kvtriage.cli.main import main\n"
            "from kvtriage.engines.fake import FakeEngine, FakeTokenizer\n"
            "class Slow(FakeEngine):\n"
            "    def open(self, arm):\n"
            "        time.sleep(0.02)\n"
            "        return super().open(arm)\n"
            "@contextlib.contextmanager\n"
            "def open_engine(folder, spec, **how):\n"
            "    yield Slow(spec)\n"
            "wiring = lambda: Wiring(lambda folder, trust: FakeTokenizer(), open_engine)\n"
            "sys.exit(main(sys.argv[1:], wiring=wiring))\n"
        )
        trials = tmp_path / "case" / "trials.jsonl"
        with subprocess.Popen([sys.executable, "-c", script, *args], stderr=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 60
            while not (trials.exists() and trials.read_bytes().count(b"\n") >= 7):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.005)
            assert main(args, wiring=fake()) == 5
            process.send_signal(signal.SIGKILL)
        kept = trials.read_bytes()
        assert not (tmp_path / "case" / "evidence.json").exists()
        assert main(args, wiring=fake()) == 0
        assert trials.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
        assert _measured(tmp_path / "case") == whole

    @pytest.mark.parametrize("after", [1, 4, 9])
    def test_a_full_disk_is_said_and_gone_on_from(
        self,
        args: list[str],
        tmp_path: Path,
        fake: Fake,
        after: int,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        real, calls = os.fsync, iter(range(10_000))

        def fill_up(handle: int) -> None:
            if next(calls) >= after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(handle)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fill_up)
            assert main(args, wiring=fake()) == 6
        assert "No space left on device" in capsys.readouterr().err
        assert main(args, wiring=fake()) == 0


class TestRefused:
    def test_two_processes_on_one_case(
        self, args: list[str], tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main([*args, "--until", "plan"], wiring=fake())
        capsys.readouterr()
        with open_case(tmp_path / "case", create=False):
            assert main(args, wiring=fake()) == 5
        assert capsys.readouterr().err.splitlines()[-2].startswith("error: another kvtriage process is working on")

    def test_a_case_of_another_model(
        self, args: list[str], model_copy: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main([*args, "--until", "plan"], wiring=fake())
        weights = bytearray((model_copy / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (model_copy / "model.safetensors").write_bytes(weights)
        assert main([args[0], str(model_copy), *args[2:]], wiring=fake()) == 2
        assert "is a case of another model" in capsys.readouterr().err

    def test_a_case_of_other_data(
        self, args: list[str], traffic: Path, tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main([*args, "--until", "plan"], wiring=fake())
        other = tmp_path / "other.jsonl"
        other.write_bytes(traffic.read_bytes() + b'{"text": "one more"}\n')
        assert main([str(other) if word == str(traffic) else word for word in args], wiring=fake()) == 2
        assert "is a case of another data set" in capsys.readouterr().err

    def test_a_case_of_another_study(self, args: list[str], fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
        main([*args, "--until", "plan"], wiring=fake())
        assert main([*args, "--items", "3"], wiring=fake()) == 2
        assert "another study: items_per_bucket is 8 there and 3 here" in capsys.readouterr().err

    def test_data_that_changed_since(
        self, args: list[str], traffic: Path, tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
    ) -> None:
        own = tmp_path / "own.jsonl"
        own.write_bytes(traffic.read_bytes())
        args = [str(own) if word == str(traffic) else word for word in args]
        main([*args, "--until", "plan"], wiring=fake())
        own.write_bytes(traffic.read_bytes() + b'{"text": "one more"}\n')
        assert main(["calibrate", str(tmp_path / "case")], wiring=fake()) == 2
        assert "own.jsonl changed after plan.json was made from it" in capsys.readouterr().err

    def test_an_edited_record(
        self, args: list[str], tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main([*args, "--until", "diagnose"], wiring=fake())
        scales = tmp_path / "case" / "scales.json"
        scales.write_text(scales.read_text() + " ")
        assert main(["ablate", str(tmp_path / "case")], wiring=fake()) == 2
        assert "scales.json changed after sensitivities.json was made from it" in capsys.readouterr().err

    def test_a_verb_too_early(
        self, args: list[str], tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def reads_nothing() -> Wiring:
            raise AssertionError("model and text are read for nothing")

        main([*args, "--until", "plan"], wiring=fake())
        for verb, missing in (
            ("diagnose", "scales.json"),
            ("search", "scales.json"),
            ("ablate", "scales.json"),
            ("decide", "scales.json"),
            ("report", "verdict.json"),
        ):
            assert main([verb, str(tmp_path / "case")], wiring=reads_nothing) == 2
            assert f"has no {missing} yet" in capsys.readouterr().err
        main([*args, "--until", "calibrate"], wiring=fake())
        for verb in ("search", "ablate"):
            assert main([verb, str(tmp_path / "case")], wiring=reads_nothing) == 2
            assert "has no sensitivities.json yet" in capsys.readouterr().err


def test_a_planted_checkpoint_comes_out_of_the_door(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "broken"
    plant = ["faults", "plant", str(tiny_model), "--fault", "v_underflow", "--layer", "2", "--out", str(out)]
    assert main(plant) == 0
    seen = capsys.readouterr()
    assert seen.out == f"{out}\n"
    assert "planted v_underflow in layer 2; the right repair is per-tensor scales" in seen.err
    assert json.loads((out / "kvtriage_fault.json").read_bytes())["layers"] == [2]
    assert main(plant) == 2
    assert "already exists" in capsys.readouterr().err
