"""A model and a way to ask `kvtriage plan` about it, for the tests of its modules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from click.testing import CliRunner, Result

from kvtriage.cli.plan.answer import PlanAnswer, answer
from kvtriage.cli.plan.command import plan_command
from kvtriage.cli.plan.engine_flags import EngineFlags
from kvtriage.cli.plan.question import Asked, open_question
from kvtriage.errors import KvtriageError
from tests.unit.kvcache.readers.configs import GPT_OSS_20B

__all__ = ["answer_of", "asked", "invoke", "refusal", "run", "save"]


def save(folder: Path, config: Mapping[str, object] = GPT_OSS_20B) -> str:
    """A model folder with this config.json; its path."""
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(plan_command, arguments)


def run(*arguments: str) -> str:
    """What is printed where all goes well."""
    result = invoke(*arguments)
    assert result.exception is None, result.exception
    return result.stdout


def refusal(*arguments: str) -> KvtriageError:
    """The error of one line that exits with 2."""
    error = invoke(*arguments).exception
    assert isinstance(error, KvtriageError), error
    assert error.exit_code == 2
    assert error.hint
    assert "\n" not in error.message
    return error


def asked(
    *,
    contexts: tuple[str, ...] = ("32768",),
    skip: str | None = None,
    scaling: str | None = None,
    memories: tuple[str, ...] = ("16GiB",),
    gpu: str | None = None,
    weights_gib: str | None = None,
    utilization: float | None = None,
    engine: EngineFlags | None = None,
) -> Asked:
    return Asked(contexts, skip, scaling, memories, gpu, weights_gib, utilization, engine or EngineFlags())


def answer_of(config: Mapping[str, object], how: Asked) -> PlanAnswer:
    return answer(open_question(config, None, how))
