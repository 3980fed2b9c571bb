"""One published model for each architecture: the keys of its config.json that say what its cache is, and no others."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtriage.kvcache.readers import READERS

__all__ = ["Shape", "read_shapes", "shape_of", "stand_in"]

FILE = Path(__file__).with_name("shapes.json")


@dataclass(frozen=True)
class Shape:
    """`config` is a fresh copy each time."""

    model: str
    config: dict[str, Any]


def read_shapes() -> dict[str, Shape]:
    """By architecture. Those that a reader gives the same meaning may have one between them."""
    return {name: Shape(entry["model"], entry["config"]) for name, entry in json.loads(FILE.read_bytes()).items()}


def shape_of(architecture: str, shapes: dict[str, Shape]) -> Shape:
    """The architecture's own, or under its name that of its stand-in."""
    own = architecture if architecture in shapes else stand_in(architecture, shapes)
    config = copy.deepcopy(shapes[own].config)
    return Shape(shapes[own].model, {**config, "architectures": [architecture]})


def stand_in(architecture: str, shapes: dict[str, Shape]) -> str:
    """The shortest name of those with a shape that the same function reads.

    Raises StopIteration when there is none: a new reader needs a line in shapes.json.
    """
    read = READERS[architecture].read
    return next(name for name in sorted(shapes, key=len) if READERS[name].read is read)
