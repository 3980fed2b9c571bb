"""Documents as tokens, read lazily: which ones to look at, and no further than they are needed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvtriage.tasks.corpus import Document

if TYPE_CHECKING:
    from kvtriage.engines.base import Tokenizer

__all__ = ["Source", "reading_order"]

_PIECE_CHARACTERS = 16_384
"""How much of a long document is tokenised at a time."""


class Source:
    """One document, read from front to back; `position` counts the tokens already passed."""

    def __init__(self, document: Document, tokenizer: Tokenizer) -> None:
        self.doc_id = document.doc_id
        self.position = 0
        self._tokenizer = tokenizer
        self._most_tokens = len(document.text.encode()) + 1
        self._pieces = _pieces(document.text)
        self._tokens: list[int] = []

    def holds(self, count: int) -> bool:
        """Whether `count` more tokens follow. Tokenises no more than it takes to know.

        A text of fewer bytes than that is not tokenised at all: a token is a byte at least.
        """
        needed = self.position + count
        if self._most_tokens < needed:
            return False
        while len(self._tokens) < needed:
            piece = next(self._pieces, None)
            if piece is None:
                return False
            self._read(piece)
        return True

    def peek(self, count: int) -> tuple[int, ...]:
        """The next `count` tokens, of which `holds` has said that they are there."""
        return tuple(self._tokens[self.position : self.position + count])

    def count_tokens(self) -> int:
        """Tokens of the whole document."""
        for piece in self._pieces:
            self._read(piece)
        return len(self._tokens)

    def _read(self, piece: str) -> None:
        tokens = self._tokenizer.encode(piece)
        bos = list(self._tokenizer.bos)
        if bos and not self._tokens and tokens[: len(bos)] == bos:
            # A chat template may have written it already; every item gets exactly one.
            tokens = tokens[len(bos) :]
        self._tokens += tokens


def reading_order(documents: Iterable[Document], seed: int, most_characters: int) -> tuple[Document, ...]:
    """The documents to look at, in an order that depends on their texts and the seed alone.

    At random until about `most_characters` would be read; from what is left, the longest, and
    again no more than that: a huge file costs no more than a large one, and a few long texts
    among many short ones are still found.
    """
    shuffled = sorted(documents, key=lambda document: _rank(document, seed))
    first = tuple(_within(shuffled, most_characters))
    longest = sorted(shuffled[len(first) :], key=lambda document: -len(document.text))
    return first + tuple(_within(longest, most_characters))


def _rank(document: Document, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{document.doc_id}".encode()).digest()


def _within(documents: Sequence[Document], most_characters: int) -> Iterator[Document]:
    spent = 0
    for document in documents:
        if spent >= most_characters:
            return
        spent += min(len(document.text), _PIECE_CHARACTERS)
        yield document


def _pieces(text: str) -> Iterator[str]:
    """Consecutive parts of a text, cut before white space where there is any."""
    start = 0
    while start < len(text):
        end = start + _PIECE_CHARACTERS
        if end < len(text):
            space = max(text.rfind(" ", start + 1, end), text.rfind("\n", start + 1, end))
            end = space if space > start else end
        yield text[start:end]
        start = end
