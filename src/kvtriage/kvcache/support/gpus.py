"""The machines that serve, as far as they decide what a cache may be and how much of it there is.

`memory_gib` is what CUDA or HIP gives a process in all, in GiB: the total in vLLM's own log lines and in
out-of-memory messages, which is less than the number on the box and differs by driver; lowest and
highest seen. Where a public thread shows it the source names it, else it was read in many logs alike.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from kvtriage.errors import BadInput
from kvtriage.units import GIB

__all__ = ["GPUS", "Gpu", "Platform", "default_max_num_batched_tokens", "find_gpu"]

MANY_LOGS = "out-of-memory messages in public logs"


class Platform(enum.StrEnum):
    """vLLM's own: each chooses its attention backends by rules of its own."""

    CUDA = "cuda"
    ROCM = "rocm"
    XPU = "xpu"
    CPU = "cpu"


@dataclass(frozen=True)
class Gpu:
    """`capability` is CUDA's compute capability, None elsewhere. `memory_gib` is None where it is the machine's own."""

    name: str
    title: str
    platform: Platform
    capability: tuple[int, int] | None
    memory_gib: tuple[float, float] | None
    source: str

    @property
    def sm(self) -> int:
        """80 for capability 8.0; 0 off CUDA."""
        return 0 if self.capability is None else 10 * self.capability[0] + self.capability[1]

    @property
    def major(self) -> int:
        """The family: 9 for Hopper, 10 for data-centre Blackwell; 0 off CUDA."""
        return 0 if self.capability is None else self.capability[0]

    @property
    def described(self) -> str:
        """'H100 80 GB (sm90)'."""
        return self.title if self.capability is None else f"{self.title} (sm{self.sm})"

    @property
    def memory_bytes(self) -> tuple[int, int]:
        """Lowest and highest total seen. Raises BadInput where the table has none."""
        if self.memory_gib is None:
            raise BadInput(
                f"{self.title} has no memory size of its own", hint="give the cache's bytes: --kv-cache-memory-bytes"
            )
        low, high = self.memory_gib
        return int(low * GIB), int(high * GIB)


def _cuda(name: str, title: str, sm: int, low: float, high: float, source: str = MANY_LOGS) -> Gpu:
    return Gpu(name, title, Platform.CUDA, divmod(sm, 10), (low, high), source)


GPUS: tuple[Gpu, ...] = (
    _cuda("v100-16g", "V100 16 GB", 70, 15.75, 15.77, "vllm#10637"),
    _cuda("t4", "T4", 75, 14.56, 14.75, "hpcaitech/Open-Sora#697"),
    _cuda("a100-40g", "A100 40 GB", 80, 39.39, 39.45, "LianjiaTech/BELLE#137"),
    _cuda("a100-80g", "A100 80 GB", 80, 79.25, 79.32),
    _cuda("a30", "A30", 80, 23.50, 23.53, "LHRLAB/ChatKBQA#2, google/RB-Modulation#5"),
    _cuda("a10g", "A10G", 86, 22.05, 22.06),
    _cuda("rtx-a6000", "RTX A6000", 86, 47.37, 47.53),
    _cuda("rtx-3090", "RTX 3090", 86, 23.55, 23.68, "vllm#11550, #16343"),
    _cuda("l4", "L4", 89, 22.00, 22.03),
    _cuda("l40s", "L40S", 89, 44.39, 44.52, "QwenLM/Qwen3-VL#2097 (L40)"),
    _cuda("rtx-4090", "RTX 4090", 89, 23.52, 23.65, "QwenLM/Qwen3#678"),
    _cuda("h100-80g", "H100 80 GB", 90, 79.10, 79.22, "vllm#10511"),
    _cuda("h200", "H200", 90, 139.80, 139.81),
    _cuda("b200", "B200", 100, 178.35, 178.36),
    _cuda("rtx-5090", "RTX 5090", 120, 31.37, 31.51, "Wan-Video/Wan2.1#465, siliconflow/onediff#1041"),
    _cuda("rtx-pro-6000", "RTX PRO 6000 Blackwell", 120, 94.50, 94.97),
    Gpu("mi300x", "MI300X", Platform.ROCM, None, (191.69, 191.98), MANY_LOGS),
    Gpu("xpu", "an Intel GPU", Platform.XPU, None, None, "platforms/xpu.py"),
    Gpu("cpu", "a CPU", Platform.CPU, None, None, "platforms/cpu.py"),
)

SHORT_NAMES: Mapping[str, str] = {
    "a10": "a10g",
    "a100": "a100-80g",
    "h100": "h100-80g",
    "v100": "v100-16g",
    "3090": "rtx-3090",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
    "a6000": "rtx-a6000",
    "mi300": "mi300x",
}


def find_gpu(name: str) -> Gpu:
    """'h100-80g', 'H100' or 'l40s'. Raises BadInput for one that is not in the table."""
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    wanted = SHORT_NAMES.get(wanted, wanted)
    for gpu in GPUS:
        if gpu.name == wanted:
            return gpu
    names = ", ".join(gpu.name for gpu in GPUS)
    raise BadInput(
        f"{name[:40]!a} is no GPU that kvtriage knows",
        hint=f"one of {names}; 'kvtriage plan --gpu help' describes them",
    )


def default_max_num_batched_tokens(gpu: Gpu, world_size: int = 1) -> int:
    """What `vllm serve` takes where --max-num-batched-tokens is not given, in tokens (engine/arg_utils.py:2923-2983).

    The model may still lower or raise it, and `LLM(...)` in a program takes more. `world_size` counts on CPUs alone.
    """
    if gpu.platform is Platform.CPU:
        return 2048 * world_size
    if _memory_gib(gpu) >= 160:
        return 16384
    return 8192 if _memory_gib(gpu) >= 70 and not gpu.name.startswith("a100") else 2048


def _memory_gib(gpu: Gpu) -> float:
    """0 where unknown, as the engine has it."""
    return 0.0 if gpu.memory_gib is None else gpu.memory_gib[1]
