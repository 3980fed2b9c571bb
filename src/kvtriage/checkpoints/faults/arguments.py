"""What may be asked of `plant`, and of which model. Every check raises BadInput."""

from __future__ import annotations

import os

from kvtriage.checkpoints.faults.table import FAULTS, Fault
from kvtriage.checkpoints.faults.writing import TRUTH_NAME
from kvtriage.checkpoints.model_folder import ModelFolder
from kvtriage.errors import BadInput
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["check_place", "checked_strength", "known_fault", "refuse_second_fault"]


def known_fault(fault: str) -> Fault:
    if fault not in FAULTS:
        raise BadInput(f"there is no fault {fault!r}", hint=f"choose one of {', '.join(FAULTS)}")
    return FAULTS[fault]


def refuse_second_fault(model: ModelFolder) -> None:
    if os.path.lexists(model.path / TRUTH_NAME):
        raise BadInput(
            f"{model.path} already has a fault planted in it",
            hint="plant into the original; range_and_mantissa is the combination with a known truth",
        )
    if model.already_fp8 is not None:
        raise BadInput(
            f"{model.path} carries KV-cache scales, which a fault would make wrong",
            hint="plant into the checkpoint that it was made from",
        )


def checked_strength(fault: Fault, strength: float | None) -> float:
    allowed = fault.strength
    if allowed is None:
        if strength is not None:
            raise BadInput(f"{fault.name} has no strength", hint="leave --strength out")
        return 0.0
    if strength is None:
        return allowed.default
    whole = allowed.unit != "octaves" or strength % 1 == 0
    if not (allowed.low <= strength <= allowed.high and whole):
        number = "a whole number" if allowed.unit == "octaves" else "a number"
        raise BadInput(
            f"{fault.name} cannot be planted with strength {strength:g}",
            hint=f"give {number} from {allowed.low:g} to {allowed.high:g} {allowed.unit}",
        )
    return strength


def check_place(fault: Fault, spec: CacheSpec, layer: int | None, head: int | None) -> None:
    if layer is not None and not fault.takes_layer:
        raise BadInput(f"{fault.name} is not planted in a layer", hint="leave --layer out")
    if head is not None and not fault.takes_head:
        raise BadInput(f"{fault.name} is planted in whole layers", hint="leave --head out")
    if layer is not None and not 0 <= layer < spec.num_layers:
        raise BadInput(f"there is no layer {layer}", hint=f"the model has layers 0 to {spec.num_layers - 1}")
    num_kv_heads = min(each.num_kv_heads for each in spec.layers)
    if head is not None and not 0 <= head < num_kv_heads:
        raise BadInput(f"there is no KV head {head}", hint=f"the model has KV heads 0 to {num_kv_heads - 1}")
