"""From an arm to the server that it takes. Pure: the same arm gives the same command."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvtriage.engines.base import Arm
from kvtriage.engines.vllm.observer import EXTENSION, INSIDE, Probe
from kvtriage.engines.vllm.scoring import KL_TOP_K
from kvtriage.engines.vllm.server import Recipe, split_command
from kvtriage.engines.vllm.variables import NATIVE_VARIABLE
from kvtriage.errors import PolicyNotApplied, StudyError
from kvtriage.kvcache.policy import CachePolicy, Fp8, Mantissa, Native, Scaling
from kvtriage.kvcache.server_args import vllm_args
from kvtriage.kvcache.spec import CacheSpec

__all__ = [
    "DEFAULT_COMMAND",
    "ServerOptions",
    "count_devices",
    "cpu_environment",
    "make_recipe",
    "native_dtype_of",
    "probe_of",
    "read_command",
    "read_engine_args",
    "served_policy",
    "with_length",
]

DEFAULT_COMMAND = ("vllm", "serve")
_OURS = (
    *("--model", "--host", "--port", "--uds", "--kv-cache-dtype", "--kv-cache-dtype-skip-layers"),
    *("--worker-extension-cls", "--max-logprobs", "--served-model-name", "--calculate-kv-scales"),
)
"""Set for each server by its arm."""
_SECRET = ("--api-key", "--hf-token")
"""Arguments are seen by everybody on the machine, and stand in records and logs."""
_PARALLEL = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp")
_LENGTH = "--max-model-len"
_NATIVE = {"float32": "auto", "float": "auto", "float16": "float16", "half": "float16"}
"""`--dtype` of the model → what its unquantised cache is asked to be; BF16 otherwise. A float32 cache has no
name of its own."""
_LEAST_SEQUENCES = 64


@dataclass(frozen=True)
class ServerOptions:
    """What all servers of a study share."""

    command: tuple[str, ...] = DEFAULT_COMMAND
    engine_args: tuple[str, ...] = ()
    native_dtype: str = "bfloat16"
    """What an unquantised cache is stored in."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What kvtriage tells them by itself."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """What the user has them told, which is a condition of the study."""

    @property
    def is_python(self) -> bool:
        """Whether the command is a Python module and not `vllm serve`: then the model is no positional word."""
        return self.command[-1] != "serve"


def read_engine_args(words: Sequence[str]) -> tuple[str, ...]:
    """Each `--engine-arg` as the server's words: '--dtype float32' is two. Raises StudyError."""
    found: list[str] = []
    for word in words:
        try:
            found += shlex.split(word)
        except ValueError as error:
            raise StudyError(
                f"--engine-arg {word!r} cannot be read: {error}", hint="quote it as for a shell"
            ) from error
    for name in map(_flag, found):
        if name in _OURS:
            raise StudyError(f"--engine-arg {name} is set by each arm itself", hint="leave it out")
    _refuse_secrets("--engine-arg", found)
    return tuple(found)


def read_command(text: str | None) -> tuple[str, ...]:
    """`--vllm-command` as words. Raises EngineError, StudyError."""
    words = DEFAULT_COMMAND if text is None else split_command(text)
    _refuse_secrets("--vllm-command", words)
    return words


def _refuse_secrets(option: str, words: Sequence[str]) -> None:
    """Raises StudyError for an argument that holds a secret, and does not repeat it."""
    for name in map(_flag, words):
        if name in _SECRET:
            raise StudyError(
                f"{option} {name} would show a secret in the process list and in records",
                hint="give it to the server in its environment",
            )


