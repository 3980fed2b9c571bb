"""A tokenizer of one token a word, and texts whose tokens are known."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtriage.engines.base import Distribution
from kvtriage.tasks.corpus import Document, read_documents

__all__ = ["BOS", "FakeDistribution", "WordTokenizer", "documents_of", "line", "words"]

BOS = 1


@dataclass
class WordTokenizer:
    """One token a word, and a count of the characters that it was asked to read."""

    bos: tuple[int, ...] = (BOS,)
    eos: tuple[int, ...] = ()
    characters: int = 0

    def encode(self, text: str) -> list[int]:
        self.characters += len(text)
        return [BOS if word == "<bos>" else 10 + zlib.crc32(word.encode()) for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(f"<{message['role']}> {message['content']}\n" for message in messages)


def words(name: str, count: int) -> str:
    """`count` words that no text of another name has."""
    return " ".join(f"{name}_{i}" for i in range(count))


def line(**fields: object) -> str:
    return json.dumps(fields) + "\n"


def documents_of(texts: Iterable[str]) -> tuple[Document, ...]:
    data = "".join(line(text=text) for text in texts).encode()
    return read_documents(data, "here", WordTokenizer().render_chat)


@dataclass(frozen=True)
class FakeDistribution:
    """Says what it was told to say of its distance from any other."""

    kl: tuple[float, ...]

    def kl_from(self, reference: Distribution) -> tuple[float, ...]:
        return self.kl
