"""Which attention backend vLLM 0.32.0 takes on a GPU, layer by layer, through the table of `backend_table`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvtriage.kvcache.declared import DeclaredCache
from kvtriage.kvcache.policy import CachePolicy, Fp8, Mantissa, Scaling
from kvtriage.kvcache.spec import CacheSpec, IndexKeys, LayerKind, LayerSpec
from kvtriage.kvcache.support.backend_table import RULES, Ask, candidates, flash_attention_version, is_of_kind
from kvtriage.kvcache.support.gpus import Gpu, Platform
from kvtriage.kvcache.versions import MODELLED, EngineVersion

__all__ = ["BackendChoice", "LayerBackend", "Objection", "Serving", "layers_with_own_backend", "pick_backend"]

OWN_SCALES = frozenset(("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"))
"""Their FP8 is fp8_ds_mla: a scale for every 128 elements of each row, computed as the row is written, and no k_scale
is read (model_executor/layers/attention/mla_attention.py:358-375, v1/attention/backends/mla/flashmla_sparse.py:80-90,
flashinfer_mla_sparse_sm120.py:244-247)."""
SINKS: Mapping[str, frozenset[LayerKind]] = {
    "gpt_oss": frozenset((LayerKind.FULL, LayerKind.SLIDING)),
    "mimo_v2_flash": frozenset((LayerKind.SLIDING,)),
}
"""model_type → layers with attention sinks: weights, so config.json need not name them (model_executor/models/
gpt_oss.py:130, mimo_v2.py:292)."""


@dataclass(frozen=True)
class Serving:
    """What decides beside model, policy and GPU.

    `backend` is --attention-backend; `cache_dtype` the word for the layers that are FP8, of fp8, fp8_e4m3 and fp8_e5m2.
    `with_images` is for models that attend to an image in both directions (Gemma 3 and 4), when they are given any.
    """

    backend: str | None = None
    cache_dtype: str = "fp8"
    with_images: bool = False
    declared: DeclaredCache | None = None
    version: EngineVersion = MODELLED


@dataclass(frozen=True)
class Objection:
    """Why a backend will not do for a layer; `source` is file:line below vLLM's package folder."""

    backend: str
    sentence: str
    source: str


@dataclass(frozen=True)
class LayerBackend:
    """What all layers get that ask for the same. `backend` is None when none will do; `fails` says why one is taken
    and raises.

    `flash_attn_version` is that of FLASH_ATTN, None for others.
    """

    layers: tuple[int, ...]
    cache_dtype: str
    backend: str | None
    flash_attn_version: int | None
    passed_over: tuple[Objection, ...]
    fails: Objection | None

    @property
    def serves(self) -> bool:
        return self.backend is not None and self.fails is None


@dataclass(frozen=True)
class BackendChoice:
    """By layer, in the order in which they first ask. Layers whose class brings a backend of its own are left out.

    `serves_per_head` says whether on this GPU the FP8 layers could have a scale for each KV head. Latent layers
    cannot: they have one vector.
    """

    by_layer: tuple[LayerBackend, ...]
    serves_per_head: bool

    @property
    def name(self) -> str | None:
        """The backend of the FP8 layers, or of all where none is FP8. None when there is none."""
        found = [choice for choice in self.by_layer if choice.cache_dtype != "auto"] or list(self.by_layer)
        return found[0].backend if found else None

    @property
    def serves(self) -> bool:
        return all(choice.serves for choice in self.by_layer)

    @property
    def computes_scales(self) -> bool:
        """True where every FP8 layer is stored with scales that the engine computes, so that none of a checkpoint's is
        read."""
        quantised = [choice for choice in self.by_layer if choice.cache_dtype != "auto"]
        return bool(quantised) and all(choice.backend in OWN_SCALES for choice in quantised)


def pick_backend(spec: CacheSpec, policy: CachePolicy, gpu: Gpu, serving: Serving | None = None) -> BackendChoice:
    """The backend of every layer that attends. Raises ValueError for a probe, which no server can apply."""
    given = Serving() if serving is None else serving
    if any(isinstance(fmt, Mantissa) or (isinstance(fmt, Fp8) and fmt.heads is not None) for fmt in policy.formats):
        raise ValueError("a probe cannot be served")
    own, whole = layers_with_own_backend(spec), _whole(spec, policy, given.declared)
    groups: dict[Ask, list[int]] = {}
    for layer in spec.layers:
        if layer.elements_per_position > 0 and layer.layer_idx not in own:
            is_fp8 = isinstance(policy.formats[layer.layer_idx], Fp8)
            groups.setdefault(_ask(layer, whole, gpu, given, is_fp8=is_fp8), []).append(layer.layer_idx)
    by_layer = tuple(_choose(ask, tuple(layers), given.backend) for ask, layers in groups.items())
    quantised = [ask for ask in groups if ask.is_fp8]
    return BackendChoice(by_layer, bool(quantised) and all(_takes_per_head(ask, given.backend) for ask in quantised))


