from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from kvtriage.checkpoints.model_folder import ModelFolder, load_config, load_model_folder
from kvtriage.errors import ModelError

FolderMaker = Callable[..., Path]


def load(path: Path) -> ModelFolder:
    return load_model_folder(path, trust_remote_code=False)


def test_one_file_is_read(make_folder: FolderMaker) -> None:
    folder = make_folder()
    model = load(folder)
    assert model.architecture == "LlamaForCausalLM"
    assert model.path == folder
    assert set(model.weight_map.values()) == {"model.safetensors"}
    assert model.parameters == 11 * 16 + 3 * (16 * 32 * 2 + 16 * 16 * 2 + 16)
    assert model.already_fp8 is None


def test_the_safetensors_package_agrees_with_our_writer(make_folder: FolderMaker) -> None:
    model = load(make_folder())
    with safe_open(model.path / "model.safetensors", framework="numpy") as file:
        assert set(file.keys()) == set(model.weight_map)


def test_shards_and_single_file_hold_the_same(make_folder: FolderMaker) -> None:
    one, two = load(make_folder("one")), load(make_folder("two", shards=2))
    assert one.parameters == two.parameters
    assert one.weight_map.keys() == two.weight_map.keys()
    assert len(set(two.weight_map.values())) == 2


def test_the_config_is_read_alone_and_may_name_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "auto_map": {"AutoConfig": "own"}}')
    folder, config = load_config(tmp_path)
    assert (folder, config["architectures"]) == (tmp_path.resolve(), ["LlamaForCausalLM"])
    with pytest.raises(ModelError, match="auto_map"):
        load(tmp_path)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ModelError, match="no tokenizer"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_the_fingerprint_follows_every_small_file(make_folder: FolderMaker, name: str) -> None:
    folder = make_folder()
    before = load(folder).fingerprint
    assert load(folder).fingerprint == before
    (folder / name).write_text((folder / name).read_text().replace("{", "{ ", 1))
    assert load(folder).fingerprint != before


def test_the_fingerprint_follows_one_bit_of_a_weight(make_folder: FolderMaker) -> None:
    folder = make_folder()
    before = load(folder).fingerprint
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert load(folder).fingerprint != before


def test_a_declared_kv_cache_scheme_is_told(make_folder: FolderMaker) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}}
    told = load(make_folder(config=config)).already_fp8
    assert told is not None
    assert told.endswith(
        "of compressed-tensors has kv_cache_scheme num_bits 8, strategy tensor, symmetric true, type float"
    )


def test_the_side_file_of_modelopt_is_told(make_folder: FolderMaker) -> None:
    folder = make_folder()
    declared = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(declared))
    assert load(folder).already_fp8 == "hf_quant_config.json of ModelOpt has kv_cache_quant_algo FP8"


def test_a_null_kv_cache_scheme_is_none(make_folder: FolderMaker) -> None:
    config = {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": None}}
    assert load(make_folder(config=config)).already_fp8 is None


# --- what is refused --------------------------------------------------------------------


def test_missing_folder_and_file_instead_of_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model folder"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="is a file"):
        load(tmp_path / "file")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "not an object"),
        (b"{}", "names no architecture"),
        (b'{"architectures": []}', "names no architecture"),
        (b'{"architectures": [3]}', "names no architecture"),
        (b'{"architectures": "LlamaForCausalLM"}', "names no architecture"),
    ],
)
def test_broken_config(make_folder: FolderMaker, content: bytes, message: str) -> None:
    folder = make_folder()
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert caught.value.hint


def test_missing_and_huge_config(make_folder: FolderMaker) -> None:
    folder = make_folder()
    with (folder / "config.json").open("wb") as file:
        file.truncate(16 * 1024**2 + 1)
    with pytest.raises(ModelError, match=r"16\.0 MiB"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_remote_code_needs_trust(make_folder: FolderMaker, name: str) -> None:
    folder = make_folder()
    fields = json.loads((folder / name).read_text()) | {"auto_map": {"AutoConfig": "evil.Config"}}
    (folder / name).write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="code of its own") as caught:
        load(folder)
    assert "--trust-remote-code" in caught.value.hint
    assert load_model_folder(folder, trust_remote_code=True).parameters > 0


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_named_and_never_opened(make_folder: FolderMaker, name: str, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
            return (os.mkdir, (str(tmp_path / "exploded"),))

    folder = make_folder()
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ModelError, match="only pickled weights"):
        load(folder)
    assert not (tmp_path / "exploded").exists()


