"""The planted checkpoint on disk: changed shards written anew, the rest linked, the truth beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtriage.checkpoints.attention_weights import AttentionWeights
from kvtriage.checkpoints.faults.edits import Edits
from kvtriage.checkpoints.faults.planting import Change
from kvtriage.checkpoints.json_file import encode_object
from kvtriage.checkpoints.links import followed, link_or_copy, model_files
from kvtriage.checkpoints.model_folder import INDEX_NAME, ModelFolder
from kvtriage.checkpoints.safetensors_file import RawTensor, build_index, read_raw, write_shard
from kvtriage.files import new_folder, write_atomic
from kvtriage.kvcache.policy import Scaling

__all__ = ["TRUTH_NAME", "Planted", "write_planted"]

TRUTH_NAME = "kvtriage_fault.json"


@dataclass(frozen=True)
class Planted:
    """The truth about a planted checkpoint; kvtriage_fault.json holds the same."""

    fault: str
    repair: str
    scaling: Scaling
    """The coarsest scaling that repairs what is a matter of range; UNIT when nothing is."""
    skip_layers: tuple[int, ...]
    """The layers that must stay in BF16, ascending."""
    layers: tuple[int, ...]
    """The layers that were changed, ascending."""
    head: int | None
    strength: float | None


def write_planted(model: ModelFolder, weights: AttentionWeights, change: Change, planted: Planted, out: Path) -> None:
    placed = _placed(weights, change)
    touched = {shard for name, shard in placed.items() if name in change.edits}
    with new_folder(out) as scratch:
        for entry, source in model_files(model.path).items():
            if entry in touched:
                write_shard(scratch / entry, _tensors(weights, change.edits, placed, entry), {"format": "pt"})
            elif entry == "config.json" and change.biases:
                write_atomic(scratch / entry, encode_object(_with_biases(model.config)))
            elif entry == INDEX_NAME and touched:
                write_atomic(scratch / entry, encode_object(build_index(placed, weights.headers, change.edits)))
            else:
                link_or_copy(source, scratch / entry)
        truth = asdict(planted) | {"base_fingerprint": model.fingerprint}
        write_atomic(scratch / TRUTH_NAME, encode_object(truth))


def _placed(weights: AttentionWeights, change: Change) -> dict[str, str]:
    """Tensor → file of the new checkpoint. New biases all go into one file that is written anyway."""
    weight_map = weights.model.weight_map
    new = [name for name in change.edits if name not in weight_map]
    if not new:
        return weight_map
    return weight_map | dict.fromkeys(new, weight_map[weights.name(min(change.layers), "v_proj.weight")])


def _tensors(weights: AttentionWeights, edits: Edits, placed: Mapping[str, str], shard: str) -> dict[str, RawTensor]:
    """Every tensor of `shard`, those that the index leaves out included."""
    header = weights.headers[shard]
    file = followed(weights.model.path, shard)
    kept = {name: read_raw(file, header, name) for name in header.tensors if name not in edits}
    return kept | {name: tensor for name, tensor in edits.items() if placed[name] == shard}


def _with_biases(config: Mapping[str, object]) -> dict[str, object]:
    text = config.get("text_config")
    if isinstance(text, dict):
        return {**config, "text_config": text | {"attention_bias": True}}
    return {**config, "attention_bias": True}
