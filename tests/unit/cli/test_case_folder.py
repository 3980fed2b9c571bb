from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvtriage.cli.case_folder.folder import CaseFolder
from kvtriage.cli.case_folder.layout import ANSWERS, TRIALS
from kvtriage.cli.case_folder.opening import open_case
from kvtriage.errors import BadInput, CaseBusy, CaseError, EngineError, KvtriageError, ModelError, StorageError
from kvtriage.records.answers import Written
from kvtriage.records.plan import Plan
from kvtriage.records.rule import Rule
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.trials import ScoreTrial


def _chained(case: CaseFolder, record: ScaleRecord) -> ScaleRecord:
    return msgspec.structs.replace(record, inputs=case.inputs_for(ScaleRecord))


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


class TestFolder:
    def test_a_new_case_is_made_and_reads_back(self, tmp_path: Path, plan: Plan) -> None:
        with open_case(tmp_path / "case", create=True) as case:
            assert case.load(Plan) is None
            case.save(plan)
            assert case.load(Plan) == plan
            assert '\n  "schema": 1,\n' in case.text(Plan)

    def test_a_case_that_never_began_leaves_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError), open_case(tmp_path / "case", create=True):
            _ = 1 / 0
        assert not (tmp_path / "case").exists()

    def test_foreign_files_are_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("mine")
        with pytest.raises(CaseError, match=r"holds other files \(thesis\.txt\)"), open_case(tmp_path, create=True):
            pass
        assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]

    def test_a_file_is_no_case(self, tmp_path: Path) -> None:
        (tmp_path / "case").write_text("")
        with pytest.raises(CaseError, match="is a file"), open_case(tmp_path / "case", create=True):
            pass

    @pytest.mark.parametrize("create", [True, False])
    def test_a_hint_names_out_only_where_there_is_one(self, tmp_path: Path, create: bool) -> None:
        (tmp_path / "thesis.txt").write_text("mine")
        for path in (tmp_path, tmp_path / "thesis.txt"):
            with pytest.raises(CaseError) as caught, open_case(path, create=create):
                pass
            assert ("choose another --out" in caught.value.hint) is create
            assert ("'kvtriage run ... --out' made" in caught.value.hint) is not create

    def test_a_verb_wants_a_case_that_is_there(self, tmp_path: Path) -> None:
        with pytest.raises(CaseError, match="not a case folder") as caught, open_case(tmp_path / "c", create=False):
            pass
        assert "kvtriage run" in caught.value.hint
        assert not (tmp_path / "c").exists()

    def test_half_written_files_of_a_killed_run_are_swept(self, tmp_path: Path, plan: Plan) -> None:
        (tmp_path / ".plan.json.x1").write_text("{")
        (tmp_path / ".checkpoint.x2").mkdir()
        (tmp_path / ".checkpoint.x2" / "config.json").write_text("{}")
        with open_case(tmp_path, create=True) as case:
            case.save(plan)
        assert {entry.name for entry in tmp_path.iterdir()} - {".lock"} == {"plan.json"}

    def test_a_second_process_is_turned_away(self, tmp_path: Path, plan: Plan) -> None:
        holder = (
            "import sys\nfrom pathlib import Path\nfrom kvtriage.cli.case_folder.opening import open_case\n"
            "with open_case(Path(sys.argv[1]), create=True):\n    print('held', flush=True)\n    sys.stdin.read()\n"
        )
        with open_case(tmp_path / "case", create=True) as case:
            case.save(plan)
        command = [sys.executable, "-c", holder, str(tmp_path / "case")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            with pytest.raises(CaseBusy) as caught, open_case(tmp_path / "case", create=True):
                pass
            assert caught.value.exit_code == 5
            assert "--out" in caught.value.hint
            with pytest.raises(CaseBusy) as caught, open_case(tmp_path / "case", create=False):
                pass
            assert caught.value.hint == "wait until it has finished; 'kvtriage explore' shows a case while it runs"
            other.communicate("")
        with open_case(tmp_path / "case", create=False) as case:
            assert case.load(Plan) == plan

    def test_a_lock_left_by_a_kill_does_not_hold(self, tmp_path: Path, plan: Plan) -> None:
        with open_case(tmp_path / "case", create=True) as case:
            case.save(plan)
        holder = (
            "import os, sys\nfrom pathlib import Path\nfrom kvtriage.cli.case_folder.opening import open_case\n"
            "with open_case(Path(sys.argv[1]), create=False):\n    os.kill(os.getpid(), 9)\n"
        )
        assert subprocess.run([sys.executable, "-c", holder, str(tmp_path / "case")], check=False).returncode == -9
        with open_case(tmp_path / "case", create=False) as case:
            assert case.load(Plan) == plan


class TestChain:
    def test_a_record_knows_what_it_was_made_from(self, tmp_path: Path, plan: Plan, scales: ScaleRecord) -> None:
        with open_case(tmp_path, create=True) as case:
            case.save(plan)
            case.save(_chained(case, scales))
            loaded = case.need(ScaleRecord)
        assert loaded.inputs.keys() == {"plan.json"}

    def test_an_edited_input_breaks_the_chain(self, tmp_path: Path, plan: Plan, scales: ScaleRecord) -> None:
        with open_case(tmp_path, create=True) as case:
            case.save(plan)
            case.save(_chained(case, scales))
            _edit(tmp_path / "plan.json", '"characters": 99', '"characters": 98')
            with pytest.raises(CaseError, match=r"plan\.json changed after scales\.json was made from it"):
                case.load(ScaleRecord)

    def test_a_lost_input_breaks_the_chain(
        self, tmp_path: Path, plan: Plan, scales: ScaleRecord, sensitivities: Sensitivities
    ) -> None:
        with open_case(tmp_path, create=True) as case:
            case.save(plan)
            case.save(_chained(case, scales))
            case.save(msgspec.structs.replace(sensitivities, inputs=case.inputs_for(Sensitivities)))
            (tmp_path / "scales.json").unlink()
            with pytest.raises(CaseError, match=r"scales\.json is gone, and sensitivities\.json was made from it"):
                case.load(Sensitivities)

    def test_a_record_without_its_inputs_is_not_saved(self, tmp_path: Path, plan: Plan, scales: ScaleRecord) -> None:
        with open_case(tmp_path, create=True) as case:
            case.save(plan)
            with pytest.raises(CaseError, match=r"scales\.json is damaged"):
                case.save(scales)
        assert not (tmp_path / "scales.json").exists()

    def test_no_record_is_written_twice(self, tmp_path: Path, plan: Plan) -> None:
        with open_case(tmp_path, create=True) as case:
            case.save(plan)
            with pytest.raises(CaseError, match="already there"):
                case.save(plan)

    def test_what_is_missing_names_its_verb(self, tmp_path: Path, plan: Plan) -> None:
        with open_case(tmp_path, create=True) as case:
            case.save(plan)
            with pytest.raises(CaseError, match=r"no scales\.json yet") as caught:
                case.need(ScaleRecord)
        assert "kvtriage calibrate" in caught.value.hint

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 1, "kvtriage_version": "0.1.0"}'])
    def test_a_damaged_record_is_named(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "plan.json").write_text(text)
        with (
            open_case(tmp_path, create=False) as case,
            pytest.raises(CaseError, match=r"plan\.json is damaged"),
        ):
            case.load(Plan)


