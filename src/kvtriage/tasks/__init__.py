"""What we ask: one quality task per file, and a line here for each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvtriage.tasks.base import Task, TaskItem
from kvtriage.tasks.generation import GenerationTask
from kvtriage.tasks.needle import NeedleTask
from kvtriage.tasks.recall import RecallTask
from kvtriage.tasks.text import TextTask
from kvtriage.tasks.window import WindowTask

__all__ = ["TASKS", "Task", "TaskItem"]

_ALL: tuple[Task, ...] = (
    TextTask(),
    NeedleTask(),
    WindowTask(past=False),
    WindowTask(past=True),
    RecallTask(),
    GenerationTask(),
)

TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in _ALL})