def layers_with_own_backend(spec: CacheSpec) -> frozenset[int]:
    """DeepSeek V4 in all layers (models/deepseek_v4/nvidia/model.py:1013-1044), MiniMax M3 in those with an index
    (models/minimax_m3/common/sparse_attention.py:525-592)."""
    if any(layer.compress_ratio is not None for layer in spec.layers):
        return frozenset(layer.layer_idx for layer in spec.layers)
    return frozenset(
        layer.layer_idx for layer in spec.layers if layer.kind is not LayerKind.LATENT and _has_index(layer)
    )


def _has_index(layer: LayerSpec) -> bool:
    return any(isinstance(cache, IndexKeys) for cache in layer.beside)


@dataclass(frozen=True)
class _Whole:
    """What all layers decide together."""

    sinks: frozenset[LayerKind]
    has_index: bool
    per_head_scales: bool


def _whole(spec: CacheSpec, policy: CachePolicy, declared: DeclaredCache | None) -> _Whole:
    return _Whole(
        sinks=SINKS.get(spec.model_type, frozenset()),
        has_index=any(_has_index(layer) for layer in spec.layers),
        per_head_scales=_has_per_head_scales(spec, policy, declared),
    )


def _ask(layer: LayerSpec, whole: _Whole, gpu: Gpu, serving: Serving, *, is_fp8: bool) -> Ask:
    is_latent = layer.kind is LayerKind.LATENT
    return Ask(
        gpu=gpu,
        cache_dtype=serving.cache_dtype if is_fp8 else "auto",
        num_heads=layer.num_attention_heads,
        head_dim=layer.head_dim,
        head_dim_v=layer.head_dim_v,
        is_latent=is_latent,
        is_sparse=is_latent and whole.has_index,
        is_cross=layer.kind is LayerKind.CROSS,
        has_sink=layer.kind in whole.sinks,
        with_images=serving.with_images,
        per_head_scales=not is_latent and whole.per_head_scales,
    )


def _has_per_head_scales(spec: CacheSpec, policy: CachePolicy, declared: DeclaredCache | None) -> bool:
    """A checkpoint of strategy attn_head asks for them in every layer, be it skipped or native
    (model_executor/layers/attention/attention.py:293-297)."""
    if declared is not None and declared.scaling is Scaling.PER_HEAD:
        return True
    asks = any(isinstance(fmt, Fp8) and fmt.scaling is Scaling.PER_HEAD for fmt in policy.formats)
    return asks and not spec.has_one_kv_head


def _choose(ask: Ask, layers: tuple[int, ...], backend: str | None) -> LayerBackend:
    passed_over: list[Objection] = []
    for name in _tried(ask, backend):
        refusals, failures = _objections(name, ask)
        if refusals:
            passed_over.extend(refusals)
            continue
        version = _version(ask) if name == "FLASH_ATTN" and ask.gpu.platform is Platform.CUDA else None
        fails = failures[0] if failures else None
        return LayerBackend(layers, ask.cache_dtype, name, version, tuple(passed_over), fails)
    return LayerBackend(layers, ask.cache_dtype, None, None, tuple(passed_over), None)


def _tried(ask: Ask, backend: str | None) -> tuple[str, ...]:
    """CPUs know one backend whatever they are told (platforms/cpu.py:143-179); K and V of different width are for their
    own two (model_executor/models/mimo_v2.py:300-319)."""
    if backend is None or ask.gpu.platform is Platform.CPU:
        return candidates(ask)
    if ask.widths_differ and not backend.endswith("_DIFFKV"):
        return candidates(ask)
    return (backend,)


def _objections(name: str, ask: Ask) -> tuple[list[Objection], list[Objection]]:
    """Refusals at the choice, and failures after it. Intel GPUs take what they have without asking
    (platforms/xpu.py:143-258)."""
    if ask.gpu.platform is Platform.XPU:
        return [], []
    if not is_of_kind(name, ask):
        kind = "latent" if ask.is_latent else "ordinary"
        return [Objection(name, f"it is not for {kind} attention", "v1/attention/backend.py:316-330")], []
    found: tuple[list[Objection], list[Objection]] = ([], [])
    for rule in RULES:
        if name in rule.backends and rule.refuses(ask):
            found[rule.fails].append(Objection(name, rule.sentence, rule.source))
    return found


def _version(ask: Ask) -> int:
    return flash_attention_version(ask.gpu, ask.head_dim, ask.head_dim, fp8=ask.is_fp8, sink=ask.has_sink)


def _takes_per_head(ask: Ask, backend: str | None) -> bool:
    if ask.is_latent or ask.widths_differ or ask.gpu.platform is not Platform.CUDA:
        return False
    return _choose(replace(ask, per_head_scales=True), (), backend).serves
