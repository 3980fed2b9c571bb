"""What we ask: one quality task per file, and a line here for each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvtriage.tasks.base import Task, TaskItem
from kvtriage.tasks.needle import NeedleTask
from kvtriage.tasks.text import TextTask

__all__ = ["TASKS", "Task", "TaskItem"]

TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in (TextTask(), NeedleTask())})
