"""--engine vllm: what its options become, and what is refused before anything starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtriage.cli.dry_run import print_dry_run
from kvtriage.cli.main import main
from kvtriage.cli.options import Machine, Servers
from kvtriage.cli.servers import choose_wiring, server_logs
from kvtriage.cli.subject import Subject
from kvtriage.cli.wiring import embedded
from kvtriage.engines.base import Arm
from kvtriage.engines.vllm.engine import VllmEngine
from kvtriage.engines.vllm.recipe import (
    DEFAULT_COMMAND,
    count_devices,
    cpu_environment,
    read_command,
    read_engine_args,
)
from kvtriage.engines.vllm.variables import read_variables
from kvtriage.errors import CaseError, StudyError
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.study import Study
from tests.unit.engines.vllm.fleets import Stable
from tests.unit.stages import fake_case
from tests.unit.stages.fake_case import FakeCase

STUDY = Study(buckets=(256,), latency_contexts=(128, 1000), decode_tokens=8, calibration_tokens=512)


def machine(**how: Any) -> Machine:
    return Machine(None, None, False, Servers(**how))


def test_the_embedded_engine_is_the_default() -> None:
    assert choose_wiring(None, Machine(None, None, False), None, STUDY) is embedded
    assert choose_wiring(embedded, machine(), None, STUDY) is embedded


def opened(folder: Path, spec: CacheSpec, case: Path | None, study: Study = STUDY, **how: Any) -> Iterator[VllmEngine]:
    wiring = choose_wiring(None, machine(**how), case, study)()
    options = {"numerics": "storage", "device": None, "threads": None, "trust_remote_code": False}
    with wiring.open_engine(folder, spec, **options) as engine:  # type: ignore[arg-type]
        assert isinstance(engine, VllmEngine)
        yield engine


@pytest.fixture
def tokenizer_free(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtriage.cli.wiring import Wiring

    wiring = Wiring(lambda folder, trust: FakeCase().engine.tokenizer, lambda *_, **__: None)  # type: ignore[arg-type]
    monkeypatch.setattr("kvtriage.cli.servers.embedded", lambda: wiring)


@pytest.mark.usefixtures("tokenizer_free")
@pytest.mark.parametrize(
    ("args", "dtype", "length"),
    [
        ((), "bfloat16", "1024"),
        (("--dtype float32",), "auto", "1024"),
        (("--dtype=half", "--max-model-len 4096"), "float16", "4096"),
        (("--max_model_len=512",), "bfloat16", "512"),
    ],
)
def test_the_command_of_the_baseline(
    tmp_path: Path, spec: CacheSpec, args: tuple[str, ...], dtype: str, length: str
) -> None:
    arm = Arm("bf16", CachePolicy.native(spec.num_layers))
    for engine in opened(tmp_path / "m", spec, tmp_path, engine_args=args, command="env vllm serve"):
        shown = engine.show(arm)
        assert f"env vllm serve {tmp_path / 'm'} --kv-cache-dtype {dtype} " in shown
        assert re.findall(r"--max[-_]model[-_]len[ =](\d+)", shown) == [length]
        assert engine.one_arm_at_a_time


@pytest.mark.usefixtures("tokenizer_free")
@pytest.mark.parametrize(("items", "length"), [(0, 768), (1, 1024)])
def test_a_server_takes_what_is_written_behind_the_longest_text(
    tmp_path: Path, spec: CacheSpec, items: int, length: int
) -> None:
    texts = {"buckets": (512,), "latency_contexts": (128,), "generation_items": items, "generated_tokens": 400}
    study = msgspec.structs.replace(STUDY, **texts)
    for engine in opened(tmp_path / "m", spec, tmp_path, study):
        shown = engine.show(Arm("bf16", CachePolicy.native(spec.num_layers)))
        assert shown.endswith(f"--max-model-len {length}")


@pytest.mark.usefixtures("tokenizer_free")
def test_a_text_that_leaves_no_token_to_decode_is_refused_before_a_server_starts(
    tmp_path: Path, spec: CacheSpec
) -> None:
    study = msgspec.structs.replace(STUDY, buckets=(spec.max_model_len,))
    with pytest.raises(StudyError, match=f"buckets asks for {spec.max_model_len:,} tokens and 1 more to decode"):
        next(opened(tmp_path / "m", spec, tmp_path, study))


@pytest.mark.usefixtures("tokenizer_free")
def test_variables_are_shown_and_stand_in_the_conditions(tmp_path: Path, spec: CacheSpec) -> None:
    words = ("VLLM_KV_CACHE_LAYOUT=HND", "VLLM_CPU_OMP_THREADS_BIND=0")
    for engine in opened(tmp_path / "m", spec, tmp_path, variables=words, engine_args=("-tp 2",)):
        shown = engine.show(Arm("bf16", CachePolicy.native(spec.num_layers)))
        assert "VLLM_CPU_OMP_THREADS_BIND=0 VLLM_KV_CACHE_LAYOUT=HND VLLM_SERVER_DEV_MODE=1 vllm serve" in shown
        assert engine._fleet.server_args[:4] == (*sorted(words), "-tp", "2")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("VLLM_KV_CACHE_LAYOUT", "not of the form NAME=VALUE"),
        ("a-b=s3cret", "not of the form NAME=VALUE"),
        ("PYTHONPATH=s3cret", "set by kvtriage itself"),
        ("KVTRIAGE_CPU_NATIVE_DTYPE=s3cret", "set by kvtriage itself"),
        ("HF_TOKEN=s3cret", "may hold a secret"),
        ("VLLM_API_KEY=s3cret", "may hold a secret"),
        ("APIKEY_FILE=s3cret", "may hold a secret"),
        ("aws_secret_access_key=s3cret", "may hold a secret"),
        ("https_proxy=http://me:s3cret@proxy", "may hold a secret"),
        ("https_proxy=me:s3cret@proxy:3128", "may hold a secret"),
        ("PIP_INDEX_URL=https://s3cret@example.org/simple", "may hold a secret"),
        ("MYSQL_PWD=s3cret", "may hold a secret"),
        ("HTTP_AUTHORIZATION=s3cret", "may hold a secret"),
        ("https_proxy=http://s3cret@proxy", "may hold a secret"),
        ("PGPASS=s3cret", "may hold a secret"),
        ("A=hf_s3cretS3cretS3cret", "may hold a secret"),
        ("HEADER=Bearer s3cret", "may hold a secret"),
        ("A=s3cret\n", "not printable"),
    ],
)
def test_variables_that_are_not_the_users_to_give(word: str, says: str) -> None:
    with pytest.raises(StudyError, match=says) as caught:
        read_variables([word])
    assert "s3cret" not in caught.value.message + caught.value.hint


def test_a_variable_is_given_once_and_may_be_empty() -> None:
    assert read_variables(["TOKENIZERS_PARALLELISM=", "A=b=c"]) == {"TOKENIZERS_PARALLELISM": "", "A": "b=c"}
    harmless = {"VLLM_HOST_IP": "[::1]:80", "HOME": "/a@b", "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD": "1024"}
    assert read_variables([f"{name}={value}" for name, value in harmless.items()]) == harmless
    with pytest.raises(StudyError, match="A is given twice"):
        read_variables(["A=1", "A=2"])


def test_logs_lie_in_the_case_and_without_one_are_left_where_an_error_points_to_them(tmp_path: Path) -> None:
    with server_logs(tmp_path) as logs:
        assert logs == tmp_path.resolve() / "servers"
    with server_logs(None) as logs:
        (logs / "bf16.log").touch()
    assert not logs.exists()
    with pytest.raises(StudyError), server_logs(None) as logs:
        raise StudyError("the server is gone", hint=f"its log is in {logs}")
    assert logs.is_dir()
    logs.rmdir()


@pytest.mark.parametrize(("words", "written"), [((), True), (("--dry-run",), False)])
def test_a_dry_run_leaves_no_logs_in_a_case_that_is_still_to_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...], written: bool
) -> None:
    cases: list[Path | None] = []

    def choose(given: object, machine: Machine, case: Path | None, study: Study) -> None:
        cases.append(case)
        raise StudyError("enough is known", hint="of the case")

    monkeypatch.setattr("kvtriage.cli.run.choose_wiring", choose)
    out = tmp_path / "case"
    assert main(["run", "demo:smollm2-135m", "--data", "demo:english", "--out", str(out), *words]) == 2
    assert cases == [out if written else None]


@pytest.mark.usefixtures("tokenizer_free")
def test_scales_are_served_from_the_checkpoint_of_the_case(tmp_path: Path) -> None:
    from kvtriage.stages.arms import build_arm, design_arms

    case = FakeCase()
    scales = case.calibrate()
    arms = design_arms(case.plan, scales, case.diagnose(), case.engine.info())
    per_head = next(build_arm(arm, scales) for arm in arms if arm.name == "fp8_per_head")
    assert per_head.policy == CachePolicy.fp8(6, Scaling.PER_HEAD)
    for engine in opened(tmp_path / "m", case.spec, tmp_path):
        with pytest.raises(CaseError, match="no checkpoint with per_head scales"):
            engine.show(per_head)
        (tmp_path / "checkpoint").mkdir()
        assert f"vllm serve {tmp_path / 'checkpoint'} --kv-cache-dtype fp8 " in engine.show(per_head)


def test_engine_arguments_are_split_as_a_shell_does() -> None:
    assert read_engine_args(["--dtype float32", "--x='a b'"]) == ("--dtype", "float32", "--x=a b")
    assert count_devices(("--tensor-parallel-size", "4", "--pipeline-parallel-size=2", "--x", "3")) == 8
    assert DEFAULT_COMMAND == ("vllm", "serve")


@pytest.mark.parametrize(
    ("args", "native", "own", "cores", "told"),
    [
        ((), "bfloat16", {}, 8, {}),
        ((), "auto", {}, 8, {"KVTRIAGE_CPU_NATIVE_DTYPE": "bfloat16"}),
        ((), "auto", {"KVTRIAGE_CPU_NATIVE_DTYPE": ""}, 8, {}),
        (("-tp", "2"), "bfloat16", {}, 5, {"VLLM_CPU_OMP_THREADS_BIND": "0,1|2,3,4"}),
        (("-tp", "2"), "bfloat16", {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, 5, {}),
        (("-tp", "2"), "bfloat16", {}, 0, {}),
    ],
)
def test_servers_on_a_cpu_are_told_what_they_would_not_find_out(
    args: tuple[str, ...], native: str, own: dict[str, str], cores: int, told: dict[str, str]
) -> None:
    assert cpu_environment(args, native, own, range(cores), 1) == told
    assert "VLLM_CPU_OMP_THREADS_BIND" not in cpu_environment(args, native, own, range(cores), 2)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--kv-cache-dtype fp8", "set by each arm"),
        ("--port=1", "set by each arm"),
        ("--kv_cache_dtype=fp8", "set by each arm"),
        ("--api-key s3cret", "secret"),
        ("--api_key=s3cret", "secret"),
        ("'unclosed", "cannot be read"),
    ],
)
def test_arguments_that_are_not_the_users_to_give(word: str, says: str) -> None:
    with pytest.raises(StudyError, match=says) as caught:
        read_engine_args([word])
    assert "s3cret" not in caught.value.message


def test_a_command_that_holds_a_secret_is_refused() -> None:
    assert read_command(None) == DEFAULT_COMMAND
    assert read_command("env vllm serve") == ("env", "vllm", "serve")
    with pytest.raises(StudyError, match="--vllm-command --api-key") as caught:
        read_command("vllm serve --api_key s3cret")
    assert "s3cret" not in caught.value.message


@pytest.mark.parametrize(
    "words",
    [
        ("--vllm-command", "vllm serve"),
        ("--engine-arg", "--enforce-eager"),
        ("--server-env", "A=1"),
        ("--arm", "bf16=http://127.0.0.1:1"),
        ("--parallel-arms",),
        ("--mixed-backends",),
    ],
)
def test_options_of_vllm_are_for_vllm(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    assert main(["ablate", str(tmp_path), *words]) == 2
    assert f"{words[0]} is for --engine vllm" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["calibrate", "diagnose"])
@pytest.mark.parametrize("word", ["--parallel-arms", "--mixed-backends"])
def test_what_is_said_of_several_arms_is_no_option_where_there_is_one(
    verb: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, str(tmp_path), "--engine", "vllm", word]) == 2
    assert f"no such option '{word}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [("--engine-arg", "--enforce-eager"), ("--server-env", "A=1"), ("--vllm-command", "vllm serve")]
)
def test_servers_that_run_already_are_not_told_how_to_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    assert main(["ablate", str(tmp_path), "--engine", "vllm", "--arm", "bf16=http://127.0.0.1:1", *words]) == 2
    assert "--arm names a server that runs" in capsys.readouterr().err


@pytest.mark.parametrize("known", [False, True])
def test_a_dry_run_shows_servers_requests_and_time(
    known: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = FakeCase(study=msgspec.structs.replace(fake_case.STUDY, generation_items=1 if known else 0))
    model: Any = None
    subject = Subject(model, case.spec, case.plan, case.split, case.items)
    records = (case.calibrate(), case.diagnose()) if known else (None, None)
    with Stable(case.spec, tmp_path).engine() as engine:
        print_dry_run(subject, engine, *records)
    out = capsys.readouterr().out
    assert f"vllm serve {tmp_path / 'model'} --kv-cache-dtype bfloat16" in out
    assert ("--kv-cache-dtype-skip-layers sliding_window" in out) is known
    assert f"requests to each: {len(case.items)} to score, and 11 generations to time" in out
    written = [item for item in case.items if item.continued]
    assert (f"to BF16's {len(written)} more, which write what" in out) is known is bool(written)
    servers = {line.partition(": ")[2] for line in out.splitlines() if "vllm serve" in line}
    assert len(servers) == (8 if known else 2), "bf16 and its bound share one"
    assert re.search(rf"a start takes about .*; with {len(servers)} of them the study takes", out)
    assert "device-hours" in out
