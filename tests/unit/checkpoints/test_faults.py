"""Planted faults on tiny random models: the function stays, the ranges move, the truth is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from kvtriage.checkpoints.attention_weights import open_attention
from kvtriage.checkpoints.faults import FAULTS, TRUTH_NAME, Planted, UnsupportedFault, plant
from kvtriage.checkpoints.faults.v_estimate import v_rms
from kvtriage.checkpoints.model_folder import ModelFolder, load_model_folder
from kvtriage.checkpoints.safetensors_file import read_header
from kvtriage.errors import BadInput, StorageError
from kvtriage.fp8.e4m3 import decode, encode
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec

L, HEADS, HIDDEN, D = 4, 4, 64, 16
TOKENS = torch.arange(1, 25).reshape(1, -1)
FULL, SLIDING = LayerKind.FULL, LayerKind.SLIDING

_COMMON: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": L,
    "num_attention_heads": HEADS,
    "head_dim": D,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Base:
    folder: Path
    spec: CacheSpec

    @property
    def model(self) -> ModelFolder:
        return load_model_folder(self.folder, trust_remote_code=False)


BaseMaker = Callable[[str], Base]


def _config(family: str) -> tuple[PreTrainedConfig, int, tuple[LayerKind, ...]]:
    """Configuration, KV heads and layer kinds of a tiny model."""
    full, hybrid = (FULL,) * L, (SLIDING, FULL, SLIDING, FULL)
    sliding: dict[str, Any] = _COMMON | {
        "sliding_window": 8,
        "layer_types": [f"{kind}_attention" for kind in hybrid],
        "query_pre_attn_scalar": D,
    }
    match family:
        case "llama":
            return LlamaConfig(**_COMMON, num_key_value_heads=2), 2, full
        case "mistral":
            return MistralConfig(**_COMMON, num_key_value_heads=2, sliding_window=None), 2, full
        case "qwen2":
            return Qwen2Config(**_COMMON, num_key_value_heads=2), 2, full
        case "qwen3":
            return Qwen3Config(**_COMMON, num_key_value_heads=2), 2, full
        case "gemma3":
            return Gemma3TextConfig(**sliding, num_key_value_heads=2), 2, hybrid
        case _:
            assert family == "gemma3_one_head"
            return Gemma3TextConfig(**sliding, num_key_value_heads=1), 1, hybrid


@pytest.fixture(scope="module")
def make_base(tmp_path_factory: pytest.TempPathFactory) -> BaseMaker:
    made: dict[str, Base] = {}

    def make(family: str) -> Base:
        if family not in made:
            made[family] = _save(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


def _save(family: str, folder: Path) -> Base:
    torch.manual_seed(3)
    config, kv_heads, kinds = _config(family)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            if name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    # Several shards, so that untouched ones can be told from those written anew.
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="60KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    layers = tuple(
        LayerSpec(i, kind, HEADS, kv_heads, D, D, 8 if kind is SLIDING else None) for i, kind in enumerate(kinds)
    )
    return Base(folder, CacheSpec(config.model_type, layers, 64))


@dataclass(frozen=True)
class Seen:
    """What one forward pass in float32 gave: logits [T, vocabulary]; K and V [L][T, Hkv, D]."""

    logits: torch.Tensor
    k: list[np.ndarray]
    v: list[np.ndarray]

    def amax(self, tensor: str, layer: int) -> list[float]:
        """Per head."""
        found: list[float] = np.abs(getattr(self, tensor)[layer]).max(axis=(0, 2)).tolist()
        return found


def run(folder: Path) -> Seen:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    k: list[np.ndarray] = []
    v: list[np.ndarray] = []

    def keep(into: list[np.ndarray]) -> Callable[[torch.nn.Module, object, torch.Tensor], None]:
        def hook(_module: torch.nn.Module, _arguments: object, output: torch.Tensor) -> None:
            into.append(output.float().numpy().reshape(TOKENS.shape[1], -1, D).copy())

        return hook

    for layer in model.model.layers:
        attention = layer.self_attn
        attention.v_proj.register_forward_hook(keep(v))
        if "k_norm" in dict(attention.named_children()):
            # A QK-norm may be given its heads in either order of axes; heads come last here.
            attention.k_norm.register_forward_hook(_keep_normed(k))
        else:
            attention.k_proj.register_forward_hook(keep(k))
    with torch.no_grad():
        logits = model(TOKENS).logits[0]
    return Seen(logits, k, v)


def _keep_normed(into: list[np.ndarray]) -> Callable[[torch.nn.Module, object, torch.Tensor], None]:
    def hook(_module: torch.nn.Module, _arguments: object, output: torch.Tensor) -> None:
        values = output[0] if output.shape[1] == TOKENS.shape[1] else output[0].transpose(0, 1)
        into.append(values.float().numpy().copy())

    return hook


def planted(base: Base, fault: str, out: Path, **place: Any) -> Planted:
    return plant(base.model, base.spec, fault, out=out, **({"layer": None, "head": None, "strength": None} | place))


CASES = [
    ("llama", "none", {}),
    ("llama", "v_underflow", {}),
    ("llama", "v_underflow", {"layer": 3, "head": 1, "strength": 20}),
    ("llama", "k_overflow", {}),
    ("llama", "k_overflow", {"layer": 0, "head": 0}),
    ("llama", "head_spread", {}),
    ("llama", "layer_off_range", {}),
    ("llama", "range_and_mantissa", {}),
    ("llama", "v_offset", {"layer": 2, "head": 0}),
    ("gemma3", "none", {}),
    ("gemma3", "v_underflow", {}),
    ("gemma3", "head_spread", {"head": 1}),
    ("gemma3", "layer_off_range", {}),
    ("gemma3", "v_offset", {}),
    ("gemma3", "v_offset_type", {}),
    ("gemma3", "range_and_mantissa", {"layer": 0}),
    ("gemma3_one_head", "v_offset_type", {"layer": 1}),
    ("qwen2", "k_overflow", {}),
    ("qwen2", "v_underflow", {"head": 0}),
    ("qwen3", "k_overflow", {}),
    ("qwen3", "v_offset", {}),
    ("mistral", "k_overflow", {}),
]


@pytest.mark.parametrize(("family", "fault", "place"), CASES, ids=lambda value: str(value))
def test_the_function_is_unchanged(
    make_base: BaseMaker, tmp_path: Path, family: str, fault: str, place: dict[str, int]
) -> None:
    base = make_base(family)
    truth = planted(base, fault, tmp_path / "out", **place)
    before, after = run(base.folder).logits, run(tmp_path / "out").logits
    if truth.repair in {"none", "scales"}:
        # Powers of two commute with every rounding: not close, but equal.
        assert torch.equal(before, after)
    else:
        assert float((before - after).abs().max()) < 5e-4 * float(before.std())
    loaded = load_model_folder(tmp_path / "out", trust_remote_code=False)
    assert (loaded.fingerprint == base.model.fingerprint) == (fault == "none")
    told = json.loads((tmp_path / "out" / TRUTH_NAME).read_text())
    assert told.pop("base_fingerprint") == base.model.fingerprint
    assert told["repair"] == truth.repair == FAULTS[fault].truth
    assert told["skip_layers"] == list(truth.skip_layers)
    assert told["scaling"] == truth.scaling


@pytest.mark.parametrize("fault", ["v_underflow", "v_offset"])
def test_only_files_with_changed_tensors_are_rewritten(make_base: BaseMaker, tmp_path: Path, fault: str) -> None:
    base = make_base("llama")
    planted(base, fault, tmp_path / "out", layer=0)
    shards = sorted(set(base.model.weight_map.values()))
    same = [(tmp_path / "out" / shard).samefile(base.folder / shard) for shard in shards]
    assert len(shards) > 2
    assert any(same)
    assert not all(same)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    headers = sum(read_header(tmp_path / "out" / shard).data_start for shard in shards)
    held = sum((tmp_path / "out" / shard).stat().st_size for shard in shards)
    assert index["metadata"]["total_size"] == held - headers


def test_v_underflow_is_below_e4m3_and_nothing_else_moves(make_base: BaseMaker, tmp_path: Path) -> None:
    base = make_base("llama")
    truth = planted(base, "v_underflow", tmp_path / "out", layer=2, head=1, strength=16)
    assert (truth.layers, truth.head, truth.scaling) == ((2,), 1, Scaling.PER_TENSOR)
    before, after = run(base.folder), run(tmp_path / "out")
    assert np.array_equal(after.v[2][:, 1] * 2.0**16, before.v[2][:, 1])
    assert np.array_equal(after.v[2][:, 0], before.v[2][:, 0])
    assert np.array_equal(after.v[1], before.v[1])
    assert all(np.array_equal(a, b) for a, b in zip(after.k, before.k, strict=True))
    assert not encode(np.abs(after.v[2][:, 1])).any()


@pytest.mark.parametrize("fault", ["v_underflow", "k_overflow", "head_spread"])
def test_faults_of_range_are_in_several_layers_unless_told(make_base: BaseMaker, tmp_path: Path, fault: str) -> None:
    base = make_base("llama")
    assert planted(base, fault, tmp_path / "several").layers == (0, 1, 2)
    before, after = run(base.folder), run(tmp_path / "several")
    tensor = "k" if fault == "k_overflow" else "v"
    moved = [before.amax(tensor, i) != after.amax(tensor, i) for i in range(L)]
    assert moved == [True, True, True, False]
    assert planted(base, fault, tmp_path / "one", layer=3).layers == (3,)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_k_overflow_saturates(make_base: BaseMaker, tmp_path: Path, family: str) -> None:
    base = make_base(family)
    truth = planted(base, "k_overflow", tmp_path / "out", layer=2)
    before, after = run(base.folder), run(tmp_path / "out")
    (layer,) = truth.layers
    assert np.array_equal(after.k[layer], before.k[layer] * 2.0**10)
    assert (np.abs(after.k[layer]) > 448).mean() > 0.3
    assert np.array_equal(after.v[layer], before.v[layer])


@pytest.mark.parametrize(("family", "head"), [("llama", 0), ("llama", 1), ("gemma3", 0), ("gemma3", 1)])
def test_head_spread_is_lost_by_unit_and_per_tensor_scales(
    make_base: BaseMaker, tmp_path: Path, family: str, head: int
) -> None:
    base = make_base(family)
    truth = planted(base, "head_spread", tmp_path / "out", layer=1, head=head)
    assert (truth.scaling, truth.head) == (Scaling.PER_HEAD, head)
    (layer,) = truth.layers
    v = run(tmp_path / "out").v[layer].astype(np.float64)
    far, others = v[:, head], np.delete(v, head, axis=1)
    assert 2.0**13 < np.abs(others).max() / np.abs(far).max() < 2.0**30
    for scale in (1.0, np.abs(v).max() / 448):
        assert not decode(encode(far / scale)).any()
    own = np.abs(far).max() / 448
    error = decode(encode(far / own)) * own - far
    assert np.square(error).sum() < 0.01 * np.square(far).sum()


@pytest.mark.parametrize(("family", "moves_k"), [("llama", True), ("gemma3", False)])
def test_layer_off_range_moves_v_and_k_where_no_norm_stands_between(
    make_base: BaseMaker, tmp_path: Path, family: str, moves_k: bool
) -> None:
    base = make_base(family)
    truth = planted(base, "layer_off_range", tmp_path / "out", layer=1, strength=14)
    assert truth.layers == (1,)
    before, after = run(base.folder), run(tmp_path / "out")
    assert np.array_equal(after.v[1] * 2.0**14, before.v[1])
    assert np.array_equal(after.k[1], before.k[1] * (2.0**14 if moves_k else 1.0))


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_v_offset_costs_mantissa_at_every_scale(make_base: BaseMaker, tmp_path: Path, family: str) -> None:
    base = make_base(family)
    truth = planted(base, "v_offset", tmp_path / "out", layer=2)
    assert (truth.layers, truth.skip_layers, truth.scaling) == ((2,), (2,), Scaling.UNIT)
    before, after = run(base.folder).v, run(tmp_path / "out").v
    added = (after[2] - before[2]).mean(axis=(0, 2))
    assert (added > 8 * before[2].std(axis=(0, 2))).all()
    v = after[2].astype(np.float64)
    lost = [
        np.square(decode(encode(v / scale)) * scale - v).sum() / np.square(before[2]).sum()
        for scale in np.abs(v).max() / 448 * 2.0 ** (np.arange(8) / 8)
    ]
    healthy = before[1].astype(np.float64)
    scale = np.abs(healthy).max() / 448
    assert (
        min(lost) > 50 * np.square(decode(encode(healthy / scale)) * scale - healthy).sum() / np.square(healthy).sum()
    )
    assert np.allclose(after[1], before[1], atol=1e-4)


def test_v_offset_type_takes_one_attention_type(make_base: BaseMaker, tmp_path: Path) -> None:
    base = make_base("gemma3")
    assert planted(base, "v_offset_type", tmp_path / "sliding").skip_layers == (0, 2)
    assert planted(base, "v_offset_type", tmp_path / "full", layer=3).skip_layers == (1, 3)
    before, after = run(base.folder).v, run(tmp_path / "sliding").v
    moved = [bool(np.abs(after[i] - before[i]).mean() > 4 * before[i].std()) for i in range(L)]
    assert moved == [True, False, True, False]


def test_range_and_mantissa_are_two_layers(make_base: BaseMaker, tmp_path: Path) -> None:
    base = make_base("llama")
    truth = planted(base, "range_and_mantissa", tmp_path / "out", layer=2)
    assert (truth.layers, truth.skip_layers, truth.scaling) == ((0, 2), (2,), Scaling.PER_TENSOR)
    before, after = run(base.folder), run(tmp_path / "out")
    assert np.array_equal(after.v[0] * 2.0**12, before.v[0])
    assert np.abs(after.v[2] - before.v[2]).mean() > 8 * before.v[2].std()


def test_biases_are_there_for_every_layer(make_base: BaseMaker, tmp_path: Path) -> None:
    base = make_base("gemma3")
    planted(base, "v_offset", tmp_path / "out", layer=1)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["attention_bias"] is True
    model = load_model_folder(tmp_path / "out", trust_remote_code=False)
    new = model.weight_map.keys() - base.model.weight_map.keys()
    assert new == {f"model.layers.{i}.self_attn.{p}_proj.bias" for i in range(L) for p in "qkvo"}
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    torch_model, told = loaded
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert float(torch_model.model.layers[0].self_attn.o_proj.bias.detach().abs().max()) == 0
    assert float(torch_model.model.layers[1].self_attn.o_proj.bias.detach().abs().max()) > 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
def test_the_rms_of_v_is_estimated_from_weights(make_base: BaseMaker, family: str) -> None:
    base = make_base(family)
    seen = run(base.folder).v
    weights = open_attention(base.model, base.spec)
    for layer in range(L):
        estimate = v_rms(weights, layer, gain_plus_one=family == "gemma3")
        assert np.allclose(estimate, np.sqrt(np.square(seen[layer]).mean(axis=(0, 2))), rtol=0.4)


def test_dominant_channels_of_gemma_are_seen_in_its_gains(make_base: BaseMaker, tmp_path: Path) -> None:
    """One channel carries nearly all of the stream: V reads the others, and is far smaller."""
    folder = tmp_path / "dominated"
    model: Any = AutoModelForCausalLM.from_pretrained(make_base("gemma3").folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_feedforward_layernorm.weight[5] = 400.0
            layer.self_attn.v_proj.weight[:, 5] = 0.0
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    base = Base(folder, make_base("gemma3").spec)
    seen, weights = run(folder).v[3], open_attention(base.model, base.spec)
    ratio = v_rms(weights, 3, gain_plus_one=True) / np.sqrt(np.square(seen).mean(axis=(0, 2)))
    # Without the gains the estimate would be some fifty times too high.
    assert ((ratio > 0.1) & (ratio < 10)).all()


# --- what is refused --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "fault", "place", "message"),
    [
        ("gemma3", "k_overflow", {}, "norm that multiplies by 1 \\+ w"),
        ("gemma3_one_head", "head_spread", {}, "one KV head"),
        ("llama", "v_offset_type", {}, "same attention type"),
        ("qwen2", "v_offset", {}, "no bias in o_proj"),
        ("mistral", "range_and_mantissa", {}, "no bias in o_proj"),
        ("qwen3", "k_overflow", {"head": 0}, "all its heads share"),
    ],
)
def test_faults_that_a_model_cannot_carry(
    make_base: BaseMaker, tmp_path: Path, family: str, fault: str, place: dict[str, int], message: str
) -> None:
    with pytest.raises(UnsupportedFault, match=message) as caught:
        planted(make_base(family), fault, tmp_path / "out", **place)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "place", "message"),
    [
        ("nonsense", {}, "no fault 'nonsense'"),
        ("v_underflow", {"layer": 4}, "no layer 4"),
        ("v_underflow", {"layer": -1}, "no layer -1"),
        ("v_underflow", {"head": 2}, "no KV head 2"),
        ("v_underflow", {"strength": 0.0}, "strength 0"),
        ("v_underflow", {"strength": 2.5}, "strength 2.5"),
        ("v_underflow", {"strength": float("nan")}, "strength nan"),
        ("head_spread", {"strength": 5}, "strength 5"),
        ("v_offset", {"strength": 1e9}, "strength 1e\\+09"),
        ("layer_off_range", {"head": 0}, "whole layers"),
        ("v_offset_type", {"head": 0}, "whole layers"),
        ("range_and_mantissa", {"head": 0}, "whole layers"),
        ("none", {"layer": 0}, "not planted in a layer"),
        ("none", {"strength": 1}, "has no strength"),
    ],
)
def test_arguments_that_do_not_fit(
    make_base: BaseMaker, tmp_path: Path, fault: str, place: dict[str, float], message: str
) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        planted(make_base("llama"), fault, tmp_path / "out", **place)
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_second_fault_would_spoil_the_truth(make_base: BaseMaker, tmp_path: Path) -> None:
    base = make_base("llama")
    planted(base, "none", tmp_path / "one")
    with pytest.raises(BadInput, match="already has a fault"):
        planted(Base(tmp_path / "one", base.spec), "v_underflow", tmp_path / "two")
    scaled = replace(base.model, already_fp8="compressed-tensors: strategy tensor")
    with pytest.raises(BadInput, match="carries KV-cache scales"):
        plant(scaled, base.spec, "none", layer=None, head=None, strength=None, out=tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_an_existing_folder_is_left_alone(make_base: BaseMaker, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="already exists"):
        planted(make_base("llama"), "none", tmp_path)


def test_a_full_disk_leaves_nothing(make_base: BaseMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvtriage.checkpoints.faults.writing.write_shard", full)
    with pytest.raises(StorageError, match="No space left"):
        planted(make_base("llama"), "v_underflow", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_shift_that_bf16_cannot_hold_is_refused(make_base: BaseMaker, tmp_path: Path) -> None:
    base = make_base("llama")
    planted(base, "v_underflow", tmp_path / "one", layer=0, strength=60)
    (tmp_path / "one" / TRUTH_NAME).unlink()
    once = Base(tmp_path / "one", base.spec)
    with pytest.raises(BadInput, match="beyond what BF16 holds exactly"):
        planted(once, "v_underflow", tmp_path / "two", layer=0, strength=60)
    assert not (tmp_path / "two").exists()


def test_an_unknown_architecture_is_named(make_base: BaseMaker, tmp_path: Path) -> None:
    base = make_base("llama")
    folder = tmp_path / "other"
    folder.mkdir()
    for file in base.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "granite"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFault, match="'granite'"):
        planted(Base(folder, base.spec), "v_underflow", tmp_path / "out")
