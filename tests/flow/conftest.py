"""A real but tiny model and text, for jobs that run from end to end in seconds."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import cast

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from kvtriage.cli.wiring import Wiring
from kvtriage.engines.base import Arm, Engine, ProbeSink, Progress, ScoreRequest, Session, keep_nothing
from kvtriage.engines.fake import FakeEngine, FakeTokenizer
from kvtriage.fp8.stats import KVStats
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.tasks.corpus import demo_english

NONE: Mapping[int, float] = MappingProxyType({})

_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _INNER = 32, 4, 4, 2, 8, 64

STUDY = """
buckets = [256, 512]
items_per_bucket = 2
score_tokens = 64
needle_depths = [0.1, 0.5, 0.9]
needles_per_depth = 1
calibration_items = 2
calibration_tokens = 512
holdout_items = 1
probe_items = 1
probe_tokens = 128
probe_score_tokens = 32
latency_contexts = [32, 64, 96]
latency_repeats = 1
decode_tokens = 3
batch = 2
"""


def _write_tokenizer(folder: Path) -> int:
    """One token per byte; returns the size of the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return len(alphabet)


def _weights(vocabulary: int) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return random.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(vocabulary, _HIDDEN)}
    for i in range(_LAYERS):
        prefix = f"model.layers.{i}."
        tensors |= {
            f"{prefix}self_attn.q_proj.weight": 3 * matrix(_HEADS * _HEAD_DIM, _HIDDEN),
            f"{prefix}self_attn.k_proj.weight": 3 * matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{prefix}self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{prefix}self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * _HEAD_DIM),
            f"{prefix}mlp.gate_proj.weight": matrix(_INNER, _HIDDEN),
            f"{prefix}mlp.up_proj.weight": matrix(_INNER, _HIDDEN),
            f"{prefix}mlp.down_proj.weight": matrix(_HIDDEN, _INNER),
            f"{prefix}input_layernorm.weight": np.ones(_HIDDEN, np.float32),
            f"{prefix}post_attention_layernorm.weight": np.ones(_HIDDEN, np.float32),
        }
    return tensors | {"model.norm.weight": np.ones(_HIDDEN, np.float32)}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers with random weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    vocabulary = _write_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 1024,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(vocabulary), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def model_copy(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model, to be broken."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture(scope="session")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo text as a file of the user's."""
    file = tmp_path_factory.mktemp("data") / "traffic.jsonl"
    file.write_bytes(demo_english())
    return file


@pytest.fixture(scope="session")
def study_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("study") / "study.toml"
    file.write_text(STUDY)
    return file


class Interrupting:
    """A fake engine that is interrupted, as by Ctrl-C, at its `after`-th piece of work."""

    def __init__(self, engine: FakeEngine, after: int | None) -> None:
        self._engine = engine
        self._left = after

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def _work(self) -> None:
        if self._left is not None:
            if self._left == 0:
                raise KeyboardInterrupt
            self._left -= 1

    @contextlib.contextmanager
    def open(self, arm: Arm) -> Iterator[Session]:
        with self._engine.open(arm) as session:
            self._work()
            yield session

    def probe(
        self,
        requests: Sequence[ScoreRequest],
        arms: Sequence[Arm],
        progress: Progress,
        sink: ProbeSink = keep_nothing,
    ) -> list[list[float]]:
        self._work()
        return self._engine.probe(requests, arms, progress, sink)

    def observe(self, prompts: Sequence[Sequence[int]], edges: Sequence[int], progress: Progress) -> KVStats:
        self._work()
        return self._engine.observe(prompts, edges, progress)


@pytest.fixture
def fake() -> Callable[..., Callable[[], Wiring]]:
    """`fake(after=n, ...)`: the wiring of a fake engine with this damage, interrupted at its n-th work."""

    def wire(
        after: int | None = None,
        mantissa: Mapping[int, float] = NONE,
        range_: Mapping[int, float] = NONE,
        spread: Mapping[int, float] = NONE,
    ) -> Callable[[], Wiring]:
        @contextlib.contextmanager
        def open_engine(folder: Path, spec: CacheSpec, **how: object) -> Iterator[Engine]:
            yield cast(Engine, Interrupting(FakeEngine(spec, mantissa, range_, spread), after))

        return lambda: Wiring(lambda folder, trust: FakeTokenizer(), open_engine)

    return wire
