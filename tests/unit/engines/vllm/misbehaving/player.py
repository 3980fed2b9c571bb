"""The server that plays: its flags, its state, what it was asked, and the model that it pretends to have."""

from __future__ import annotations

import functools
import json
import math
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.unit.engines.vllm.misbehaving.faults import Faults

__all__ = ["SCALES", "Geometry", "Player", "text_of"]

VOCABULARY = 40
SCALES = "fake_scales.json"


@functools.cache
def _logit(before: int, token: int) -> tuple[float, float]:
    """What the fake model thinks, and in which direction damage pushes it."""
    chance = random.Random(f"{before}/{token}")
    return 3 * chance.random(), chance.gauss(0, 1)


def text_of(token: int) -> str:
    """Every third token is part of a character, as byte-level vocabularies have them."""
    return "\ufffd" if token % 3 == 0 else f" w{token}"


@dataclass(frozen=True)
class Geometry:
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    windows: tuple[int | None, ...] = (48, 48, None, 48, 48, None)


@dataclass
class Player:
    """What the server is: its flags, its state, and what it was asked."""

    model: str
    cache_dtype: str = "bfloat16"
    skip: tuple[str, ...] = ()
    chunk: int | None = None
    geometry: Geometry = field(default_factory=Geometry)
    faults: Faults = field(default_factory=Faults)
    called: str | None = None
    """What it calls its model; as the folder."""
    version: str = "0.32.0"
    gpus: str | None = None
    quantizes_q: bool = False
    backend: str = "FAKE_ATTN"
    extension: bool = True
    methods: bool = True
    """Whether its workers have the extension's methods, where there are development endpoints at all."""
    forbidden: bool = False
    """Whether a gateway in front lets nothing but /v1 through."""
    metrics: bool = True
    max_model_len: int = 2048
    tokens_per_chunk: int = 1
    step_s: float = 0.003
    token: str | None = None
    scoring: str = "prompt_logprobs"
    """Or 'echo', 'echo_text', 'generated': less and less of what vLLM can say of a prompt."""
    refuses: tuple[str, ...] = ()
    """Fields of a request that it does not know, and answers 400 to."""
    most_logprobs: int = 20
    speaks_ids: bool = True
    """Whether it says which tokens it generates; else their texts alone."""
    gated: bool = False
    """Whether kvtriage's gate stands before it; then `token` is what it was told as its key."""
    sharpness: float = 1.0
    """How sure the model is of itself; another one is another model."""
    paths: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    probes: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)
    watches: bool = False
    salts: set[str] = field(default_factory=set)
    running: int = 0
    most_running: int = 0
    came_s: list[float] = field(default_factory=list)
    """When each completion was asked for (time.perf_counter)."""
    is_program: bool = False
    """Whether it ends with its process."""
    dead: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @functools.cached_property
    def scales(self) -> dict[str, Any]:
        file = Path(self.model) / SCALES
        return {} if self.faults.default_scales or not file.exists() else dict(json.loads(file.read_text()))

    def stores_fp8(self, layer_idx: int) -> bool:
        if self.cache_dtype not in ("fp8", "fp8_e4m3"):
            return False
        if self.faults.ignores_skip:
            return True
        sliding = self.geometry.windows[layer_idx] is not None
        return str(layer_idx) not in self.skip and not ("sliding_window" in self.skip and sliding)

    def damage(self) -> float:
        """How far the logits are pushed about; 0 for BF16 in one piece."""
        total = 1e-5 if self.chunk else 0.0
        for layer_idx in range(self.geometry.layers):
            if self.stores_fp8(layer_idx):
                total += 0.01 if str(layer_idx) in self.scales else 0.02
            if (probe := self.probes.get(str(layer_idx))) is not None:
                share = 1.0 if probe["heads"] is None else len(probe["heads"]) / self.geometry.kv_heads
                total += share * (0.02 if probe["format"] == "fp8" else 0.005) * (1 + layer_idx)
        return total

    def log_probs(self, before: int, actual: int | None) -> dict[int, float]:
        """Of every token that can follow `before`, and of the one that does."""
        tokens = {*range(VOCABULARY)} | (set() if actual is None else {actual})
        damage = self.damage()
        logits = {}
        for token in tokens:
            base, noise = _logit(before, token)
            logits[token] = self.sharpness * base + damage * noise
        norm = math.log(math.fsum(math.exp(logit) for logit in logits.values()))
        return {token: logit - norm for token, logit in logits.items()}

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = [prompt[-1]]
        for _ in range(count):
            found = self.log_probs(tokens[-1], None)
            tokens.append(max(found, key=lambda token: found[token]))
        return tokens[1:]
