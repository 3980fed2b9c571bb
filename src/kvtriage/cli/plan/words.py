"""What a user types after `kvtriage plan`: layers, lengths, amounts, each checked and named when wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from kvtriage.cli.plan.as_text import describe_layers
from kvtriage.errors import StudyError
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.skip_words import read_skip_words
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from kvtriage.units import GIB, parse_bytes

__all__ = ["NATIVE", "build_policy", "parse_contexts", "parse_memories", "parse_skip", "parse_weights"]

NATIVE = "native"
GROUPS: Mapping[str, LayerKind] = {"sliding_window": LayerKind.SLIDING, "full_attention": LayerKind.FULL}
MOST_WEIGHTS_GIB = 10**6


def parse_skip(text: str, spec: CacheSpec, option: str = "--skip") -> tuple[int, ...]:
    """'sliding_window', 'full_attention' or '0,5,7-9' to layer indices, ascending.

    Raises StudyError for an entry that matches no layer with K and V: a server would ignore it silently.
    """
    skip: set[int] = set()
    entries = text.replace(",", " ").split()
    if not entries:
        raise StudyError(f"{option} names no layer", hint=f"leave it out, or give {_skip_forms(spec)}")
    for entry in entries:
        skip.update(_skip_entry(entry, spec, option))
    return tuple(sorted(skip))


def _skip_entry(entry: str, spec: CacheSpec, option: str) -> Iterable[int]:
    if entry in GROUPS:
        return _holding(entry, spec.layers_of(GROUPS[entry]), spec, option)
    indices = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", entry)
    if indices is None:
        raise StudyError(f"{option} does not understand {entry!a}", hint=f"give {_skip_forms(spec)}")
    first = int(indices[1])
    last = first if indices[2] is None else int(indices[2])
    if not first <= last < spec.num_layers:
        raise _matches_nothing(entry, spec, option)
    return _holding(entry, range(first, last + 1), spec, option)


def _holding(entry: str, layers: Iterable[int], spec: CacheSpec, option: str) -> tuple[int, ...]:
    """Those with K and V of their own, which alone can be stored otherwise."""
    found = tuple(layer_idx for layer_idx in layers if spec.layers[layer_idx].holds_kv)
    if not found:
        raise _matches_nothing(entry, spec, option)
    return found


def _matches_nothing(entry: str, spec: CacheSpec, option: str) -> StudyError:
    ignored = read_skip_words((entry,), spec).ignored
    because = f": {ignored[0].because}" if ignored and entry not in ("full_attention",) and "-" not in entry else ""
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


def parse_memories(texts: Sequence[str]) -> tuple[int, ...]:
    """('16GiB,24GiB', '80GB') to bytes. Raises StudyError."""
    return tuple(_memory(word) for text in texts for word in (text.split(",") if text else [text]))


def _memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise StudyError(f"--memory {text!a} is not an amount of memory", hint="give it as 16GiB") from error


def parse_weights(text: str) -> int:
    """GiB as a decimal number, to bytes. Raises StudyError."""
    if re.fullmatch(r"[0-9]{1,7}(\.[0-9]{1,6})?", text, re.ASCII) is None or float(text) > MOST_WEIGHTS_GIB:
        raise StudyError(f"--weights-gib {text!a} is not a number of GiB", hint="give the size of the weights, as 13")
    return int(float(text) * GIB)
