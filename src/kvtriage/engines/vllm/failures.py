"""How a server can fail, told apart by what is to be done about it.

EngineError
├── Unanswered     the same request may be sent again: 5xx, stalled, cut off, too short
│   └── Overdue    it took longer than any answer may, and would again
├── ServerGone     the server does not answer at all any more: start it again, where it is ours
└── Refused        the server understood and said no: asking again would change nothing
    └── Missing    it has nothing under that name, and may be asked for the rest
"""

from __future__ import annotations

from kvtriage.errors import EngineError

__all__ = ["Missing", "Overdue", "Refused", "ServerGone", "Unanswered"]


class Unanswered(EngineError):
    """No whole answer came; nothing of it was recorded."""


class Overdue(Unanswered):
    """It was still coming, byte by byte, when its time was up."""


class ServerGone(EngineError):
    """The connection was refused, or the process has ended."""


class Refused(EngineError):
    """A 4xx, or an answer that means the server cannot do what is asked."""


class Missing(Refused):
    """A 404 or 405, or a method that the server's workers do not have."""
