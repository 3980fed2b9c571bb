"""An engine without a model: instant, seeded, and true to the contract.

Damage is a property of each layer, given at construction: `mantissa` is what any FP8 format
costs there, `range_` what comes on top at scale 1, `spread` what comes on top until every
head has a scale of its own. `together` is what a group of layers costs on top while none of them is native; a
negative cost is damage that they share. KL divergences add up, with a small scatter by item.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtriage.engines.base import (
    Answered,
    Arm,
    Distribution,
    Generation,
    ProbeSink,
    Progress,
    ScoreRequest,
    ScoreResponse,
    Screening,
    Tokenizer,
    Treatments,
    check_arm,
    keep_nothing,
)
from kvtriage.engines.info import Applied, EngineInfo
from kvtriage.fp8.anatomy import Anatomy, LayerAnatomy, OperandError
from kvtriage.fp8.e4m3 import MAX, SUB_OCTAVES
from kvtriage.fp8.magnitudes import BINS, BINS_PER_OCTAVE, LOWEST_OCTAVE, PARTS, Magnitudes
from kvtriage.fp8.scales import ScaleSet
from kvtriage.fp8.stats import HeldOut, HeldOutShare, KVStats, RangeStats
from kvtriage.kvcache.policy import Fp8, Mantissa, Native, Scaling
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.spec import CacheSpec, LayerSpec

__all__ = ["FakeEngine", "FakeTokenizer"]

_HEALTHY = 0.0004
"""Nats per token that FP8 costs in a healthy layer."""


_SMALL = 2.0**-10
"""Flushed to 0 at scale 1, and within reach of the scales that calibration gives."""


class FakeTokenizer:
    """One token per word; BOS is 0, and nothing ends a text. No word can be told from its token again."""

    bos: tuple[int, ...] = (0,)
    eos: tuple[int, ...] = ()

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(f"word{token}" for token in token_ids)

    def encode(self, text: str) -> list[int]:
        return [1 + sum(word.encode()) % 999 + 1000 * (len(word) % 60) for word in text.split()]

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


@dataclass(frozen=True)
class _Drift:
    """A distribution of which only its distance from BF16 is known: [S]."""

    kl: tuple[float, ...]

    def kl_from(self, reference: Distribution) -> tuple[float, ...]:
        if not isinstance(reference, _Drift):
            raise TypeError("distributions of two engines cannot be compared")
        return tuple(abs(own - other) for own, other in zip(self.kl, reference.kl, strict=True))


@dataclass
class FakeEngine:
    """See engines.base.Engine. `scored` and `opened` count calls, for tests of resuming."""

    spec: CacheSpec
    mantissa: Mapping[int, float] = field(default_factory=dict)
    range_: Mapping[int, float] = field(default_factory=dict)
    spread: Mapping[int, float] = field(default_factory=dict)
    per_head_scales: bool = True
    one_arm_at_a_time: bool = False
    together: Mapping[frozenset[int], float] = field(default_factory=dict)
    screens: bool = True
    scored: int = 0
    opened: int = 0

    @property
    def tokenizer(self) -> Tokenizer:
        return FakeTokenizer()

    def info(self) -> EngineInfo:
        return EngineInfo(
            name="fake",
            version="1",
            device="none",
            backend="none",
            numerics="storage",
            compute_dtype="float64",
            native_dtype="bfloat16",
            threads=1,
            per_head_scales=self.per_head_scales,
            screens=self.screens,
        )

    @contextlib.contextmanager
    def open(self, arm: Arm) -> Iterator[_FakeSession]:
        check_arm(arm, self.spec)
        self.opened += 1
        yield _FakeSession(self, arm)

    def probe(
        self,
        requests: Sequence[ScoreRequest],
        arms: Sequence[Arm],
        progress: Progress,
        sink: ProbeSink = keep_nothing,
    ) -> list[list[float]]:
        progress(len(arms), len(arms))
        found = [[self._damage(arm, request.item_id) for request in requests] for arm in arms]
        for arm, row in zip(arms, found, strict=True):
            for request, kl in zip(requests, row, strict=True):
                sink(request, arm, kl)
        return found

    def screen(
        self, requests: Sequence[ScoreRequest], arms: Sequence[Arm], treatments: Treatments, progress: Progress
    ) -> Screening | None:
        """A fifth too low throughout, for an eighth of the tokens."""
        if not self.screens:
            return None
        progress(len(requests), len(requests))
        tokens, layers = sum(len(request.token_ids) for request in requests), self.spec.num_layers
        computed = sum(layers - arm.policy.first_quantized_layer for arm in arms)
        return Screening(
            damage=tuple(tuple(0.8 * self._damage(arm, request.item_id) for request in requests) for arm in arms),
            anatomy=Anatomy(tuple(self._anatomy(layer, treatments) for layer in self.spec.layers), tokens),
            evaluated=layers * tokens + computed * tokens // 8,
        )

    def observe(self, prompts: Sequence[Sequence[int]], position_edges: Sequence[int], progress: Progress) -> KVStats:
        progress(len(prompts), len(prompts))
        tensors = {}
        for layer in self.spec.layers:
            for tensor, heads in (
                ("q", layer.num_attention_heads),
                ("k", layer.num_kv_heads),
                ("v", layer.num_kv_heads),
            ):
                tensors[layer.layer_idx, tensor] = _ranges(
                    layer, heads, len(position_edges), tensor, layer.layer_idx in self.spread
                )
        return KVStats(tuple(position_edges), sum(map(len, prompts)), tensors)

    def check_scales(
        self, prompts: Sequence[Sequence[int]], candidates: Sequence[ScaleSet], progress: Progress
    ) -> list[HeldOut]:
        progress(len(prompts), len(prompts))
        shares = [
            HeldOutShare(layer.layer_idx, tensor, head, 0.0, 0.01, 8.0)
            for layer in self.spec.layers
            for tensor in ("k", "v")
            for head in range(layer.num_kv_heads)
        ]
        return [HeldOut(tuple(shares), sum(map(len, prompts))) for _ in candidates]

    def _damage(self, arm: Arm, item_id: str) -> float:
        """Nats per token of one arm on one item, deterministic."""
        total = 1e-6 * (arm.prefill_chunk is not None)
        for layer, fmt in zip(self.spec.layers, arm.policy.formats, strict=True):
            total += self._layer_damage(layer, fmt)
        stored = {index for index, fmt in enumerate(arm.policy.formats) if not isinstance(fmt, Native)}
        total += sum(cost for group, cost in self.together.items() if group <= stored)
        return total * (1 + 0.05 * random.Random(f"{item_id}/{arm.policy.encode()}").uniform(-1, 1))

    def _layer_damage(self, layer: LayerSpec, fmt: Native | Fp8 | Mantissa) -> float:
        if isinstance(fmt, Native):
            return 0.0
        share = 1.0 if fmt.heads is None else len(fmt.heads) / layer.num_kv_heads
        damage = self.mantissa.get(layer.layer_idx, _HEALTHY)
        if isinstance(fmt, Fp8):
            damage += self.range_.get(layer.layer_idx, 0.0) * (fmt.scaling is Scaling.UNIT)
            damage += self.spread.get(layer.layer_idx, 0.0) * (fmt.scaling is not Scaling.PER_HEAD)
        return damage * share

    def _anatomy(self, layer: LayerSpec, treatments: Treatments) -> LayerAnatomy:
        """What is out of range at scale 1 is lost there, and keeps a thousandth of its error under other scales."""
        top = _amax(layer.num_kv_heads, layer.layer_idx in self.spread)
        top[:] = _SMALL if layer.layer_idx in self.range_ else top
        queries = layer.num_attention_heads
        lost = np.repeat(top < 1, layer.queries_per_kv_head)
        operands = {}
        for name in ("unit", *(str(scales.scaling) for scales in treatments.scales), "mantissa"):
            own = {"unit": "qkvp", "mantissa": "kv"}.get(name, "qkv")
            output = np.where(lost & (name == "unit"), 1.0, 1e-3)
            for operand in own:
                cache = np.zeros((layer.num_kv_heads if operand in "kv" else queries, 4))
                cache[:, -1] = 1e-3
                if operand in "kv":
                    drowns = name == "unit" or (name == "per_tensor" and layer.layer_idx in self.spread)
                    cache[:, PARTS.index("flushed")] = np.where((top < 1) & drowns, 1.0, 0.0)
                parts = np.stack([output, 0 * output, 0 * output, output], axis=1)
                operands[operand, name] = OperandError(np.ones(len(cache)), cache, parts)
        held = _one_octave(top)
        return LayerAnatomy(np.ones(queries), operands, {"k": held, "v": held})


@dataclass
class _FakeSession:
    engine: FakeEngine
    arm: Arm

    def applied(self) -> Applied:
        dtypes, k_scales, v_scales = [], [], []
        for index, fmt in enumerate(self.arm.policy.formats):
            match fmt:
                case Native():
                    found: tuple[str, tuple[float, ...], tuple[float, ...]] = ("bfloat16", (), ())
                case Fp8(Scaling.UNIT, None):
                    found = ("float8_e4m3fn", (1.0,), (1.0,))
                case Fp8(_, None) if self.arm.scales is not None:
                    found = ("float8_e4m3fn", self.arm.scales.layers[index].k, self.arm.scales.layers[index].v)
                case _:
                    found = ("probe", (), ())
            dtypes.append(found[0])
            k_scales.append(found[1])
            v_scales.append(found[2])
        return Applied(tuple(dtypes), tuple(k_scales), tuple(v_scales), ((),) * len(dtypes))

    def score(self, request: ScoreRequest) -> ScoreResponse:
        self.engine.scored += 1
        kl = self.engine._damage(self.arm, request.item_id)
        count = len(request.token_ids) - request.score_from
        base = 2.0 + random.Random(request.item_id).uniform(-0.5, 0.5)
        changed = min(1.0, math.sqrt(kl) / 2)
        wobble = random.Random(f"{request.item_id}/{self.arm.name}")
        top1 = tuple(-1 if wobble.random() < changed else token for token in request.token_ids[request.score_from :])
        return ScoreResponse(nll=(base + kl,) * count, top1=top1, distribution=_Drift((kl,) * count))

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generation:
        held = tuple(len(prompt) + new_tokens - 1 for prompt in prompts)
        worksheet = price_policy(self.engine.spec, self.arm.policy, held)
        step = 1e-3 + 1e-12 * worksheet.policy_bytes
        return Generation(
            token_ids=((0,) * new_tokens,) * len(prompts),
            ttft_s=max(1e-5 * len(prompt) + 1e-9 * len(prompt) ** 2 for prompt in prompts),
            token_s=(step,) * (new_tokens - 1),
            held_bytes=worksheet.policy_bytes,
            held_tokens=held,
        )

    def load(self, prompts: Sequence[Sequence[int]], due_s: Sequence[float], new_tokens: int) -> tuple[Answered, ...]:
        """One after another, so that who comes early waits."""
        free_s, answered = 0.0, []
        for prompt, due in zip(prompts, due_s, strict=True):
            alone = self.generate([prompt], new_tokens)
            first_s = max(free_s, due) + alone.ttft_s
            free_s = first_s + math.fsum(alone.token_s)
            answered.append(Answered(first_s - due, alone.token_s))
        return tuple(answered)


def _amax(heads: int, spread: bool) -> np.ndarray:
    """Rising over the heads; the first of a layer whose heads spread lies 20 octaves below."""
    amax = np.full(heads, 8.0) * (1 + np.arange(heads) / 8)
    amax[0] *= 2.0**-20 if spread else 1.0
    return amax


def _one_octave(top: np.ndarray) -> Magnitudes:
    """As many elements in every bin of the octave below each head's `top`, [n]."""
    moments = np.zeros((len(top), 3, BINS))
    for step in range(1, BINS_PER_OCTAVE):
        size = top * 2.0 ** (-step / BINS_PER_OCTAVE)
        bins = np.floor((np.log2(size) - LOWEST_OCTAVE) * BINS_PER_OCTAVE + 1e-9).astype(int)
        moments[np.arange(len(top)), :, bins] += np.stack([np.ones_like(size), size, size**2], axis=1)
    return Magnitudes(moments)


def _ranges(layer: LayerSpec, heads: int, buckets: int, tensor: str, spread: bool) -> RangeStats:
    amax = _amax(heads, spread and tensor != "q")
    return RangeStats(
        amax=np.minimum(amax, MAX),
        amax_by_position=np.repeat(amax[:, None], buckets, axis=1),
        mantissa_sse=np.ones((heads, len(SUB_OCTAVES) if tensor != "q" else 0)),
    )