def _flag(word: str) -> str:
    """As vLLM reads it, to which an underscore is a dash."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _given(engine_args: Sequence[str], *names: str) -> Iterator[str]:
    """What follows these flags, as the next word or behind an equals sign."""
    for word, after in itertools.zip_longest(engine_args, engine_args[1:], fillvalue=""):
        if _flag(word) in names:
            _, equals, value = word.partition("=")
            yield value if equals else after


def count_devices(engine_args: Sequence[str]) -> int:
    """Tensor parallel times pipeline parallel times data parallel."""
    return math.prod(int(size) for size in _given(engine_args, *_PARALLEL) if size.isdigit())


def native_dtype_of(engine_args: Sequence[str]) -> str:
    """What an unquantised cache is asked to be stored in."""
    return _NATIVE.get(next(_given(engine_args, "--dtype"), ""), "bfloat16")


def with_length(engine_args: tuple[str, ...], tokens: int) -> tuple[str, ...]:
    """A context of so many tokens, unless the user says how long: memory goes to the cache."""
    return engine_args if any(_given(engine_args, _LENGTH)) else (*engine_args, _LENGTH, str(tokens))


def cpu_environment(
    engine_args: Sequence[str], native_dtype: str, own: Mapping[str, str], cores: Sequence[int], nodes: int
) -> dict[str, str]:
    """What servers on a CPU are told on top of `own`, which is kvtriage's environment; it means nothing on GPUs.

    A float32 model's cache has no BF16 in stock vLLM; kvtriage-vllm-cpu stores it where this names it.
    vLLM wants a NUMA node for each rank, so where there are fewer the `cores` are dealt out.
    """
    told = {}
    if native_dtype == "auto":
        told[NATIVE_VARIABLE] = "bfloat16"
    ranks = count_devices(engine_args)
    if nodes < ranks <= len(cores):
        bounds = [rank * len(cores) // ranks for rank in range(ranks + 1)]
        shares = [cores[start:stop] for start, stop in itertools.pairwise(bounds)]
        told["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    return {name: value for name, value in told.items() if name not in own}


def served_policy(policy: CachePolicy) -> CachePolicy:
    """What the server stores: the policy itself, or BF16 where only a probe inside can do it."""
    whole = all(isinstance(fmt, Native) or (isinstance(fmt, Fp8) and fmt.heads is None) for fmt in policy.formats)
    return (
        policy if whole and (policy.is_native or policy.scaling is not None) else CachePolicy.native(policy.num_layers)
    )


def probe_of(arm: Arm) -> Probe:
    """What the extension has to round so that a BF16 server does what `arm` asks; nothing for a native policy."""
    layers: dict[int, dict[str, object]] = {}
    words: tuple[str, tuple[int, ...] | None, tuple[float, ...], tuple[float, ...]]
    for layer_idx, fmt in enumerate(arm.policy.formats):
        match fmt:
            case Native():
                continue
            case Fp8(Scaling.UNIT, heads):
                words = ("fp8", heads, (1.0,), (1.0,))
            case Fp8(_, heads) if arm.scales is not None:
                own = arm.scales.layers[layer_idx]
                words = ("fp8", heads, own.k, own.v)
            case Mantissa(heads) if arm.bound is not None:
                words = ("mantissa", heads, arm.bound.k[layer_idx], arm.bound.v[layer_idx])
            case _:
                raise PolicyNotApplied(f"arm {arm.name!r} brings no numbers for {fmt}", hint="calibrate first")
        layers[layer_idx] = dict(zip(("format", "heads", "k", "v"), words, strict=True))
    return layers


def make_recipe(arm: Arm, spec: CacheSpec, model: str, options: ServerOptions) -> Recipe:
    """`model` is the folder: the base for BF16 and scale 1, an overlay with scales for the others.

    Flags that an arm's policy decides come from kvcache.server_args alone.
    """
    policy = served_policy(arm.policy)
    named = ("--model", model) if options.is_python else (model,)
    chunk = () if arm.prefill_chunk is None else _chunked(arm.prefill_chunk)
    return Recipe(
        command=(
            *(*options.command, *named),
            *vllm_args(policy, spec, None, options.native_dtype),
            *("--max-logprobs", str(KL_TOP_K), "--generation-config", "vllm"),
            *("--worker-extension-cls", EXTENSION),
            *chunk,
            *options.engine_args,
        ),
        environment={
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONPATH": str(INSIDE),
            **options.environment,
            **options.variables,
        },
    )


def _chunked(tokens: int) -> tuple[str, ...]:
    """Steps of at most so many tokens; a step has to have room for every running sequence."""
    sequences = str(min(tokens, _LEAST_SEQUENCES))
    return ("--max-num-batched-tokens", str(tokens), "--max-num-seqs", sequences, "--enable-chunked-prefill")
