"""transformers, imported without what it brings along for other uses than ours."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

__all__ = ["import_transformers"]


def import_transformers() -> None:
    """The first import of transformers in a process.

    Beside the language models it loads the losses of object detectors, and scipy's optimisers for them where there is a
    scipy: a third of a second. Whether there is one it asks itself once and keeps the answer; here it asks again, and
    is told that there is none. Everybody else finds scipy as it is.
    """
    from transformers.utils.import_utils import is_scipy_available

    is_scipy_available.cache_clear()
    with _hidden("scipy"):
        is_scipy_available()


@contextlib.contextmanager
def _hidden(name: str) -> Iterator[None]:
    """A package that cannot be found in the meantime, by the rule of Python's import system for None in sys.modules.

    No thread finds it then: what is done with it hidden has to be short.
    """
    before = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is not None:
            sys.modules[name] = before
        elif sys.modules.get(name) is None:  # unless another thread has just put it there
            sys.modules.pop(name, None)
