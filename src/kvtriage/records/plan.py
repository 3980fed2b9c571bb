"""plan.json: what is studied, on what text, and how."""

from __future__ import annotations

from kvtriage.records.form import Part, Record
from kvtriage.records.study import Study

__all__ = ["DataRef", "LayerGeometry", "ModelRef", "Plan"]


class ModelRef(Part, frozen=True):
    """Which model: `source` as the user named it, `path` the folder, and a fingerprint.

    The fingerprint is the SHA-256 over config.json and the safetensors headers and sizes.
    """

    source: str
    path: str
    architecture: str
    fingerprint: str
    parameters: int


class DataRef(Part, frozen=True):
    source: str
    sha256: str
    documents: int
    characters: int


class LayerGeometry(Part, frozen=True):
    layer_idx: int
    kind: str
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    window_tokens: int | None


class Plan(Record, frozen=True):
    """plan.json: the model's geometry, the study and the data it will use."""

    model: ModelRef
    data: DataRef
    study: Study
    model_type: str
    max_model_len: int
    layers: tuple[LayerGeometry, ...]
    assumed: tuple[str, ...]
    warnings: tuple[str, ...]
