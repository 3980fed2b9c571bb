"""What each attention backend of vLLM 0.32.0 serves: one table, each row with its source.

A layer asks for a backend with a few facts (`Ask`); vLLM goes through the backends of the GPU in order and takes the
first that objects to none of them (platforms/cuda.py:75-165, v1/attention/backend.py:276-369). A row of RULES is one
objection. Rows that FAIL are not asked then: the backend is taken, and its constructor raises. Sources are file:line
below vLLM's package folder.

What is taken for granted: the wheel's own FlashAttention 2, 3 and 4, an importable FlashInfer that can fetch its
kernels, and neither TokenSpeed's package nor AITER.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtriage.kvcache.support.gpus import Gpu, Platform

__all__ = ["ONLY_FLASH", "RULES", "Ask", "Rule", "candidates", "flash_attention_version", "is_of_kind"]


@dataclass(frozen=True)
class Ask:
    """What one layer needs of its backend. `cache_dtype` is 'auto', 'fp8', 'fp8_e4m3' or 'fp8_e5m2'."""

    gpu: Gpu
    cache_dtype: str
    num_heads: int
    head_dim: int
    head_dim_v: int
    is_latent: bool = False
    is_sparse: bool = False
    is_cross: bool = False
    has_sink: bool = False
    with_images: bool = False
    per_head_scales: bool = False

    @property
    def is_fp8(self) -> bool:
        return self.cache_dtype.startswith("fp8")

    @property
    def widths_differ(self) -> bool:
        """K and V of different width, each stored (MiMo V2)."""
        return not self.is_latent and self.head_dim != self.head_dim_v


@dataclass(frozen=True)
class Rule:
    """`refuses` says when the backend will not do, `sentence` why. With `fails` only its constructor finds out."""

    backends: tuple[str, ...]
    refuses: Callable[[Ask], bool]
    sentence: str
    source: str
    fails: bool = False


DENSE = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
TWO_WAY = ("TRITON_FLASH_ATTN", "TRITON_FLASHINFER")
DIFFKV = ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV")
LATENT = ("FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "CUTLASS_MLA", "TRITON_MLA")
SPARSE = (
    "FLASH_ATTN_MLA_SPARSE",
    "FLASHMLA_SPARSE",
    "FLASHINFER_MLA_SPARSE",
    "FLASHINFER_MLA_SPARSE_SM90",
    "FLASHINFER_MLA_SPARSE_SM120",
)


def is_of_kind(backend: str, ask: Ask) -> bool:
    """False for a latent backend and ordinary attention, and the reverse. A name that is not in the table passes."""
    if backend in SPARSE:
        return ask.is_latent and ask.is_sparse
    if backend in LATENT:
        return ask.is_latent and not ask.is_sparse
    return not ask.is_latent if backend in (*DENSE, *TWO_WAY, *DIFFKV) else True


def candidates(ask: Ask) -> tuple[str, ...]:
    """Backends in the order in which they are tried."""
    if ask.widths_differ and ask.gpu.platform in (Platform.ROCM, Platform.XPU):
        return DIFFKV[1:]
    match ask.gpu.platform:
        case Platform.CPU:
            return ("CPU_MLA",) if ask.is_latent else ("CPU_ATTN",)
        case Platform.XPU:
            return (("XPU_MLA_SPARSE" if ask.is_sparse else "FLASH_ATTN_MLA") if ask.is_latent else "FLASH_ATTN",)
        case Platform.ROCM:
            if ask.is_latent:
                return ("ROCM_AITER_MLA_SPARSE",) if ask.is_sparse else ("TRITON_MLA",)
            return ("ROCM_ATTN", "TRITON_ATTN")
        case Platform.CUDA:
            if ask.widths_differ:
                return DIFFKV
            if ask.is_latent:
                return _sparse_on_cuda(ask) if ask.is_sparse else _latent_on_cuda(ask.gpu.major)
            return _dense_on_cuda(ask)


def _dense_on_cuda(ask: Ask) -> tuple[str, ...]:
    """platforms/cuda.py:136-165."""
    if ask.gpu.major == 10:
        two_way = ("TRITON_FLASHINFER",) if ask.with_images else ()
        return (*two_way, "FLASHINFER", "FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION")
    two_way = ("TRITON_FLASH_ATTN",) if ask.gpu.major == 9 and ask.with_images else ()
    return (*two_way, *DENSE)


def _latent_on_cuda(major: int) -> tuple[str, ...]:
    """platforms/cuda.py:88-135."""
    if major == 10:
        return ("FLASHINFER_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")
    return ("TRITON_MLA",) if major == 12 else ("FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA")


def _sparse_on_cuda(ask: Ask) -> tuple[str, ...]:
    """platforms/cuda.py:89-135."""
    if ask.gpu.major == 12:
        return ("FLASHINFER_MLA_SPARSE_SM120",)
    if ask.gpu.major == 10:
        if ask.is_fp8 or ask.num_heads <= 16:
            return ("FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE")
        return ("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE")
    tail = ("FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE")
    hopper = "FLASHINFER_MLA_SPARSE_SM90"
    return (hopper, *tail) if ask.head_dim == 512 else (*tail, hopper)


def flash_attention_version(gpu: Gpu, head_dim: int | None, head_dim_v: int | None, *, fp8: bool, sink: bool) -> int:
    """2, 3 or 4 (v1/attention/backends/fa_utils.py:74-216). A width of None is the GPU's own version."""
    if gpu.major == 9:
        if head_dim is None:
            return 3
        return 4 if head_dim > 256 or (sink and head_dim != head_dim_v) else 3
    if gpu.major != 10:
        return 2
    if head_dim is None or head_dim <= 128 or (head_dim, head_dim_v) == (192, 128):
        return 4
    return 4 if head_dim == 256 == head_dim_v and not fp8 and not sink else 2


