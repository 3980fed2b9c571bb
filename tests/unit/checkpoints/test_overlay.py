from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from kvtriage.checkpoints import overlay
from kvtriage.checkpoints.attention_weights import float_tensor
from kvtriage.checkpoints.model_folder import ModelFolder, load_model_folder
from kvtriage.checkpoints.overlay import (
    OVERLAY_NAME,
    SCALES_NAME,
    check_base,
    check_overlay,
    read_scales,
    write_overlay,
)
from kvtriage.checkpoints.safetensors_file import RawTensor, read_header, read_raw, write_shard
from kvtriage.errors import BadInput, ModelError, StorageError
from kvtriage.fp8.scales import LayerScales, ScaleSet
from kvtriage.kvcache.policy import Scaling

FolderMaker = Callable[..., Path]


def scale_set(scaling: Scaling, num_layers: int = 3, factor: float = 1.0) -> ScaleSet:
    """Scales that are all different; 4 query and 2 KV heads when per head."""
    n_q, n_kv = (4, 2) if scaling is Scaling.PER_HEAD else (1, 1)

    def values(start: int, count: int) -> tuple[float, ...]:
        return tuple(float(np.float32(factor / (start + i + 1) / 3)) for i in range(count))

    return ScaleSet(
        scaling,
        tuple(
            LayerScales(i, values(100 * i, n_q), values(100 * i + 20, n_kv), values(100 * i + 40, n_kv))
            for i in range(num_layers)
        ),
    )


def load(path: Path) -> ModelFolder:
    return load_model_folder(path, trust_remote_code=False)


PER_HEAD, PER_TENSOR = scale_set(Scaling.PER_HEAD), scale_set(Scaling.PER_TENSOR)


@pytest.mark.parametrize("scales", [PER_HEAD, PER_TENSOR], ids=["per_head", "per_tensor"])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("root", ["model.", "language_model.model.", "model.language_model."])
def test_round_trip(make_folder: FolderMaker, tmp_path: Path, root: str, shards: int, scales: ScaleSet) -> None:
    vision = {
        f"vision_tower.vision_model.encoder.layers.{i}.self_attn.k_proj.weight": float_tensor(np.ones((2, 2)), "BF16")
        for i in range(3)
    }
    model = load(make_folder(root=root, shards=shards, extra=vision))
    out = tmp_path / "overlay"
    write_overlay(model, scales, out)

    assert read_scales(out) == scales
    for shard in set(model.weight_map.values()):
        assert (out / shard).samefile(model.path / shard)
    loaded = load(out)
    assert loaded.weight_map.items() >= model.weight_map.items()
    assert loaded.already_fp8 is not None
    assert {name for name in loaded.weight_map if name not in model.weight_map} == {
        f"{root}layers.{i}.self_attn.{tensor}_scale" for i in range(3) for tensor in "qkv"
    }


