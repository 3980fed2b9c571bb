"""The demo models, for tests that want a real one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from kvtriage.engines.embedded.demo import DEMO_MODELS, prepare_demo_model

__all__ = ["demo_folder"]


def demo_folder(name: str) -> Path:
    """The converted model. Skips only where its packages are not installed; anything else that is wrong is an error."""
    model = DEMO_MODELS[name]
    if any(find_spec(module) is None for module, _ in model.parts):
        pytest.skip(f"the packages of {name} are not installed: {model.install_command}")
    return prepare_demo_model(name, lambda _what, _done, _total: None)
