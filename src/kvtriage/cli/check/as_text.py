"""The answer for people: what is there, what the engine makes of it, what looks wrong, and a last line that says so."""

from __future__ import annotations

from collections.abc import Iterator

from kvtriage.checkpoints.finding import Level
from kvtriage.checkpoints.scale_findings import name_layers
from kvtriage.cli.check.answer import Answer, Live
from kvtriage.cli.terminal import one_line

__all__ = ["render_answer"]

_SHOWN = 12


def render_answer(answer: Answer) -> str:
    return "\n".join(map(_printable, _lines(answer)))


def _printable(line: str) -> str:
    """Names in it come from strangers; the indent is ours."""
    indent = len(line) - len(line.lstrip(" "))
    return " " * indent + one_line(line)


def _lines(answer: Answer) -> Iterator[str]:
    yield f"{answer.path}: {answer.scales:,} KV-cache scales"
    for group in answer.groups[:_SHOWN]:
        shape = f"[{', '.join(map(str, group.shape))}]" if group.shape else "one number"
        yield f"  {group.tensor}: {group.dtype} {shape}, {name_layers(group.layers)}, named as {group.form}"
    if len(answer.groups) > _SHOWN:
        yield f"  and {len(answer.groups) - _SHOWN} more sorts"
    stays = answer.auto_becomes == "auto"
    yield f"  auto {'stays as it is' if stays else f'becomes {answer.auto_becomes} by itself'}: {answer.because}"
    for says, tensors in _alike(answer).items():
        yield f"  vLLM 0.32, cache in FP8, {_listed(tensors)}: {says}"
    for finding in answer.findings:
        yield f"  {'note' if finding.level == Level.SAID else finding.level}: {finding.text}"
    if answer.live is not None:
        yield from _live(answer.live)
    yield f"{answer.path}: {answer.status}"


def _alike(answer: Answer) -> dict[str, list[str]]:
    """What becomes of scales, in words → the tensors of which it is true."""
    found: dict[str, list[str]] = {}
    for tensor, fates in answer.loading.items():
        if fates:
            found.setdefault(
                "; ".join(f"{fate} ({count} layer{'s' * (count > 1)})" for fate, count in fates.items()), []
            ).append(tensor)
    return found


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _live(live: Live) -> Iterator[str]:
    yield (
        f"  live, {live.backend}: {live.equal} of {live.layers} layers carry the scales of the file, "
        f"{live.in_bf16} are not in FP8"
    )
    for text in live.differing[:_SHOWN]:
        yield f"  differs: {text}"
    if len(live.differing) > _SHOWN:
        yield f"  and {len(live.differing) - _SHOWN} more differ"