def test_no_weights_and_shards_without_index(make_folder: FolderMaker) -> None:
    folder = make_folder()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelError, match="several safetensors files and no"):
        load(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        load(folder)


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json"])
def test_missing_tokenizer(make_folder: FolderMaker, missing: str) -> None:
    folder = make_folder()
    (folder / missing).unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load(folder)


def _header(fields: object, data: bytes = b"") -> bytes:
    body = json.dumps(fields).encode()
    return struct.pack("<Q", len(body)) + body + data


_TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "shorter than its own header"),
        (b"\0\0\0", "shorter than its own header"),
        (struct.pack("<Q", 2**60) + b"{}", "header claims"),
        (struct.pack("<Q", 500) + b"{}", "the file only"),
        (struct.pack("<Q", 2) + b"{x", "is not JSON"),
        (_header([1]), "not an object"),
        (_header({"__metadata__": 1}), "__metadata__"),
        (_header({"a": 3}), "not a tensor"),
        (_header({"a": _TENSOR | {"shape": [-1]}}, bytes(4)), "not a tensor"),
        (_header({"a": _TENSOR | {"shape": [2]}}, bytes(4)), "does not match its shape"),
        (_header({"a": _TENSOR | {"dtype": "F4"}}, bytes(4)), "does not read"),
        (_header({"a": _TENSOR}, bytes(3)), "need 4 bytes and it holds 3"),
        (_header({"a": _TENSOR}, bytes(5)), "need 4 bytes and it holds 5"),
        (_header({"a": _TENSOR | {"data_offsets": [4, 8]}}, bytes(8)), "begins at byte 4"),
        (_header({"a": _TENSOR, "b": _TENSOR}, bytes(4)), "begins at byte 0"),
    ],
)
def test_broken_safetensors(make_folder: FolderMaker, content: bytes, message: str) -> None:
    folder = make_folder()
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_truncated_safetensors(make_folder: FolderMaker) -> None:
    folder = make_folder()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ModelError, match="truncated"):
        load(folder)


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "../elsewhere.safetensors", "..", "sub/x.safetensors", "a\\b.safetensors", "x.bin", 7, ""]
)
def test_an_index_names_only_files_beside_it(make_folder: FolderMaker, target: object) -> None:
    folder = make_folder(shards=2)
    index = folder / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"][next(iter(fields["weight_map"]))] = target
    index.write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="not a safetensors file of this folder"):
        load(folder)


def test_an_index_that_does_not_fit_its_files(make_folder: FolderMaker) -> None:
    folder = make_folder(shards=2)
    index = folder / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    shard = next(iter(fields["weight_map"].values()))
    index.write_text(json.dumps({"weight_map": fields["weight_map"] | {"ghost.weight": shard}}))
    with pytest.raises(ModelError, match=r"'ghost\.weight'"):
        load(folder)
    index.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ModelError, match="no weight_map"):
        load(folder)
    index.write_text(json.dumps(fields))
    (folder / shard).unlink()
    with pytest.raises(ModelError, match=f"{shard} is missing"):
        load(folder)


# --- links ------------------------------------------------------------------------------


def test_a_hugging_face_cache_is_followed(make_folder: FolderMaker, tmp_path: Path) -> None:
    plain = make_folder("plain")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(plain.iterdir())):
        (blobs / f"blob{i}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"blob{i}")
    assert load(snapshot).fingerprint == load(plain).fingerprint
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    for file in snapshot.iterdir():
        (mirror / file.name).symlink_to(file)
    assert load(mirror).fingerprint == load(plain).fingerprint


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_link_to_elsewhere_is_refused(make_folder: FolderMaker, tmp_path: Path, name: str) -> None:
    folder = make_folder()
    secret = tmp_path / "secret"
    (folder / name).rename(secret)
    (folder / name).symlink_to(secret)
    with pytest.raises(ModelError, match="outside the model"):
        load(folder)


def test_a_link_in_circles_is_refused(make_folder: FolderMaker) -> None:
    folder = make_folder()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("tokenizer.json")
    with pytest.raises(ModelError, match="outside the model"):
        load(folder)


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "special_tokens_map.json", "tokenizer.model", "merges.txt", "modeling_x.py"]
)
def test_what_a_loader_opens_is_no_link_to_elsewhere(make_folder: FolderMaker, tmp_path: Path, name: str) -> None:
    folder = make_folder()
    (tmp_path / "secret").write_text("{}")
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError, match=f"{name} is a link to .*outside the model"):
        load(folder)


@pytest.mark.parametrize("whole", [True, False])
def test_no_chat_template_comes_from_elsewhere(make_folder: FolderMaker, tmp_path: Path, whole: bool) -> None:
    folder, outside = make_folder(), tmp_path / "outside"
    outside.mkdir()
    (outside / "rag.jinja").write_text("{{ secret }}")
    if whole:
        (folder / "additional_chat_templates").symlink_to(outside)
    else:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "own.jinja").write_text("")
        load(folder)
        (folder / "additional_chat_templates" / "rag.jinja").symlink_to(outside / "rag.jinja")
    with pytest.raises(ModelError, match="outside the model"):
        load(folder)


def test_stray_links_are_nobodys_business(make_folder: FolderMaker, tmp_path: Path) -> None:
    folder = make_folder()
    before = load(folder).fingerprint
    (folder / "notes.txt").symlink_to("/etc/passwd")
    (folder / "extra.json").symlink_to(tmp_path / "nowhere")
    assert load(folder).fingerprint == before


@pytest.mark.parametrize("name", ["a" * 5000, "a" * 300])
def test_a_path_that_no_disk_holds_is_a_model_error(make_folder: FolderMaker, tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="there is no model folder"):
        load(tmp_path / name)
    folder = make_folder(shards=2)
    index = folder / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    for bad in (f"{name}.safetensors", "\ud800.safetensors"):
        index.write_text(json.dumps({"weight_map": fields["weight_map"] | {"x": bad}}))
        with pytest.raises(ModelError, match="not a safetensors file of this folder"):
            load(folder)