class TestVersion:
    def test_another_schema_is_refused(self, tmp_path: Path, plan: Plan) -> None:
        with open_case(tmp_path, create=True) as case:
            case.save(plan)
            _edit(tmp_path / "plan.json", '"schema": 1', '"schema": 2')
            with pytest.raises(CaseError, match="has schema 2, and this kvtriage reads schema 1"):
                case.load(Plan)

    @pytest.mark.parametrize("version", ["0.2.0", "1.1.0"])
    def test_another_minor_version_is_refused(self, tmp_path: Path, plan: Plan, version: str) -> None:
        with open_case(tmp_path, create=True) as case:
            case.save(msgspec.structs.replace(plan, kvtriage_version=version))
            with pytest.raises(CaseError, match=f"written by kvtriage {version}") as caught:
                case.load(Plan)
        assert f"kvtriage {version}" in caught.value.hint

    def test_another_patch_release_is_read(self, tmp_path: Path, plan: Plan) -> None:
        with open_case(tmp_path, create=True) as case:
            case.save(msgspec.structs.replace(plan, kvtriage_version="0.1.99"))
            assert case.need(Plan).kvtriage_version == "0.1.99"


class TestAdoptPlan:
    def test_an_equal_plan_goes_on(self, tmp_path: Path, plan: Plan) -> None:
        with open_case(tmp_path, create=True) as case:
            assert case.adopt_plan(plan) == plan
            before = (tmp_path / "plan.json").read_bytes()
            moved = msgspec.structs.replace(plan, model=msgspec.structs.replace(plan.model, path="/elsewhere"))
            assert case.adopt_plan(moved) == plan
        assert (tmp_path / "plan.json").read_bytes() == before

    @pytest.mark.parametrize("what", ["model", "data", "study", "rule"])
    def test_another_subject_is_refused_by_name(self, tmp_path: Path, plan: Plan, what: str) -> None:
        change = msgspec.structs.replace
        other, named = {
            "model": (change(plan, model=change(plan.model, fingerprint="0" * 64)), "another model"),
            "data": (change(plan, data=change(plan.data, sha256="0" * 64)), "another data set"),
            "study": (
                change(plan, study=change(plan.study, buckets=(256,))),
                "another study: buckets is 256,1024 there and 256 here",
            ),
            "rule": (
                change(plan, study=change(plan.study, rule=Rule(kl_margin=0.1))),
                "another study: rule.kl_margin is 0.05 there and 0.1 here",
            ),
        }[what]
        with open_case(tmp_path, create=True) as case:
            case.save(plan)
            with pytest.raises(CaseError, match=named):
                case.adopt_plan(other)


