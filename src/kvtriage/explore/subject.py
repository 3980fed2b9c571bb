"""What is explored: a model's cache, how it is served, and what a case has measured of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from kvtriage.kvcache.allocator import Backend
from kvtriage.kvcache.declared import DeclaredCache
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.kvcache.support.gpus import Gpu
from kvtriage.records.pairing import Trials
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.units import GIB

__all__ = ["Measured", "Subject"]


@dataclass(frozen=True)
class Measured:
    """What a case knows so far: probes layer by layer, and the trials of its arms."""

    sensitivities: Sensitivities | None
    trials: Trials | None
    confidence: float
    kl_margin: float
    """Mean KL from BF16 that the study's rule allows, nats per token."""


@dataclass(frozen=True)
class Subject:
    """`title` is the model as the user named it, `folder` what `vllm serve` is given. For scales it may be another of
    the `models`: a case writes checkpoints that hold them.
    """

    title: str
    folder: str
    spec: CacheSpec
    native_dtype: str = "bfloat16"
    gpu: Gpu | None = None
    declared: DeclaredCache | None = None
    backend: Backend = Backend.FLASH_ATTN
    """The attention backend that serves: the size of pages is its affair."""
    memory_bytes: int = 16 * GIB
    """Cache memory of each GPU that the page starts with."""
    scaling: Scaling = Scaling.PER_HEAD
    """The scaling that the page starts with."""
    skip_layers: tuple[int, ...] = ()
    """Layers that the page starts with in BF16."""
    models: Mapping[Scaling, str] = field(default_factory=dict)
    measured: Measured | None = None

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """Layers with K and V of their own: those that a policy reaches, ascending."""
        return tuple(layer.layer_idx for layer in self.spec.layers if layer.holds_kv)
