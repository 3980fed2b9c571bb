"""`kvtriage plan`: what a cache policy costs, from a config.json alone.

Pure functions from a CacheSpec to an answer, and the click command around them. Answering for a
file on disk loads neither torch nor numpy; demo models and hub ids load what they need.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from kvtriage.checkpoints.json_file import read_object
from kvtriage.cli.plan_text import describe_layers, render_plan
from kvtriage.cli.sources import CONFIG_ALONE, resolve_model
from kvtriage.cli.terminal import say
from kvtriage.errors import ModelError, StudyError
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.price import capacity_tokens, price_policy
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.server_args import vllm_args
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from kvtriage.units import parse_bytes

__all__ = [
    "build_policy",
    "load_config",
    "parse_contexts",
    "parse_skip",
    "plan_command",
    "plan_json",
    "render_plan",
]

SCHEMA = 1
CONFIG_LIMIT_BYTES = 16 * 1024**2
NATIVE = "native"
GROUPS: Mapping[str, LayerKind] = {"sliding_window": LayerKind.SLIDING, "full_attention": LayerKind.FULL}


# --- what the user typed ----------------------------------------------------------------


def parse_skip(text: str, spec: CacheSpec) -> tuple[int, ...]:
    """'sliding_window', 'full_attention' or '0,5,7-9' to layer indices, ascending.

    Raises StudyError for an entry that matches no layer: a server would ignore it silently.
    """
    skip: set[int] = set()
    entries = text.replace(",", " ").split()
    if not entries:
        raise StudyError("--skip names no layer", hint=f"leave it out, or give {_skip_forms(spec)}")
    for entry in entries:
        skip.update(_skip_entry(entry, spec))
    return tuple(sorted(skip))


def _skip_entry(entry: str, spec: CacheSpec) -> Iterable[int]:
    if entry in GROUPS:
        layers = spec.layers_of(GROUPS[entry])
        if not layers:
            raise StudyError(f"--skip {entry} matches no layer of {spec.model_type}", hint=_layers_there_are(spec))
        return layers
    indices = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", entry)
    if indices is None:
        raise StudyError(f"--skip does not understand {entry!a}", hint=f"give {_skip_forms(spec)}")
    first = int(indices[1])
    last = first if indices[2] is None else int(indices[2])
    if not first <= last < spec.num_layers:
        raise StudyError(f"--skip {entry} matches no layer of {spec.model_type}", hint=_layers_there_are(spec))
    return range(first, last + 1)


def _skip_forms(spec: CacheSpec) -> str:
    return f"sliding_window, full_attention, or layers from 0 to {spec.num_layers - 1} such as 0,5,7-9"


def _layers_there_are(spec: CacheSpec) -> str:
    return f"the model has layers 0 to {spec.num_layers - 1}: {describe_layers(spec)}"


def parse_contexts(texts: Sequence[str], spec: CacheSpec) -> tuple[int, ...]:
    """One context length for each sequence of the batch; the longest possible one when none is given.

    Raises StudyError for what is not a positive number of tokens or beyond the model's limit.
    """
    if not texts:
        return (spec.max_model_len,)
    words = [word for text in texts for word in text.replace(",", " ").split()]
    if not words:
        raise StudyError("--context names no length", hint="leave it out, or give whole numbers such as 4096,32768")
    return tuple(_context(word, spec) for word in words)


def _context(word: str, spec: CacheSpec) -> int:
    if re.fullmatch(r"[0-9]{1,15}", word) is None or int(word) == 0:
        raise StudyError(f"--context {word!a} is not a number of tokens", hint="give a whole number such as 32768")
    if int(word) > spec.max_model_len:
        raise StudyError(
            f"a context of {int(word):,} tokens is beyond the {spec.max_model_len:,} that {spec.model_type} can read",
            hint=f"give --context {spec.max_model_len} or less",
        )
    return int(word)


def build_policy(spec: CacheSpec, scaling: str, skip: Iterable[int]) -> CachePolicy:
    """`scaling` is a Scaling or 'native'. Raises StudyError when both say what stays in BF16."""
    kept = tuple(skip)
    if scaling != NATIVE:
        return CachePolicy.fp8(spec.num_layers, Scaling(scaling), kept)
    if kept:
        raise StudyError("--skip with --scaling native says the same twice", hint="drop one of the two")
    return CachePolicy.native(spec.num_layers)


# --- where the model is -----------------------------------------------------------------


def load_config(source: str) -> dict[str, object]:
    """The parsed config.json of a folder, a file, a `demo:` model or a hub id. Raises ModelError."""
    path = Path(source)
    return _read_config(
        path if os.path.isfile(path) else resolve_model(source, _report, hub_files=CONFIG_ALONE) / "config.json"
    )


def _read_config(path: Path) -> dict[str, object]:
    if not os.path.isfile(path):
        raise ModelError(f"{path} is not there or not a file", hint="a model folder has its config.json at the top")
    config, _ = read_object(path, CONFIG_LIMIT_BYTES, "give a Hugging Face model folder, or its config.json")
    return config


def _report(what: str, done: int, total: int) -> None:
    say(f"{what} {done}/{total}")


# --- the answer -------------------------------------------------------------------------


def plan_json(
    spec: CacheSpec, policy: CachePolicy, contexts: Sequence[int], memory_bytes: int | None
) -> dict[str, object]:
    """One object for other programs. The form of `worksheet` is stable; lengths are in tokens."""
    return {
        "schema": SCHEMA,
        "model": {
            "model_type": spec.model_type,
            "max_model_len": spec.max_model_len,
            "layers": [asdict(layer) for layer in spec.layers],
        },
        "assumed": list(spec.assumed),
        "policy": {"formats": list(policy.encode()), "skip_layers": list(policy.skip_layers)},
        "contexts": list(contexts),
        "worksheet": asdict(price_policy(spec, policy, contexts)),
        "capacity": None if memory_bytes is None else _capacity(spec, policy, contexts, memory_bytes),
        "vllm_args": list(vllm_args(policy, spec, None)),
    }


def _capacity(spec: CacheSpec, policy: CachePolicy, contexts: Sequence[int], memory_bytes: int) -> dict[str, object]:
    """Tokens of whole sequences that fit, for each context length that was asked for."""
    return {
        "memory_bytes": memory_bytes,
        "rows": [
            {
                "context_len": context_len,
                "bf16_tokens": capacity_tokens(spec, CachePolicy.native(spec.num_layers), context_len, memory_bytes),
                "fp8_tokens": capacity_tokens(
                    spec, CachePolicy.fp8(spec.num_layers, Scaling.UNIT), context_len, memory_bytes
                ),
                "policy_tokens": capacity_tokens(spec, policy, context_len, memory_bytes),
            }
            for context_len in sorted(set(contexts))
        ],
    }


# --- the command ------------------------------------------------------------------------


@click.command("plan", short_help="Price a cache policy from a config.json.")
@click.argument("model", required=False)
@click.option(
    "--cases",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Answer cases of vLLM's allocator instead, one JSON object a line; with --json.",
)
@click.option(
    "--context",
    "contexts",
    multiple=True,
    metavar="TOKENS",
    help="Length of one sequence of the batch; repeat it, or separate by commas. Default: the longest the model reads.",
)
@click.option("--skip", metavar="LAYERS", help="Layers kept in BF16: sliding_window, full_attention, or 0,5,7-9.")
@click.option(
    "--scaling",
    type=click.Choice([*(scaling.value for scaling in Scaling), NATIVE]),
    default=Scaling.PER_HEAD.value,
    show_default=True,
    help="How the FP8 layers are scaled; native keeps everything in BF16.",
)
@click.option("--memory", metavar="BYTES", help="Cache memory to fill, such as 16GiB.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(
    model: str | None,
    cases: Path | None,
    contexts: tuple[str, ...],
    skip: str | None,
    scaling: str,
    memory: str | None,
    as_json: bool,
) -> None:
    """Price a cache policy for MODEL: a folder, a config.json, a demo: model or a hub id.

    No weights are needed. The numbers are exact for what sequences hold in steady decode.

    \b
    Example:
      kvtriage plan demo:gemma3-270m --context 32768 --skip sliding_window
    """
    if cases is not None:
        _answer_cases(cases, alone=model is None and not contexts and skip is None and memory is None, as_json=as_json)
        return
    if model is None:
        raise click.UsageError("Missing argument 'MODEL'.")
    spec = read_cache_spec(load_config(model))
    lengths = parse_contexts(contexts, spec)
    policy = build_policy(spec, scaling, () if skip is None else parse_skip(skip, spec))
    memory_bytes = None if memory is None else _memory(memory)
    if as_json:
        click.echo(json.dumps(plan_json(spec, policy, lengths, memory_bytes), indent=2))
    else:
        click.echo(render_plan(spec, policy, lengths, memory_bytes), nl=False)


def _answer_cases(path: Path, *, alone: bool, as_json: bool) -> None:
    from kvtriage.cli.plan_cases import answer_lines

    if not alone:
        raise click.UsageError("--cases brings models and flags of its own: leave the others out.")
    if not as_json:
        raise click.UsageError("--cases answers in lines of JSON: add --json.")
    for line in answer_lines(path):
        click.echo(line)


def _memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise StudyError(f"--memory {text!a} is not an amount of memory", hint="give it as 16GiB") from error
