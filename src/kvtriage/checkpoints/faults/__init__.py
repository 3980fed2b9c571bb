"""Planted faults: real checkpoints whose right repair is known, because we broke them.

Every fault leaves the BF16 function as it was (`edits`) and changes only how K and V look on
their way into the cache. What FP8 then needs is the truth that a verdict is held against:
nothing, scales, layers kept in BF16, or both.

`table` names the faults, `family` says what an architecture can carry, `arguments` checks what
was asked, `planting` chooses the edits, `writing` puts the checkpoint on the disk.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvtriage.checkpoints.attention_weights import open_attention
from kvtriage.checkpoints.faults.arguments import check_place, checked_strength, known_fault, refuse_second_fault
from kvtriage.checkpoints.faults.family import UnsupportedFault, family_of
from kvtriage.checkpoints.faults.planting import PLANTERS, Site
from kvtriage.checkpoints.faults.table import FAULTS, Fault, Strength
from kvtriage.checkpoints.faults.writing import TRUTH_NAME, Planted, write_planted
from kvtriage.checkpoints.model_folder import ModelFolder
from kvtriage.errors import BadInput
from kvtriage.files import is_inside
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["FAULTS", "TRUTH_NAME", "Fault", "Planted", "Strength", "UnsupportedFault", "plant"]


def plant(
    model: ModelFolder,
    spec: CacheSpec,
    fault: str,
    *,
    layer: int | None,
    head: int | None,
    strength: float | None,
    out: Path,
) -> Planted:
    """Write the checkpoint `out`: `model` with `fault` planted, whole or not at all.

    Only the weights files that hold a changed tensor are written anew; the others are linked.
    `layer`, `head` and `strength` are None for the fault's own defaults. Raises BadInput for an
    argument that does not fit, UnsupportedFault for a model that cannot carry the fault.
    """
    if os.path.lexists(out):
        raise BadInput(f"{out} already exists", hint="choose a new folder; nothing is overwritten")
    if is_inside(out, model.path):
        raise BadInput(f"{out} lies in the model folder", hint="choose a folder elsewhere; the model is left as it is")
    kind = known_fault(fault)
    refuse_second_fault(model)
    site = Site(open_attention(model, spec), family_of(model), layer, head, checked_strength(kind, strength))
    check_place(kind, spec, layer, head)
    change = PLANTERS[kind.name](site)
    planted = Planted(
        fault=kind.name,
        repair=kind.truth,
        scaling=change.scaling,
        skip_layers=tuple(sorted(change.skip_layers)),
        layers=tuple(sorted(change.layers)),
        head=change.head,
        strength=None if kind.strength is None else site.strength,
    )
    write_planted(model, site.weights, change, planted, out)
    return planted