def test_the_form_that_vllm_reads(make_folder: FolderMaker, tmp_path: Path) -> None:
    model = load(make_folder())
    write_overlay(model, PER_HEAD, tmp_path / "overlay")
    with safe_open(tmp_path / "overlay" / SCALES_NAME, framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        q, k = (file.get_tensor(f"model.layers.2.self_attn.{tensor}_scale") for tensor in "qk")
    assert (q.shape, k.shape, q.dtype) == ((4, 1, 1), (2, 1, 1), np.float32)
    config = json.loads((tmp_path / "overlay" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {
            "num_bits": 8,
            "type": "float",
            "strategy": "attn_head",
            "dynamic": False,
            "symmetric": True,
        },
    }
    del config["quantization_config"]
    assert config == model.config
    index = json.loads((tmp_path / "overlay" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * model.parameters + 3 * 4 * (4 + 2 + 2)
    assert index["weight_map"]["model.embed_tokens.weight"] == "model.safetensors"

    write_overlay(model, PER_TENSOR, tmp_path / "tensor")
    with safe_open(tmp_path / "tensor" / SCALES_NAME, framework="numpy") as file:
        assert file.get_tensor("model.layers.0.self_attn.v_scale").shape == (1,)


def test_symlinks_where_hard_links_do_not_reach(
    make_folder: FolderMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    model = load(make_folder())
    monkeypatch.setattr(os, "link", refuse)
    write_overlay(model, PER_HEAD, tmp_path / "overlay")
    assert (tmp_path / "overlay" / "model.safetensors").is_symlink()
    assert load(tmp_path / "overlay").parameters == model.parameters + 3 * 8


def test_a_hugging_face_cache_on_another_disk_can_be_linked(
    make_folder: FolderMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    snapshot, blobs = tmp_path / "cache" / "snapshots" / "abc", tmp_path / "cache" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(make_folder().iterdir())):
        file.rename(blobs / f"blob{i}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"blob{i}")
    model = load(snapshot)
    monkeypatch.setattr(os, "link", refuse)
    write_overlay(model, PER_HEAD, tmp_path / "overlay")
    check_overlay(model, PER_HEAD, tmp_path / "overlay")
    assert load(tmp_path / "overlay").parameters == model.parameters + 3 * 8


def test_nothing_is_written_over(make_folder: FolderMaker, tmp_path: Path) -> None:
    model, out = load(make_folder()), tmp_path / "overlay"
    write_overlay(model, PER_HEAD, out)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for taken in (out, model.path, tmp_path / "dangling"):
        with pytest.raises(BadInput, match="already exists"):
            write_overlay(model, scale_set(Scaling.PER_HEAD, factor=2.0), taken)
    assert read_scales(out) == PER_HEAD
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "model", "overlay"]


def test_a_full_disk_leaves_nothing(make_folder: FolderMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    model = load(make_folder())
    monkeypatch.setattr(overlay, "write_shard", full)
    with pytest.raises(StorageError, match="No space left"):
        write_overlay(model, PER_HEAD, tmp_path / "overlay")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_it_says_what_it_was_made_from(make_folder: FolderMaker, tmp_path: Path) -> None:
    model = load(make_folder())
    write_overlay(model, PER_HEAD, tmp_path / "overlay")
    record = json.loads((tmp_path / "overlay" / OVERLAY_NAME).read_text())
    assert record == {"base": str(model.path), "base_fingerprint": model.fingerprint}


def test_what_does_not_read_back_is_not_kept(
    make_folder: FolderMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flipped(path: Path, tensors: dict[str, RawTensor], metadata: dict[str, str]) -> None:
        name = min(tensors)
        data = tensors[name].data.copy()
        data[0] ^= 1
        write_shard(path, tensors | {name: RawTensor("F32", tensors[name].shape, data)}, metadata)

    model = load(make_folder())
    monkeypatch.setattr(overlay, "write_shard", flipped)
    with pytest.raises(StorageError, match="did not read back"):
        write_overlay(model, PER_HEAD, tmp_path / "overlay")
    assert not (tmp_path / "overlay").exists()


def test_scale_1_is_never_written(make_folder: FolderMaker, tmp_path: Path) -> None:
    unit = ScaleSet(Scaling.UNIT, PER_TENSOR.layers)
    with pytest.raises(BadInput, match="scale 1"):
        write_overlay(load(make_folder()), unit, tmp_path / "overlay")
    assert not (tmp_path / "overlay").exists()


def test_compressed_tensors_weights_are_merged(make_folder: FolderMaker, tmp_path: Path) -> None:
    groups = {"group_0": {"targets": ["Linear"]}}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups, "format": "dense"}}
    write_overlay(load(make_folder(config=config)), PER_HEAD, tmp_path / "overlay")
    merged = json.loads((tmp_path / "overlay" / "config.json").read_text())["quantization_config"]
    assert merged["config_groups"] == groups
    assert merged["format"] == "dense"
    assert merged["kv_cache_scheme"]["strategy"] == "attn_head"


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq"}, "another method"),
        ("awq", "another method"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "already declares"),
    ],
)
def test_other_quantization_is_refused(
    make_folder: FolderMaker, tmp_path: Path, quantization: object, message: str
) -> None:
    model = load(make_folder(config={"quantization_config": quantization}))
    with pytest.raises(ModelError, match=message):
        write_overlay(model, PER_HEAD, tmp_path / "overlay")
    assert not (tmp_path / "overlay").exists()


def test_scales_of_another_model_are_refused(make_folder: FolderMaker, tmp_path: Path) -> None:
    model = load(make_folder())
    with pytest.raises(ModelError, match=r"means 4 layers, .*: 3 in model\.layers \(0 to 2\)"):
        write_overlay(model, scale_set(Scaling.PER_HEAD, 4), tmp_path / "overlay")
    with pytest.raises(ModelError, match=r"means 2 layers, .*: 3 in"):
        write_overlay(model, scale_set(Scaling.PER_HEAD, 2), tmp_path / "overlay")
    gap = ScaleSet(Scaling.PER_HEAD, (PER_HEAD.layers[0], PER_HEAD.layers[2]))
    with pytest.raises(ModelError, match="layer 1 is in the weights and has no scales"):
        write_overlay(model, gap, tmp_path / "overlay")
    twice = {f"draft.layers.{i}.self_attn.k_proj.weight": float_tensor([1.0], "BF16") for i in range(3)}
    with pytest.raises(ModelError, match="more than one stack"):
        write_overlay(load(make_folder("two", extra=twice)), PER_HEAD, tmp_path / "overlay")


# --- reading ----------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, RawTensor]], None]) -> None:
    """Apply `change` to the scales of an overlay, on disk."""
    file = folder / SCALES_NAME
    header = read_header(file)
    tensors = {name: read_raw(file, header, name) for name in header.tensors}
    copies = {name: RawTensor(t.dtype, t.shape, np.array(t.data)) for name, t in tensors.items()}
    change(copies)
    file.unlink()
    write_shard(file, copies, {"format": "pt"})


K1 = "model.layers.1.self_attn.k_scale"


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_every_shape_and_dtype_of_a_per_tensor_scale(
    make_folder: FolderMaker, tmp_path: Path, shape: tuple[int, ...], dtype: str
) -> None:
    write_overlay(load(make_folder()), PER_TENSOR, tmp_path / "overlay")
    bits = {"F32": float_tensor([0.375], "F32"), "BF16": float_tensor([0.375], "BF16")}
    half = RawTensor("F16", (1,), np.array([0.375], "<f2").view(np.uint8))
    data = bits.get(dtype, half).data
    rewrite(tmp_path / "overlay", lambda tensors: tensors.update({K1: RawTensor(dtype, shape, data)}))
    assert read_scales(tmp_path / "overlay").layers[1].k == (0.375,)


def test_flat_per_head_scales(make_folder: FolderMaker, tmp_path: Path) -> None:
    write_overlay(load(make_folder()), PER_HEAD, tmp_path / "overlay")
    rewrite(tmp_path / "overlay", lambda tensors: tensors.update({K1: RawTensor("F32", (2,), tensors[K1].data)}))
    assert read_scales(tmp_path / "overlay") == PER_HEAD


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, "no k_scale for layer 1"),
        (float_tensor([[0.5, 0.5]], "F32"), r"shape \[1, 2\]"),
        (float_tensor([0.5], "F32"), "4 q, 1 k and 2 v scales"),
        (float_tensor([0.5, 0.0], "F32"), "k_scale of layer 1, head 1 came out as 0.0"),
        (float_tensor([0.5, -1.0], "F32"), "came out as -1.0"),
        (float_tensor([0.5, np.nan], "F32"), "came out as nan"),
        (float_tensor([0.5, np.inf], "F32"), "came out as inf"),
        (RawTensor("I32", (2,), np.zeros(8, np.uint8)), "stored as I32"),
    ],
)
def test_broken_scales_are_named(
    make_folder: FolderMaker, tmp_path: Path, tensor: RawTensor | None, message: str
) -> None:
    write_overlay(load(make_folder()), PER_HEAD, tmp_path / "overlay")

    def change(tensors: dict[str, RawTensor]) -> None:
        del tensors[K1]
        if tensor is not None:
            tensors[K1] = tensor

    rewrite(tmp_path / "overlay", change)
    with pytest.raises(ModelError, match=message):
        read_scales(tmp_path / "overlay")


