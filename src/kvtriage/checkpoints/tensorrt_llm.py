"""TensorRT-LLM's side of a repair: a file for `trtllm-serve MODEL --config FILE`.

    kv_cache_config:
      dtype: fp8

That is all there is to say to it. Its PyTorch backend, the default, has one cache dtype for all layers, and stores FP8
at scale 1: `TrtllmAttention` sets `kv_cache_scaling_factor` to ones, and `modules/attention.py` hands over the scales
of a checkpoint for NVFP4 caches alone, though `modules/linear.py` loads `k_scale` and `v_scale` (NVIDIA/TensorRT-LLM,
tensorrt_llm/_torch/{attention_backend/trtllm,modules/attention,modules/linear}.py, main of November 2026). So FP8 as it
is and BF16 are the verdicts that it can serve; the others are refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvtriage.errors import BadInput
from kvtriage.files import write_atomic
from kvtriage.kvcache.policy import Scaling

__all__ = ["NATIVE", "write_tensorrt_llm_config"]

NATIVE = "native"
_INSTEAD = "serve this repair with vLLM: the verdict has the command"


def write_tensorrt_llm_config(scaling: str, skip_layers: Sequence[int], out: Path) -> None:
    """`scaling` as a verdict names it, 'native' for BF16. Raises BadInput for what it cannot serve; StorageError."""
    if scaling in (Scaling.PER_TENSOR, Scaling.PER_HEAD):
        raise BadInput(
            "TensorRT-LLM stores an FP8 cache at scale 1 whatever the checkpoint holds, and this case needs "
            f"{scaling.replace('_', '-')} scales",
            hint=_INSTEAD,
        )
    if scaling != NATIVE and skip_layers:
        raise BadInput(
            f"TensorRT-LLM has one cache dtype for all layers, and this case keeps {len(skip_layers)} of them in BF16",
            hint=_INSTEAD,
        )
    dtype = "auto" if scaling == NATIVE else "fp8"
    write_atomic(out, f"kv_cache_config:\n  dtype: {dtype}\n".encode())
