"""`kvtriage plan FILE` on a stranger's file: exit 2, one sentence and a hint, and no hang."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtriage.cli.main import main
from tests.unit.kvcache.readers.configs import GPT_OSS_20B, LLAMA, edited
from tests.unit.kvcache.readers.shapes import read_shapes

WHOLE = json.dumps(GPT_OSS_20B).encode()


def with_value(key: str, raw: str) -> bytes:
    """The config of gpt-oss-20b with one value written as it stands."""
    return json.dumps(edited(GPT_OSS_20B, **{key: "HERE"})).replace('"HERE"', raw).encode()


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "truncated": WHOLE[: len(WHOLE) // 2],
    "not UTF-8": b"\xff\xfe" + WHOLE,
    "two objects": WHOLE + WHOLE,
    "a list": b"[" + WHOLE + b"]",
    "a number": b"7",
    "an empty object": b"{}",
    "nested without end": b'{"a": ' * 100_000,
    "a nested list": with_value("layer_types", "[" * 100_000),
    "100 MB of spaces": b" " * 100 * 1024**2 + WHOLE,
    "a negative size": with_value("num_key_value_heads", "-8"),
    "no size": with_value("head_dim", "0"),
    "half a layer": with_value("num_hidden_layers", "24.5"),
    "a thousand million layers": with_value("num_hidden_layers", "1000000000"),
    "a number of 5,000 digits": with_value("hidden_size", "9" * 5000),
    "NaN": with_value("sliding_window", "NaN"),
    "infinity": with_value("max_position_embeddings", "Infinity"),
    "minus infinity": with_value("num_attention_heads", "-Infinity"),
    "a word for a number": with_value("num_attention_heads", '"sixty-four"'),
    "a million layer types": with_value("layer_types", json.dumps(["full_attention"] * 10**6)),
    "layer types of every kind": with_value("layer_types", json.dumps([None, 1, {}, []] * 6)),
    "a terminal's colours": with_value("model_type", r'"\u001b[31m"'),
    "half a character": with_value("architectures", r'["\ud800"]'),
    "one key twice": WHOLE[:-1] + b', "num_hidden_layers": 36}',
    "no architecture": json.dumps(edited(LLAMA, architectures=...)).encode(),
    "an unknown architecture": json.dumps(edited(LLAMA, architectures=["NobodyKnowsForCausalLM"])).encode(),
    "a size that no model has": json.dumps(
        edited(LLAMA, num_attention_heads=65536, num_key_value_heads=65536, head_dim=65536)
    ).encode(),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_one_sentence_and_a_hint(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(HOSTILE[name])
    start = time.process_time()
    assert main(["plan", str(path)]) == 2
    assert time.process_time() - start < 10
    check_refusal(capsys)


def check_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing on stdout; a sentence and a hint on stderr, and no control character in them."""
    out, err = capsys.readouterr()
    assert out == ""
    sentence, hint, *rest = err.splitlines()
    assert sentence.startswith("error: ")
    assert hint.startswith("hint: ")
    assert rest == []
    assert sentence.isprintable()
    assert len(sentence) < 800


def test_the_same_value_under_one_key_twice_is_no_contradiction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(WHOLE[:-1] + b', "num_hidden_layers": 24}')
    assert main(["plan", str(path)]) == 0
    assert "24" in capsys.readouterr().out


@pytest.mark.parametrize("architecture", sorted(read_shapes()))
def test_every_architecture_has_a_price(architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(read_shapes()[architecture].config | {"architectures": [architecture]}))
    assert main(["plan", str(path), "--json"]) == 0
    worksheet = json.loads(capsys.readouterr().out)["worksheet"]
    assert 0 < worksheet["policy_bytes"] <= worksheet["bf16_bytes"]


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, len(WHOLE) - 1), noise=st.binary(min_size=1, max_size=4))
def test_a_file_overwritten_at_any_place_is_priced_or_refused(
    cut: int, noise: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(WHOLE[:cut] + noise + WHOLE[cut + len(noise) :])
    if main(["plan", str(path)]) == 0:
        assert capsys.readouterr().out
    else:
        check_refusal(capsys)


@pytest.mark.parametrize("kind", ["a link to nothing", "a folder", "a pipe"])
def test_what_lies_beside_it_is_read_or_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes(WHOLE)
    side = tmp_path / "hf_quant_config.json"
    match kind:
        case "a folder":
            side.mkdir()
        case "a pipe":
            os.mkfifo(side)
        case _:
            side.symlink_to("nothing")
    assert main(["plan", str(tmp_path)]) == 2
    assert "hf_quant_config.json is not a file" in capsys.readouterr().err