def test_a_whole_layer_without_scales_is_named(make_folder: FolderMaker, tmp_path: Path) -> None:
    write_overlay(load(make_folder()), PER_HEAD, tmp_path / "overlay")

    def drop_last(tensors: dict[str, RawTensor]) -> None:
        for tensor in "qkv":
            del tensors[f"model.layers.2.self_attn.{tensor}_scale"]

    rewrite(tmp_path / "overlay", drop_last)
    with pytest.raises(ModelError, match="no q_scale for layer 2"):
        read_scales(tmp_path / "overlay")


def test_a_folder_without_scales_is_not_an_overlay(make_folder: FolderMaker, tmp_path: Path) -> None:
    folder = make_folder(shards=2)
    with pytest.raises(ModelError, match="declares no kv_cache_scheme"):
        read_scales(folder)
    write_overlay(load(folder), PER_HEAD, tmp_path / "overlay")
    index = tmp_path / "overlay" / "model.safetensors.index.json"
    index.unlink()
    index.write_text('{"weight_map": {}}')
    with pytest.raises(ModelError, match="does not name"):
        read_scales(tmp_path / "overlay")


# --- before and after -------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [1, 2, 4, 4096])
def test_other_layers_than_the_weights_hold_are_refused_before_any_work(
    make_folder: FolderMaker, num_layers: int
) -> None:
    model = load(make_folder())
    check_base(model, 3)
    with pytest.raises(ModelError, match=f"means {num_layers} layers, .*: 3 in"):
        check_base(model, num_layers)


