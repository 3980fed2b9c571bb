"""From a choice to what the rest of kvtriage asks with: a policy, the engine's flags, the line to serve it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from kvtriage.explore.choice import Choice
from kvtriage.explore.subject import Subject
from kvtriage.kvcache.engine_args import EngineArgs
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.server_args import vllm_args

__all__ = ["engine_args", "model_with_scales", "policy_of", "serve_line"]


def policy_of(subject: Subject, skip_layers: Iterable[int], scaling: Scaling) -> CachePolicy:
    """FP8 but in `skip_layers`; native where these are all the layers that hold anything."""
    skipped = frozenset(skip_layers)
    if skipped.issuperset(subject.holders):
        return CachePolicy.native(subject.spec.num_layers)
    return CachePolicy.fp8(subject.spec.num_layers, scaling, skipped)


def engine_args(subject: Subject, choice: Choice) -> EngineArgs:
    """The server's longest request is the one that is asked about."""
    return EngineArgs(
        attention_backend=subject.backend,
        max_model_len=choice.context_len,
        max_num_batched_tokens=choice.max_num_batched_tokens,
        tensor_parallel_size=choice.tensor_parallel_size,
    )


def model_with_scales(subject: Subject, scaling: Scaling) -> str | None:
    """The checkpoint that holds calibrated scales of this kind; None where there is none.

    With one KV head it is the per-tensor one, which every backend takes.
    """
    same = scaling is Scaling.PER_HEAD and subject.spec.has_one_kv_head
    return subject.models.get(Scaling.PER_TENSOR if same else scaling)


def serve_line(subject: Subject, choice: Choice, policy: CachePolicy) -> str:
    """A whole `vllm serve` command, quoted for a shell."""
    model = subject.folder if policy.is_native else model_with_scales(subject, choice.scaling) or subject.folder
    parallel = ("--tensor-parallel-size", str(choice.tensor_parallel_size)) if choice.tensor_parallel_size > 1 else ()
    return shlex.join(
        (
            *("vllm", "serve"),
            *vllm_args(policy, subject.spec, model, subject.native_dtype),
            *("--max-model-len", str(choice.context_len)),
            *("--max-num-batched-tokens", str(choice.max_num_batched_tokens)),
            *parallel,
            *("--kv-cache-memory-bytes", str(choice.memory_bytes)),
        )
    )
