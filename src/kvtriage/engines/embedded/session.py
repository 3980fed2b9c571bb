"""One arm of the embedded engine: what it says of a text, and how fast it goes on with one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvtriage.engines.base import Arm, Generation, ScoreRequest, ScoreResponse
from kvtriage.engines.embedded.beginning import Beginning, Beginnings
from kvtriage.engines.embedded.kernel.kernel import Decode, NoKernel
from kvtriage.engines.embedded.log_probs import LogProbs, check_logits, normalise
from kvtriage.engines.embedded.model import LanguageModel
from kvtriage.engines.embedded.sharing import Pass, SharedPasses, ways_of_storing
from kvtriage.engines.embedded.storing import LayerStorage, StoringAttention, applied
from kvtriage.engines.info import Applied
from kvtriage.errors import PolicyNotApplied

__all__ = ["BY_TORCH", "EmbeddedSession"]

BY_TORCH = NoKernel("passes that are scored")


class EmbeddedSession:
    """See engines.base.Session."""

    def __init__(
        self,
        model: LanguageModel,
        arm: Arm,
        storages: tuple[LayerStorage, ...],
        decode: Decode,
        passes: SharedPasses,
        beginnings: Beginnings,
    ) -> None:
        self._decode = decode
        self._passes = passes
        self._beginnings = beginnings
        self._model = model
        self._arm = arm
        self._storages = storages
        self._ways = ways_of_storing(arm)

    def applied(self) -> Applied:
        return applied(self._storages)

    @torch.inference_mode()
    def score(self, request: ScoreRequest) -> ScoreResponse:
        tokens = self._model.tokens([request.token_ids])
        found = self.distribution(request).values
        targets = tokens[0, request.score_from :]
        return ScoreResponse(
            nll=tuple((-found.gather(1, targets[:, None])[:, 0]).tolist()),
            top1=tuple(found.argmax(dim=-1).tolist()),
            distribution=LogProbs(found),
        )

    @torch.inference_mode()
    def distribution(self, request: ScoreRequest) -> LogProbs:
        """Of the scored positions: [S, V]. Raises NonFinite."""
        return LogProbs(normalise(self._logits(request)))

    def _logits(self, request: ScoreRequest) -> Tensor:
        """Of the scored positions: [S, V]. Goes on behind the longest beginning that is kept, piece after piece, and
        in each at the layer where an earlier arm went another way."""
        way = self._ways, self._arm.prefill_chunk
        begun = self._beginnings.longest(request, way)
        pieces = self._pieces(request, begun.tokens)
        known, shared = self._known(request, pieces)
        if begun.first_layer > shared:
            begun, pieces = Beginning(), self._pieces(request, 0)
            known, shared = self._known(request, pieces)
        attention = StoringAttention(self._storages, len(request.token_ids), BY_TORCH, begun.caches)
        tokens = self._model.tokens([request.token_ids])
        computed: dict[int, list[Any]] = {}
        found = []
        for start, stop in pieces:
            keep = slice(max(request.score_from - 1 - start, 0), min(stop, len(request.token_ids) - 1) - start)
            resuming = self._model.resuming(known.get(start, ()), shared)
            with self._model.recording() as computed[start], resuming:
                found.append(self._model.logits(tokens[:, start:stop], attention, start=start, keep=keep)[0])
            if stop in request.cuts:
                attention.check_finite()
                self._beginnings.keep(request, way, attention.caches)
        attention.check_finite()
        if self._arm.prefill_chunk is None:
            self._passes.keep(request, Pass(self._ways, computed))
        scored = [logits for logits in found if len(logits)]
        return scored[0] if len(scored) == 1 else torch.cat(scored)

    def _pieces(self, request: ScoreRequest, begun: int) -> list[tuple[int, int]]:
        """Where the passes over a text begin and end, of which `begun` tokens are known."""
        ends = (*request.cuts, len(request.token_ids))
        step = self._arm.prefill_chunk or ends[-1]
        spans = itertools.pairwise((0, *ends))
        return [
            (at, min(at + step, stop)) for start, stop in spans if start >= begun for at in range(start, stop, step)
        ]

    def _known(
        self, request: ScoreRequest, pieces: Sequence[tuple[int, int]]
    ) -> tuple[Mapping[int, Sequence[Any]], int]:
        """See `SharedPasses.furthest`. An arm that repeats another in chunks computes it all."""
        if self._arm.prefill_chunk is not None:
            return {}, 0
        return self._passes.furthest(request, self._ways, [start for start, _ in pieces])

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generation:
        """Prompts of one length are read together; all sequences then take their steps together, without padding."""
        if "probe" in self.applied().dtypes:
            raise PolicyNotApplied(
                f"arm {self._arm.name!r} is a probe and cannot be timed", hint="time storable policies only"
            )
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        lengths = [len(prompts[row]) for row in order]
        starts = torch.tensor(lengths, device=self._model.device)[:, None]
        times = [self._now()]
        attention, logits = self._read([prompts[row] for row in order], lengths[-1] + new_tokens - 1)
        chosen = [logits.argmax(dim=-1, keepdim=True)]
        times.append(self._now())
        for index in range(new_tokens - 1):
            logits = self._model.logits(chosen[-1], attention, start=starts + index, keep=slice(0, 1))[:, 0]
            chosen.append(logits.argmax(dim=-1, keepdim=True))
            times.append(self._now())
        attention.check_finite()
        check_logits(logits)
        written = dict(zip(order, torch.cat(chosen, dim=1).tolist(), strict=True))
        held = dict(zip(order, attention.lengths, strict=True))
        return Generation(
            token_ids=tuple(tuple(written[row]) for row in range(len(prompts))),
            ttft_s=times[1] - times[0],
            token_s=tuple(after - before for before, after in itertools.pairwise(times[1:])),
            held_bytes=attention.held_bytes,
            held_tokens=tuple(held[row] for row in range(len(prompts))),
        )

    def _read(self, prompts: Sequence[Sequence[int]], capacity: int) -> tuple[StoringAttention, Tensor]:
        """What is stored of prompts, which come in order of length, and what the model says behind them: [B, V]."""
        parts, found = [], []
        for length, some in itertools.groupby(prompts, key=len):
            parts.append(StoringAttention(self._storages, capacity, self._decode))
            tokens = self._model.tokens(list(some))
            found.append(self._model.logits(tokens, parts[-1], start=0, keep=slice(length - 1, length))[:, 0])
        if len(parts) == 1:
            return parts[0], found[0]
        whole = StoringAttention(self._storages, capacity, self._decode)
        whole.take_over(parts)
        return whole, torch.cat(found)

    def _now(self) -> float:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()
