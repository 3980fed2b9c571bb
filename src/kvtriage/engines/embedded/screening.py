"""Probes for a small part of their price: only the scored positions move.

A probe quantises one layer and asks what that does to the predictions of the last positions. What it
does there directly is computed in full: the scored queries read the layer's whole cache in the probe's
format. What it does to earlier positions, and through their K and V in later layers to the scored ones,
is left out: an earlier position's rounding error reaches a scored one averaged with hundreds of others.
So a probe runs S positions through the layers from its own on, where a whole pass runs T positions, and
those that begin at the same layer run side by side. Axes: B probes, T tokens, S scored positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvtriage.engines.base import ScoreRequest, Screening, Treatments
from kvtriage.engines.embedded.attention import AttentionCall, attend, check_geometry
from kvtriage.engines.embedded.dissecting import dissect
from kvtriage.engines.embedded.log_probs import LogProbs, normalise
from kvtriage.engines.embedded.model import LanguageModel
from kvtriage.engines.embedded.session import BY_TORCH
from kvtriage.engines.embedded.storing import LayerStorage, StoringAttention
from kvtriage.fp8.anatomy import Anatomy, LayerAnatomy

__all__ = ["SCREENED_SHARE", "each_alone", "screen_request"]

SCREENED_SHARE = 8
"""At most this part of a text is screened, however much of it is scored: a quarter is the price of everything."""
_LOGITS_BYTES = 128 * 1024**2
"""Of the distributions of one text that are worked on side by side."""

Storages = tuple[LayerStorage, ...]
Alone = tuple[int, str, Storages]
"""Layer, 'q' or 'p', and storages that round it there and nothing else."""


class _Keeping:
    """A native pass that keeps K and V of every layer, and takes each layer's anatomy as it passes."""

    def __init__(self, native: StoringAttention, scored: int, treatments: Treatments) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.layers: list[LayerAnatomy] = []
        self._native = native
        self._scored = scored
        self._treatments = treatments

    def attend(self, call: AttentionCall) -> Tensor:
        self.kept.append((call.key, call.value))
        self.layers.append(dissect(call, self._scored, self._treatments))
        return self._native.attend(call)


class _SideBySide:
    """B probes over the last S positions; those before them are as the native pass left them."""

    def __init__(self, rows: Sequence[Storages], kept: Sequence[tuple[Tensor, Tensor]], start: int) -> None:
        self._rows = rows
        self._kept = kept
        self._start = start

    def attend(self, call: AttentionCall) -> Tensor:
        storages = [row[call.layer_idx] for row in self._rows]
        check_geometry(call, storages[0].spec)
        if all(_alike(storage, storages[0]) for storage in storages):
            return self._attend(call, storages[0])
        return torch.cat([self._attend(_row(call, index), storage) for index, storage in enumerate(storages)])

    def _attend(self, call: AttentionCall, storage: LayerStorage) -> Tensor:
        key, value = self._kept[call.layer_idx]
        seen = replace(
            call,
            query=call.query if storage.query is None else storage.query.decode(storage.query.encode(call.query)),
            key=storage.key.decode(storage.key.encode(_joined(key[:, :, : self._start], call.key))),
            value=storage.value.decode(storage.value.encode(_joined(value[:, :, : self._start], call.value))),
        )
        return attend(seen, storage.fp8_heads)


def _alike(storage: LayerStorage, other: LayerStorage) -> bool:
    return (
        (storage.key, storage.value) == (other.key, other.value)
        and (storage.query is None) == (other.query is None)
        and (storage.fp8_heads is None) == (other.fp8_heads is None)
    )


def each_alone(native: Storages, quantised: Storages) -> list[Alone]:
    """Q and the probabilities of each layer by themselves, as `quantised` rounds them; none where it rounds neither."""
    found: list[Alone] = []
    for layer_idx, (own, all_of_it) in enumerate(zip(native, quantised, strict=True)):
        for operand, changed in (
            ("q", replace(own, query=all_of_it.query)),
            ("p", replace(own, fp8_heads=all_of_it.fp8_heads)),
        ):
            if changed.query is not None or changed.fp8_heads is not None:
                found.append((layer_idx, operand, (*native[:layer_idx], changed, *native[layer_idx + 1 :])))
    return found


def _row(call: AttentionCall, index: int) -> AttentionCall:
    own = slice(index, index + 1)
    return replace(call, query=call.query[own], key=call.key[own], value=call.value[own])


def _joined(past: Tensor, new: Tensor) -> Tensor:
    return torch.cat([past.expand(new.shape[0], -1, -1, -1), new], dim=2)


def screen_request(
    model: LanguageModel,
    request: ScoreRequest,
    probes: Sequence[tuple[int, Storages]],
    native: Storages,
    treatments: Treatments,
    alone: Sequence[Alone] = (),
) -> Screening:
    """One native pass with its anatomy, then every probe of it, and every operand `alone`.

    `probes`: first layer that is not native, storages.
    """
    # Nothing is predicted from the last token.
    stop, layers = len(request.token_ids) - 1, len(native)
    start = max(request.score_from - 1, stop - max(1, len(request.token_ids) // SCREENED_SHARE))
    tokens = model.tokens([request.token_ids[:stop]])
    storing = StoringAttention(native, stop, BY_TORCH)
    keeping = _Keeping(storing, stop - start, treatments)
    with model.recording() as outputs:
        reference = LogProbs(normalise(model.logits(tokens, keeping, start=0, keep=slice(start, stop))[0]))
    storing.check_finite()
    rows = [*probes, *((layer_idx, storages) for layer_idx, _, storages in alone)]
    damage = [0.0] * len(rows)
    evaluated = layers * stop
    for first, numbers in _batches(rows, reference.values.nbytes):
        attention = _SideBySide([rows[number][1] for number in numbers], keeping.kept, start)
        batch = tokens[:, start:].expand(len(numbers), -1)
        with model.resuming([_cut(output, start, len(numbers)) for output in outputs[:first]], first):
            logits = model.logits(batch, attention, start=start, keep=slice(0, stop - start))
        for number, own in zip(numbers, logits, strict=True):
            kl = LogProbs(normalise(own)).kl_from(reference)
            damage[number] = sum(kl) / len(kl)
        evaluated += (layers - first) * (stop - start) * len(numbers)
    anatomy = list(keeping.layers)
    for (layer_idx, operand, _), mean in zip(alone, damage[len(probes) :], strict=True):
        anatomy[layer_idx] = replace(anatomy[layer_idx], logits={**anatomy[layer_idx].logits, operand: (mean,)})
    return Screening(tuple((kl,) for kl in damage[: len(probes)]), Anatomy(tuple(anatomy), stop), evaluated)


def _batches(probes: Sequence[tuple[int, Storages]], row_bytes: int) -> Iterator[tuple[int, list[int]]]:
    """(first layer, the probes that begin there), as many at once as there is room for."""
    ordered = sorted(range(len(probes)), key=lambda number: probes[number][0])
    for first, group in itertools.groupby(ordered, key=lambda number: probes[number][0]):
        numbers, most = list(group), max(1, _LOGITS_BYTES // row_bytes)
        for begin in range(0, len(numbers), most):
            yield first, numbers[begin : begin + most]


def _cut(output: Any, start: int, rows: int) -> Any:
    """A layer's recorded output from `start` on, once per probe; what is no hidden state stays as it is."""
    match output:
        case Tensor():
            return output[:, start:].expand(rows, -1, -1)
        case (hidden, *others):
            return (_cut(hidden, start, rows), *others)
        case _:
            return output
