"""Whether a file of a server is about the model that is asked about, as far as both say.

A log names the model that was typed and the class that was taken for it ('Resolved architecture: GptOssForCausalLM',
config/model.py:733 of vLLM 0.32.0), a page of metrics the served name. Names are free: a folder or a served name may be
called anything, so a strange name only leaves open what other classes settle.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvtriage.kvcache.observed.account import Settings
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["AskedModel", "Doubt", "Weight", "doubts_of"]

SAYS_NOTHING = ("Transformers", "Pixtral")
"""Classes that stand for many models: vLLM's wrapper of Transformers, and what Mistral's own format is read as."""
SHORTEST_NAME = 4
NO_NAME = re.compile(r"\.*|config\.json|snapshots|[0-9a-f]{40}")
"""Parts of a path that name no model: the last two are those of the hub's cache."""


class Weight(enum.StrEnum):
    """SETTLED: it is another model. OPEN: it may be, and a difference may come from that. NOTED: good to know."""

    SETTLED = "settled"
    OPEN = "open"
    NOTED = "noted"


@dataclass(frozen=True)
class Doubt:
    weight: Weight
    sentence: str


@dataclass(frozen=True)
class AskedModel:
    """What the model is called where it was asked about, its classes by config.json, and the dtype it is served in.

    `name` is a path or a hub id.
    """

    name: str
    architectures: tuple[str, ...]
    dtype: str


def doubts_of(model: AskedModel, spec: CacheSpec, settings: Settings) -> tuple[Doubt, ...]:
    """Heaviest first; none where nothing speaks against it."""
    order = list(Weight)
    return tuple(sorted(_doubts(model, spec, settings), key=lambda doubt: order.index(doubt.weight)))


def _doubts(model: AskedModel, spec: CacheSpec, settings: Settings) -> Iterator[Doubt]:
    resolved = settings.architecture
    if resolved is not None and not resolved.startswith(SAYS_NOTHING) and _is_of_another_class(resolved, model):
        classes = " or ".join(each[:80] for each in model.architectures[:2])
        yield Doubt(
            Weight.SETTLED,
            f"the file is of a {resolved} and config.json of a {classes}: these are two models, and their figures "
            "cannot be compared; give the config.json of the model that was served",
        )
        return
    if settings.model is not None and resolved is None and _is_strange(settings.model, model.name, spec.model_type):
        yield Doubt(
            Weight.OPEN,
            f"the file is of {settings.model[:120]}, and config.json is that of {_tail(model.name)[:120]} "
            f"({spec.model_type}): whether they are one model the names do not tell",
        )
    if settings.max_model_len is not None and settings.max_model_len > spec.max_model_len:
        yield Doubt(
            Weight.OPEN,
            f"the server takes {settings.max_model_len:,} tokens and config.json reads {spec.max_model_len:,}: it is "
            "of another model, or was overridden",
        )
    dtype = None if settings.dtype is None else settings.dtype.removeprefix("torch.")
    if dtype not in (None, "auto", model.dtype):
        yield Doubt(Weight.NOTED, f"the file says dtype {str(dtype)[:40]}, and config.json is served in {model.dtype}")


def _is_of_another_class(resolved: str, model: AskedModel) -> bool:
    return bool(model.architectures) and _stem(resolved) not in map(_stem, model.architectures)


def _stem(architecture: str) -> str:
    """'GptOss' of 'GptOssForCausalLM': a model has classes for several tasks."""
    return re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", architecture).lower()


def _is_strange(served: str, asked: str, model_type: str) -> bool:
    """Whether the names speak of two models: neither holds the other, and both are of the family of `model_type`, or
    a hub id is of none. A folder or a served name that is called anything says nothing.
    """
    one, other = _plain(_tail(served)), _plain(_tail(asked))
    if min(len(one), len(other)) >= SHORTEST_NAME and (one in other or other in one):
        return False
    family = re.split(r"[^a-z]", model_type.lower(), maxsplit=1)[0]
    if family in one:
        return family in other
    return re.fullmatch(r"[\w.-]+/[\w.-]+", served) is not None and not served.startswith(".")


def _tail(name: str) -> str:
    """'gpt-oss-20b' of 'openai/gpt-oss-20b', of 'models/gpt-oss-20b/' and of 'openai--gpt-oss-20b.json'."""
    parts = [part for part in re.split(r"[/\\]|--", name.strip()) if NO_NAME.fullmatch(part) is None]
    return parts[-1].removesuffix(".json") if parts else name


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
