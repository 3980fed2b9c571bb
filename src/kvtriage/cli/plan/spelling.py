"""The command line of `kvtriage plan` as it was typed: lists as vLLM takes them, options in their own spelling."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import click

__all__ = ["VLLM_SKIP", "PlanCommand", "Spelling"]

VLLM_SKIP = "--kv-cache-dtype-skip-layers"
SKIPS = ("--skip", VLLM_SKIP)
LAYER_WORD = re.compile(r"[0-9][0-9,-]*|(sliding|full)(_[a-z]+)?", re.ASCII)
"""A further word of a list of layers; anything else that follows is the model."""


@dataclass(frozen=True)
class Spelling:
    """The options that have two names, under the one that was typed."""

    skip: str = "--skip"
    memory: str = "--memory"
    utilization: str = "--utilization"

    @classmethod
    def of(cls, ctx: click.Context) -> Spelling:
        typed = _typed_names(ctx.command.params, ctx.meta.get(PlanCommand.WORDS, ()))
        main = cls()
        return cls(
            typed.get("skip", main.skip),
            typed.get("memories", main.memory),
            typed.get("utilization", main.utilization),
        )


class PlanCommand(click.Command):
    """Takes several words after a list of layers, as vLLM does, and names an option in an error as it was typed."""

    WORDS = "kvtriage.plan.words"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(_gather(args))
        ctx.meta[self.WORDS] = tuple(words)
        try:
            return super().parse_args(ctx, words)
        except click.BadParameter as error:
            if error.param is not None and error.param_hint is None:
                name = _typed_names([error.param], ctx.meta[self.WORDS]).get(error.param.name or "")
                error.param_hint = None if name is None else f"'{name}'"
            raise


def _gather(args: Sequence[str]) -> Iterator[str]:
    """`--skip 0 5 model` as `--skip '0 5' model`."""
    words = iter(args)
    word = next(words, None)
    while word is not None:
        yield word
        following = next(words, None)
        if word in SKIPS and following is not None:
            entries = [following]
            following = next(words, None)
            while following is not None and LAYER_WORD.fullmatch(following):
                entries.append(following)
                following = next(words, None)
            yield " ".join(entries)
        word = following


def _typed_names(params: Iterable[click.Parameter], words: Sequence[str]) -> Mapping[str, str]:
    """Parameter → the last of its names that stands among the words."""
    known = {name: param.name or "" for param in params for name in (*param.opts, *param.secondary_opts)}
    found = (word.partition("=")[0] for word in words)
    return {known[name]: name for name in found if name in known}