class TestTrials:
    def test_trials_are_appended_line_by_line(self, tmp_path: Path, trial: ScoreTrial) -> None:
        with open_case(tmp_path, create=True) as case:
            assert case.trials() == ()
            with case.appending() as sink:
                sink(trial)
                assert (tmp_path / TRIALS).read_bytes().endswith(b"}\n")
                sink(msgspec.structs.replace(trial, item_id="b"))
            assert [each.item_id for each in case.trials() if isinstance(each, ScoreTrial)] == ["a", "b"]

    def test_the_name_of_the_file_is_on_the_disk_before_the_first_line(
        self, tmp_path: Path, trial: ScoreTrial, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[tuple[Path, int]] = []
        with open_case(tmp_path, create=True) as case:
            monkeypatch.setattr(
                "kvtriage.cli.case_folder.journal.sync_folder",
                lambda folder: synced.append((folder, (folder / TRIALS).stat().st_size)),
            )
            with case.appending() as sink:
                sink(trial)
        assert synced == [(tmp_path, 0)]

    @pytest.mark.parametrize("cut", [1, 2, 40])
    def test_a_torn_last_line_is_cut_off(self, tmp_path: Path, trial: ScoreTrial, cut: int) -> None:
        with open_case(tmp_path, create=True) as case:
            with case.appending() as sink:
                sink(trial)
                sink(trial)
            whole = (tmp_path / TRIALS).read_bytes()
            (tmp_path / TRIALS).write_bytes(whole[:-cut])
            assert case.trials() == (trial,)
            assert (tmp_path / TRIALS).read_bytes() == whole[: len(whole) // 2]
            with case.appending() as sink:
                sink(trial)
            assert (tmp_path / TRIALS).read_bytes() == whole

    def test_other_damage_is_refused_with_its_line(self, tmp_path: Path, trial: ScoreTrial) -> None:
        with open_case(tmp_path, create=True) as case:
            with case.appending() as sink:
                for _ in range(3):
                    sink(trial)
            lines = (tmp_path / TRIALS).read_bytes().splitlines(keepends=True)
            (tmp_path / TRIALS).write_bytes(lines[0] + b"\0\0\0\n" + lines[2])
            with pytest.raises(CaseError, match=r"line 2 of trials\.jsonl is damaged") as refused:
                case.trials()
            assert refused.value.hint == "start a new case folder"

    def test_a_model_is_told_from_a_case(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").touch()
        for model in (tmp_path, Path("demo:smollm2-135m")):
            with (
                pytest.raises(CaseError, match="is a model and not a case folder") as refused,
                open_case(model, create=False),
            ):
                pass
            assert f"kvtriage run {model} --data" in refused.value.hint

    def test_of_answers_only_what_is_damaged_is_lost(self, tmp_path: Path) -> None:
        whole = [Written(arm="bf16", asked=str(number), conditions="c", token_ids=(1,)) for number in range(3)]
        with open_case(tmp_path, create=True) as case:
            with case.appending(ANSWERS) as sink:
                for answer in whole:
                    sink(answer)
            lines = (tmp_path / ANSWERS).read_bytes().splitlines(keepends=True)
            (tmp_path / ANSWERS).write_bytes(lines[0] + b"{\n" + lines[2])
            with pytest.raises(CaseError, match=r"line 2 of answers\.jsonl is damaged") as refused:
                case.answers()
            assert "remove that line" in refused.value.hint
            (tmp_path / ANSWERS).write_bytes(lines[0] + lines[2])
            assert case.answers() == (whole[0], whole[2])

    @pytest.mark.parametrize("fails", ["write", "fsync"])
    def test_a_full_disk_leaves_whole_lines(
        self, tmp_path: Path, trial: ScoreTrial, monkeypatch: pytest.MonkeyPatch, fails: str
    ) -> None:
        with open_case(tmp_path, create=True) as case, case.appending() as sink:
            sink(trial)
            before = (tmp_path / TRIALS).read_bytes()
            real_write = os.write

            def write_half(handle: int, data: bytes) -> int:
                if len(data) < 20:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return real_write(handle, data[: len(data) // 2])

            def refuse_sync(handle: int) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            with monkeypatch.context() as patch:
                if fails == "write":
                    patch.setattr(os, "write", write_half)
                else:
                    patch.setattr(os, "fsync", refuse_sync)
                with pytest.raises(StorageError, match="No space left"):
                    sink(trial)
            assert (tmp_path / TRIALS).read_bytes() == before
            sink(trial)
            assert case.trials() == (trial, trial)

    def test_a_full_disk_leaves_no_half_record(
        self, tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse_sync(handle: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with open_case(tmp_path, create=True) as case:
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", refuse_sync)
                with pytest.raises(StorageError):
                    case.save(plan)
            assert {entry.name for entry in tmp_path.iterdir()} <= {".lock"}

    def test_a_link_out_of_the_folder_is_not_followed(self, tmp_path: Path, trial: ScoreTrial) -> None:
        outside = tmp_path / "outside"
        outside.write_text("")
        with open_case(tmp_path / "case", create=True) as case:
            (tmp_path / "case" / TRIALS).symlink_to(outside)
            with pytest.raises(CaseError, match="not a plain file"), case.appending() as sink:
                sink(trial)
        assert outside.read_text() == ""


class TestStrangeFiles:
    @pytest.mark.parametrize("name", ["plan.json", TRIALS, "report.html", "report.json", ".lock"])
    @pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
    def test_what_is_no_plain_file_is_refused_and_left(
        self, tmp_path: Path, plan: Plan, trial: ScoreTrial, name: str, kind: str
    ) -> None:
        folder = tmp_path / "case"
        with open_case(folder, create=True) as case:
            case.save(plan)
        (tmp_path / "outside").write_text("mine")
        file = folder / name
        file.unlink(missing_ok=True)
        match kind:
            case "folder":
                file.mkdir()
            case "link":
                file.symlink_to(tmp_path / "outside")
            case _:
                os.mkfifo(file)

        def read_and_draw() -> None:
            with open_case(folder, create=False) as case:
                case.need(Plan)
                case.trials()
                case.write_report("", b"")

        with pytest.raises(CaseError, match="not a plain file"):
            read_and_draw()
        assert (tmp_path / "outside").read_text() == "mine"

    @pytest.mark.parametrize("name", ["a" * 300, "a/" * 3000])
    def test_a_path_that_no_disk_holds_is_bad_input(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(BadInput), open_case(tmp_path / name, create=True):
            pass

    def test_a_name_that_no_record_can_hold_is_bad_input(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match="not UTF-8"), open_case(tmp_path / os.fsdecode(b"c\xff"), create=True):
            pass


class TestTakingBack:
    @staticmethod
    def _fail(path: Path, error: KvtriageError, plan: Plan, scales: ScaleRecord | None) -> None:
        with open_case(path, create=True) as case:
            case.adopt_plan(plan)
            if scales is not None:
                case.save(_chained(case, scales))
            raise error

    def test_a_plan_alone_vanishes_over_bad_input(self, tmp_path: Path, plan: Plan) -> None:
        with pytest.raises(ModelError):
            self._fail(tmp_path / "case", ModelError("it cannot be loaded", hint="use another"), plan, None)
        assert not (tmp_path / "case").exists()

    @pytest.mark.parametrize("error", [ModelError("x", hint="y"), EngineError("x", hint="y")])
    def test_what_was_there_or_measured_stays(
        self, tmp_path: Path, plan: Plan, scales: ScaleRecord, error: KvtriageError
    ) -> None:
        with pytest.raises(KvtriageError):
            self._fail(tmp_path / "measured", error, plan, scales)
        with open_case(tmp_path / "old", create=True) as case:
            case.save(plan)
        with pytest.raises(KvtriageError):
            self._fail(tmp_path / "old", error, plan, None)
        assert (tmp_path / "measured" / "plan.json").exists()
        assert (tmp_path / "old" / "plan.json").exists()