def _version(ask: Ask, head_dim_v: int | None = None) -> int:
    width_v = ask.head_dim if head_dim_v is None else head_dim_v
    return flash_attention_version(ask.gpu, ask.head_dim, width_v, fp8=ask.is_fp8, sink=ask.has_sink)


def _own_version(ask: Ask) -> int:
    return flash_attention_version(ask.gpu, None, None, fp8=ask.is_fp8, sink=False)


def _no_flash_fp8(ask: Ask) -> bool:
    """v1/attention/backends/fa_utils.py:282-314."""
    if not ask.is_fp8:
        return False
    version = _version(ask)
    if ask.gpu.major == 9:
        return not (version == 3 or (version == 4 and ask.head_dim == 512))
    return not (ask.gpu.major == 10 and version == 4)


def _before_sm89(ask: Ask) -> bool:
    return ask.gpu.platform is Platform.CUDA and ask.is_fp8 and ask.gpu.sm < 89


def _is_e5m2(ask: Ask) -> bool:
    return ask.cache_dtype == "fp8_e5m2"


_BACKENDS = "v1/attention/backends"
_MLA = f"{_BACKENDS}/mla"
_FLASH_FP8 = "FP8 needs FlashAttention 3 on Hopper (4 for heads of 512), or 4 on data-centre Blackwell"
ONLY_FLASH = "scales per head are for FlashAttention 3 and 4 alone"

