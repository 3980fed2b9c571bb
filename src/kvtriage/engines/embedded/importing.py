"""transformers, imported without what it brings along for other uses than ours."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

__all__ = ["import_transformers"]


def import_transformers() -> None:
    """The first import of transformers in a process, before there are threads that import anything.

    Beside the language models it loads the losses of object detectors, and scipy's optimisers for them where there is a
    scipy: a third of a second. It asks once whether there is one, as it is imported, is told that there is none, and
    does without in this process. Whoever imports scipy later finds it as it is. Where transformers was there already,
    nothing changes.
    """
    with _hidden("scipy"):
        from transformers.utils.import_utils import is_scipy_available

        is_scipy_available()


@contextlib.contextmanager
def _hidden(name: str) -> Iterator[None]:
    """A package that cannot be found in the meantime, by the rule of Python's import system for None in sys.modules."""
    before = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
