"""What a user types after `kvtriage plan`: layers, lengths, amounts, each checked and named when wrong."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from kvtriage.cli.plan.as_text import describe_layers
from kvtriage.cli.plan.lengths import parse_length
from kvtriage.cli.plan.spelling import VLLM_SKIP
from kvtriage.errors import StudyError
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.skip_words import read_skip_words
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from kvtriage.units import GIB, MIB, parse_bytes

__all__ = ["NATIVE", "build_policy", "parse_contexts", "parse_memories", "parse_skip", "parse_weights"]

NATIVE = "native"
GROUPS: Mapping[str, LayerKind] = {"sliding_window": LayerKind.SLIDING, "full_attention": LayerKind.FULL}
MOST_WEIGHTS_GIB = 10**6
NEAR = 0.75


def parse_skip(text: str, spec: CacheSpec, option: str = "--skip") -> tuple[int, ...]:
    """'sliding_window', 'full_attention' or '0,5,7-9' to layer indices, ascending.

    Under vLLM's own name of the option the words are vLLM's too. Raises StudyError for an entry that matches no layer
    with K and V: a server would ignore it silently.
    """
    skip: set[int] = set()
    entries = text.replace(",", " ").split()
    if not entries:
        raise StudyError(f"{option} names no layer", hint=f"leave it out, or give {_skip_forms(spec)}")
    if option == VLLM_SKIP:
        return _skip_as_vllm(text.split(), spec)
    for entry in entries:
        skip.update(_skip_entry(entry, spec, option))
    return tuple(sorted(skip))


def _skip_as_vllm(entries: Sequence[str], spec: CacheSpec) -> tuple[int, ...]:
    reading = read_skip_words(entries, spec)
    for ignored in reading.ignored:
        raise StudyError(
            f"{VLLM_SKIP} {ignored.word[:40]!a} is passed over by vLLM in silence: {ignored.because}",
            hint=f"--skip also takes full_attention and ranges, and writes the indices out; {_layers_there_are(spec)}",
        )
    if reading.torn:
        raise StudyError(f"{VLLM_SKIP}: {reading.torn[0]}", hint="--skip with the layer that is read names them all")
    if not reading.layers:
        raise StudyError(f"{VLLM_SKIP} matches no layer of {spec.model_type}", hint=_layers_there_are(spec))
    return reading.layers


def _skip_entry(entry: str, spec: CacheSpec, option: str) -> Iterable[int]:
    if entry in GROUPS:
        return _holding(entry, spec.layers_of(GROUPS[entry]), spec, option)
    indices = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", entry)
    if indices is None:
        raise StudyError(f"{option} does not understand {entry!a}", hint=_meant(entry, spec))
    first = int(indices[1])
    last = first if indices[2] is None else int(indices[2])
    if last < first:
        raise StudyError(f"{option} {entry} runs backwards", hint=f"did you mean {last}-{first}?")
    if last >= spec.num_layers:
        raise _matches_nothing(entry, spec, option)
    return _holding(entry, range(first, last + 1), spec, option)


def _holding(entry: str, layers: Iterable[int], spec: CacheSpec, option: str) -> tuple[int, ...]:
    """Those with K and V of their own, which alone can be stored otherwise."""
    found = tuple(layer_idx for layer_idx in layers if spec.layers[layer_idx].holds_kv)
    if not found:
        raise _matches_nothing(entry, spec, option)
    return found


def _meant(entry: str, spec: CacheSpec) -> str:
    near = [name for name in GROUPS if len(entry) >= 4 and name.startswith(entry.lower())]
    near += difflib.get_close_matches(entry, GROUPS, n=1, cutoff=NEAR)
    return f"did you mean {near[0]}?" if near else f"give {_skip_forms(spec)}"


def _matches_nothing(entry: str, spec: CacheSpec, option: str) -> StudyError:
    """With the reason, where it is not that there is no such layer: the hint says which there are."""
    ignored = read_skip_words((entry,), spec).ignored
    says_why = entry == "sliding_window" or (entry.isdigit() and int(entry) < spec.num_layers)
    because = f": {ignored[0].because}" if ignored and says_why else ""
    return StudyError(f"{option} {entry} matches no layer of {spec.model_type}{because}", hint=_layers_there_are(spec))


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
    count = parse_length("--context", word)
    if count > spec.max_model_len:
        raise StudyError(
            f"a context of {count:,} tokens is beyond the {spec.max_model_len:,} that {spec.model_type} can read",
            hint=f"give --context {spec.max_model_len} or less",
        )
    return count


def build_policy(
    spec: CacheSpec, scaling: str, skip: Iterable[int], said: str = "--skip with --scaling native"
) -> CachePolicy:
    """`scaling` is a Scaling or 'native'. Raises StudyError when both say what stays in BF16, as `said` has it."""
    kept = tuple(skip)
    if scaling != NATIVE:
        return CachePolicy.fp8(spec.num_layers, Scaling(scaling), kept)
    if kept:
        raise StudyError(f"{said} says the same twice", hint="drop one of the two")
    return CachePolicy.native(spec.num_layers)


def parse_memories(texts: Sequence[str], option: str = "--memory") -> tuple[int, ...]:
    """('16GiB,24GiB', '80GB', '16G') to bytes. Raises StudyError."""
    return tuple(_memory(word, option) for text in texts for word in (text.split(",") if text else [text]))


def _memory(text: str, option: str) -> int:
    try:
        found = parse_bytes(text)
    except ValueError as error:
        raise StudyError(
            f"{option} {text!a} is not an amount of memory", hint="give it as 16GiB, 16GB or a number of bytes"
        ) from error
    number = text.strip()
    if found < MIB and re.fullmatch(r"[0-9.]+", number, re.ASCII):
        raise StudyError(
            f"{option} {number} is {found:,} bytes, too few for a cache", hint=f"did you mean {number}GiB?"
        )
    return found


def parse_weights(text: str) -> int:
    """GiB as a decimal number, to bytes. Raises StudyError."""
    if re.fullmatch(r"[0-9]{1,7}(\.[0-9]{1,6})?", text, re.ASCII) is None or float(text) > MOST_WEIGHTS_GIB:
        raise StudyError(f"--weights-gib {text!a} is not a number of GiB", hint="give the size of the weights, as 13")
    return int(float(text) * GIB)