RULES: tuple[Rule, ...] = (
    # FlashAttention
    Rule(("FLASH_ATTN",), lambda ask: ask.gpu.sm < 80, "it needs sm80", f"{_BACKENDS}/flash_attn.py:453"),
    Rule(
        ("FLASH_ATTN",),
        lambda ask: ask.head_dim % 8 != 0 or ask.head_dim > (512 if ask.gpu.major in (9, 10, 11) else 256),
        "its head_dim is a multiple of 8 up to 256, or 512 where there is FlashAttention 4 (sm90 to sm110)",
        f"{_BACKENDS}/flash_attn.py:423-430, vllm_flash_attn/flash_attn_interface.py:72-86",
    ),
    Rule(("FLASH_ATTN",), _is_e5m2, "its FP8 is E4M3", f"{_BACKENDS}/flash_attn.py:288-294"),
    Rule(("FLASH_ATTN",), _no_flash_fp8, _FLASH_FP8, f"{_BACKENDS}/flash_attn.py:485-501"),
    Rule(
        ("FLASH_ATTN",),
        lambda ask: ask.has_sink and _own_version(ask) < 3,
        "attention sinks need FlashAttention 3 or 4",
        f"{_BACKENDS}/fa_utils.py:319-322",
    ),
    Rule(
        ("FLASH_ATTN",),
        lambda ask: ask.per_head_scales and _own_version(ask) < 3,
        ONLY_FLASH,
        f"{_BACKENDS}/flash_attn.py:410-412",
    ),
    Rule(
        ("FLASH_ATTN",),
        lambda ask: ask.with_images and ((ask.is_fp8 and ask.gpu.major == 9) or _version(ask) != 4),
        "images attended in both directions need FlashAttention 4, and on Hopper no FP8",
        f"{_BACKENDS}/flash_attn.py:473-516",
    ),
    # FlashInfer
    Rule(
        ("FLASHINFER",),
        lambda ask: not 80 <= ask.gpu.sm <= 121,
        "it serves sm80 to sm121",
        f"{_BACKENDS}/flashinfer.py:571",
    ),
    Rule(
        ("FLASHINFER",),
        lambda ask: ask.head_dim not in (64, 128, 256, 512),
        "its head_dim is 64, 128, 256 or 512",
        f"{_BACKENDS}/flashinfer.py:566-568",
    ),
    Rule(
        ("FLASHINFER",),
        lambda ask: ask.has_sink and ask.gpu.major not in (9, 10, 12),
        "attention sinks need Hopper or Blackwell",
        f"{_BACKENDS}/flashinfer.py:582-601",
    ),
    Rule(
        ("FLASHINFER",),
        lambda ask: ask.with_images or ask.is_cross,
        "it attends to the past alone",
        "v1/attention/backend.py:175, :248",
    ),
    # Triton
    Rule(
        ("TRITON_ATTN",),
        lambda ask: ask.head_dim < 32,
        "its head_dim is 32 at least",
        f"{_BACKENDS}/triton_attn.py:355",
    ),
    Rule(
        ("TRITON_ATTN", "TRITON_ATTN_DIFFKV"),
        _before_sm89,
        "its FP8 needs sm89",
        f"{_BACKENDS}/triton_attn.py:486-499",
        fails=True,
    ),
    # FlexAttention
    Rule(("FLEX_ATTENTION",), lambda ask: ask.is_fp8, "it stores no FP8", f"{_BACKENDS}/flex_attention.py:96-100"),
    Rule(
        ("FLEX_ATTENTION",),
        lambda ask: ask.has_sink or ask.is_cross,
        "it has no attention sinks and no cross attention",
        f"{_BACKENDS}/flex_attention.py:121-123",
    ),
    # Images in both directions, text in one
    Rule(
        TWO_WAY,
        lambda ask: ask.head_dim not in (256, 512) or ask.has_sink,
        "its head_dim is 256 or 512",
        f"{_BACKENDS}/triton_flash_attn.py:56-65",
    ),
    Rule(("TRITON_FLASH_ATTN",), _no_flash_fp8, _FLASH_FP8, f"{_BACKENDS}/triton_flash_attn.py:18-53"),
    # K and V of different width
    Rule(
        ("FLASH_ATTN_DIFFKV",),
        lambda ask: _version(ask, ask.head_dim_v) < 3,
        "K and V of different width need FlashAttention 3 or 4",
        f"{_BACKENDS}/flash_attn_diffkv.py:43-64",
    ),
    Rule(("FLASH_ATTN_DIFFKV",), _no_flash_fp8, _FLASH_FP8, f"{_BACKENDS}/flash_attn.py:1119-1135", fails=True),
    Rule(
        DIFFKV, _is_e5m2, "its FP8 is E4M3", f"{_BACKENDS}/triton_attn_diffkv.py:73-78, flash_attn.py:1119", fails=True
    ),
    # One scale per head
    Rule(
        (*DENSE[1:], *TWO_WAY, "ROCM_ATTN"),
        lambda ask: ask.per_head_scales,
        ONLY_FLASH,
        "v1/attention/backend.py:183, :331",
    ),
    # Latent
    Rule(("FLASH_ATTN_MLA",), lambda ask: ask.gpu.major != 9, "it is for Hopper", f"{_MLA}/flashattn_mla.py:70"),
    Rule(("FLASH_ATTN_MLA",), lambda ask: ask.is_fp8, "it stores no FP8", f"{_MLA}/flashattn_mla.py:43-47"),
    Rule(("FLASHMLA",), lambda ask: ask.gpu.major != 9, "it is for Hopper", "v1/attention/ops/flashmla.py:51-58"),
    Rule(
        ("FLASHINFER_MLA", "CUTLASS_MLA"),
        lambda ask: ask.gpu.major != 10,
        "it is for data-centre Blackwell",
        f"{_MLA}/flashinfer_mla.py:220, cutlass_mla.py:65",
    ),
    Rule(LATENT, _is_e5m2, "its FP8 is E4M3", f"{_MLA}/triton_mla.py:97-103"),
    Rule(
        LATENT[:-1],
        lambda ask: ask.head_dim not in (320, 512, 576),
        "its latent and rotary width is 320, 512 or 576",
        "model_executor/layers/attention/mla_attention.py:1601",
    ),
    Rule(("TRITON_MLA",), _before_sm89, "its FP8 needs sm89", f"{_MLA}/triton_mla.py:195-211", fails=True),
    # Latent with an index
    Rule(
        ("FLASH_ATTN_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM90"),
        lambda ask: ask.gpu.major != 9,
        "it is for Hopper",
        f"{_MLA}/flashattn_mla_sparse.py:77, flashinfer_mla_sparse_sm90.py:189",
    ),
    Rule(
        ("FLASH_ATTN_MLA_SPARSE",), lambda ask: ask.is_fp8, "it stores no FP8", f"{_MLA}/flashattn_mla_sparse.py:93-96"
    ),
    Rule(
        ("FLASHMLA_SPARSE",),
        lambda ask: ask.gpu.major not in (9, 10),
        "it is for Hopper and data-centre Blackwell",
        f"{_MLA}/flashmla_sparse.py:203",
    ),
    Rule(
        ("FLASHMLA_SPARSE",),
        lambda ask: (
            ask.cache_dtype not in ("auto", "fp8") or (ask.head_dim == 512 and (ask.is_fp8 or ask.gpu.major != 9))
        ),
        "its FP8 is fp8_ds_mla, under the word fp8, for a width of 576; 512 is for BF16 on Hopper",
        f"{_MLA}/flashmla_sparse.py:149-155, :216-247",
    ),
    Rule(
        ("FLASHINFER_MLA_SPARSE",),
        lambda ask: ask.gpu.major != 10,
        "it is for data-centre Blackwell",
        f"{_MLA}/flashinfer_mla_sparse.py:107",
    ),
    Rule(
        SPARSE[1:],
        lambda ask: ask.head_dim not in (512, 576),
        "its width is 512 or 576",
        f"{_MLA}/flashmla_sparse.py:190",
    ),
    Rule(SPARSE[2:], _is_e5m2, "its FP8 is E4M3", f"{_MLA}/flashinfer_mla_sparse.py:86-92"),
    # AMD
    Rule(
        ("ROCM_ATTN",),
        lambda ask: ask.head_dim not in (32, 64, 80, 96, 128, 160, 192, 224, 256) or ask.has_sink or ask.with_images,
        "it knows a list of head dims up to 256, no attention sinks and no images in both directions",
        f"{_BACKENDS}/rocm_attn.py:160-173",
    ),
    # CPUs
    Rule(
        ("CPU_ATTN",),
        lambda ask: ask.is_fp8 and ask.head_dim % 32 != 0,
        "its FP8 needs a head_dim that 32 divides",
        f"{_BACKENDS}/cpu_attn.py:527-531",
        fails=True,
    ),
)
