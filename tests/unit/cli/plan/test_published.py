"""Published configs in every form of the answer: nothing breaks, and the text stays narrow and plain.

All of them are asked for the text, and every third for each of the other forms.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtriage.errors import KvtriageError
from tests.unit.cli.plan.plans import invoke

CONFIGS = Path(__file__).parents[5] / "shared" / "configs"
MODELS = sorted(path.name for path in CONFIGS.glob("*.json"))
MEMORY = ("--memory", "64GiB", "--max-model-len", "auto")


@pytest.mark.skipif(not MODELS, reason="../shared is not there")
@pytest.mark.parametrize(
    "form", [(), ("--tp", "2", "--vllm-version", "0.20"), ("--sweep",), ("--markdown",), ("--json",)]
)
def test_published_configs_have_an_answer(form: tuple[str, ...]) -> None:
    answered = 0
    models = MODELS if form == () else MODELS[::3]
    for name in models:
        memory = MEMORY[:2] if form == ("--sweep",) else MEMORY
        result = invoke(str(CONFIGS / name), *memory, *form)
        assert result.exit_code == 0 or isinstance(result.exception, KvtriageError), (name, result.exception)
        answered += result.exit_code == 0
        if form == ("--json",):
            json.loads(result.stdout)
        elif form != ("--markdown",) and result.stdout:
            assert max(map(len, result.stdout.splitlines())) <= 80, name
            assert result.stdout.isascii(), name
    assert answered >= 0.9 * len(models)
