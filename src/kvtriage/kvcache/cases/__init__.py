"""What the engine reports, for lines of JSON: the stable form for programs.

values   numbers, words and switches from JSON, checked and named when wrong
flags    the engine's flags
layers   a model given layer by layer
answers  one case, one answer
"""

from __future__ import annotations

from kvtriage.kvcache.cases.answers import Answer, Question, answer_case, answer_error, read_question

__all__ = ["Answer", "Question", "answer_case", "answer_error", "read_question"]