def test_a_layer_missing_from_the_middle_is_refused(make_folder: FolderMaker) -> None:
    model = load(make_folder())
    kept = {name: shard for name, shard in model.weight_map.items() if ".1.self_attn" not in name}
    with pytest.raises(ModelError, match=r"means 3 layers, .*: 2 in model\.layers \(0 to 2\)"):
        check_base(dataclasses.replace(model, weight_map=kept), 3)


@pytest.mark.parametrize("config", [{"quantization_config": {"quant_method": "awq"}}, {"quantization_config": "awq"}])
def test_a_base_that_can_carry_no_scales_is_refused_before_any_work(
    make_folder: FolderMaker, config: dict[str, object]
) -> None:
    with pytest.raises(ModelError, match="another method"):
        check_base(load(make_folder(config=config)), 3)


def test_null_is_not_quantised(make_folder: FolderMaker, tmp_path: Path) -> None:
    model = load(make_folder(config={"quantization_config": None}))
    check_base(model, 3)
    write_overlay(model, PER_HEAD, tmp_path / "overlay")
    check_overlay(model, PER_HEAD, tmp_path / "overlay")


def test_a_stray_link_is_left_where_it_is(make_folder: FolderMaker, tmp_path: Path) -> None:
    folder = make_folder()
    (tmp_path / "secret").write_text("mine")
    (folder / "notes.txt").symlink_to(tmp_path / "secret")
    (folder / "gone.md").symlink_to(tmp_path / "nowhere")
    write_overlay(load(folder), PER_HEAD, tmp_path / "overlay")
    assert not {"notes.txt", "gone.md"} & {path.name for path in (tmp_path / "overlay").iterdir()}


@pytest.mark.parametrize(
    ("name", "data"),
    [("config.json", None), ("config.json", b" "), ("model.safetensors.index.json", b" "), ("model.safetensors", b"x")],
)
def test_an_overlay_that_was_changed_is_told(
    make_folder: FolderMaker, tmp_path: Path, name: str, data: bytes | None
) -> None:
    model, out = load(make_folder()), tmp_path / "overlay"
    write_overlay(model, PER_HEAD, out)
    check_overlay(model, PER_HEAD, out)
    with pytest.raises(ModelError, match="other scales"):
        check_overlay(model, scale_set(Scaling.PER_HEAD, factor=2.0), out)
    changed = b"" if data is None else (out / name).read_bytes() + data
    (out / name).unlink()
    if data is not None:
        (out / name).write_bytes(changed)
    with pytest.raises(ModelError, match=name):
        check_overlay(model, PER_HEAD, out)
