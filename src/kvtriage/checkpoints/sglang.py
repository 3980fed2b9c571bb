"""SGLang's KV-cache scale file, for `--kv-cache-dtype fp8_e4m3 --quantization-param-path FILE`.

    {"model_type": "llama",
     "kv_cache": {"dtype": "float8_e4m3fn",
                  "scaling_factor": {"0": {"0": 0.0123, "1": 0.0456, ...}}}}

`scaling_factor` maps tensor-parallel rank to layer to one factor. Read in SGLang's source:
`QuantParamSchema` and `kv_cache_scales_loader` in python/sglang/srt/model_loader/weight_utils.py,
`load_kv_cache_scales` in python/sglang/srt/models/llama.py.

What that file cannot hold:

- one factor a layer: `load_kv_cache_scales` gives the same number to k_scale and v_scale. We
  write the larger, so that nothing saturates; the tensor with the smaller range loses the
  difference at its lower end (`shared_octaves` says how much).
- no per-head scales, and no q_scale.
- as many ranks as the server has, exactly: a file for one rank is refused under `--tp-size 2`.

SGLang does not stop over a file it cannot use (other rank count, layer count or model type):
it logs a warning and serves with 1.0. A model class without `load_kv_cache_scales` does stop.
"Loaded KV cache scaling factors from" in its log is not proof either; look for the warning.
"""

from __future__ import annotations

import math
from pathlib import Path

from kvtriage.checkpoints.json_file import encode_object
from kvtriage.errors import BadInput
from kvtriage.files import write_atomic
from kvtriage.fp8.scales import LayerScales, ScaleSet
from kvtriage.kvcache.policy import Scaling

__all__ = ["READ_BY", "shared_octaves", "write_sglang_scales"]

READ_BY = frozenset(
    ("apertus", "arcee", "exaone4", "glm4", "hunyuan", "llama", "mimo", "mimo_v2", "opt", "qwen2", "qwen3", "solar")
)
"""model_types whose class has load_kv_cache_scales (python/sglang/srt/models/, as documented in 2026)."""


def write_sglang_scales(scales: ScaleSet, model_type: str, out: Path, *, tp_size: int = 1) -> None:
    """Write per-tensor `scales` as SGLang reads them, the same for each of `tp_size` ranks.

    Per-tensor scales hold for every rank: a rank keeps whole heads of the same tensor.
    `model_type` is that of the model class (a nested text model's own). Raises BadInput for
    scales that are not per-tensor, or do not cover layers 0 to L − 1; StorageError.
    """
    if scales.scaling is not Scaling.PER_TENSOR:
        raise BadInput(
            f"SGLang's scale file holds one factor a layer, not {scales.scaling.replace('_', '-')} scales",
            hint="export the per-tensor scales",
        )
    if tp_size < 1:
        raise BadInput(f"a server cannot have {tp_size} tensor-parallel ranks", hint="give 1 or more")
    if [layer.layer_idx for layer in scales.layers] != list(range(len(scales.layers))):
        raise BadInput(
            "SGLang's scale file needs a factor for every layer, and some layers have no scales",
            hint="serve this model with vLLM and the overlay instead",
        )
    factors = {str(layer.layer_idx): max(*layer.k, *layer.v) for layer in scales.layers}
    record = {
        "model_type": model_type,
        "kv_cache": {
            "dtype": "float8_e4m3fn",
            "scaling_factor": {str(rank): factors for rank in range(tp_size)},
        },
    }
    write_atomic(out, encode_object(record))


def shared_octaves(layer: LayerScales) -> float:
    """Octaves that sharing one factor takes from the lower end of K or V, whichever reaches less far.

    E4M3's normal range has 14.8 octaves below 448: a few cost nothing, more than about 8 do harm.
    """
    return abs(math.log2(max(layer.k)) - math.log2(max(layer.v)))
