"""The user's own text: JSON lines in, documents out. Nothing is guessed and nothing dropped unsaid.

Each line is one object, in one of three forms:

    {"text": "..."}                                     as it stands
    {"messages": [{"role": "...", "content": "..."}]}   rendered by the model's chat template
    {"prompt": "...", "completion": "..."}              joined; `response` serves for `completion`,
                                                        and either may be left out

Where a line has more than one, the first in this list is read. Other keys are left alone.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvtriage.errors import DataError

__all__ = ["Document", "demo_english", "read_documents"]

RenderChat = Callable[[Sequence[dict[str, str]]], str]

_FORMS = 'each line is one object with "text", "messages" or "prompt", such as {"text": "..."}'
_DEMO_CHARACTERS = 11_000
"""Least length of a demo document: some 2,600 tokens of English."""


@dataclass(frozen=True)
class Document:
    """One text. Its id is made from the text, so that it names the same text in every run."""

    doc_id: str
    """The first 16 hexadecimal digits of the text's SHA-256."""
    text: str
    copies: int = 1
    """Times the very same text stood in the file; it is used once."""


def read_documents(data: bytes, source: str, render_chat: RenderChat) -> tuple[Document, ...]:
    """The documents of a JSON-lines file, in file order, each text once; blank lines are skipped.

    `source` names the file in errors. Raises DataError with the number of the first line that
    cannot be read, and for a file without any text.
    """
    documents: dict[str, Document] = {}
    for number, line in enumerate(io.BytesIO(data.removeprefix(b"\xef\xbb\xbf")), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {source}"
        text = _text(_object(line, where), where, render_chat)
        doc_id = _doc_id(text, where)
        seen = documents.get(doc_id)
        documents[doc_id] = Document(doc_id, text) if seen is None else replace(seen, copies=seen.copies + 1)
    if not documents:
        raise DataError(f"{source} is empty", hint=_FORMS)
    return tuple(documents.values())


def demo_english() -> bytes:
    """English to try things on, as JSON lines: the language reference in Python's own standard library.

    About 30 documents of 11,000 characters or a little more, cut at the ends of paragraphs; a
    paragraph that the reference repeats is kept once. The same bytes for the same Python.
    """
    from pydoc_data import topics  # half a megabyte, for the demo alone

    paragraphs = dict.fromkeys(
        paragraph.strip("\n") for name in sorted(topics.topics) for paragraph in topics.topics[name].split("\n\n")
    )
    lines = (json.dumps({"text": text}, ensure_ascii=False) for text in _gather(paragraphs, _DEMO_CHARACTERS))
    return "".join(f"{line}\n" for line in lines).encode()


def _gather(paragraphs: Iterable[str], least: int) -> Iterator[str]:
    """Consecutive paragraphs joined until `least` characters are reached; a short rest is left out."""
    held: list[str] = []
    for paragraph in filter(None, paragraphs):
        held.append(paragraph)
        text = "\n\n".join(held)
        if len(text) >= least:
            yield text
            held = []


def _object(line: bytes, where: str) -> Mapping[str, object]:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 text", hint=f"is it compressed? {_FORMS}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}", hint=_FORMS) from error
    if not isinstance(value, dict):
        raise DataError(
            f"{where} is JSON but not an object",
            hint=f"write the entries of an array one to a line; {_FORMS}" if isinstance(value, list) else _FORMS,
        )
    return value


def _text(value: Mapping[str, object], where: str, render_chat: RenderChat) -> str:
    if "text" in value:
        text = _string(value, "text", where)
    elif "messages" in value:
        text = render_chat(_messages(value["messages"], where))
    elif "prompt" in value:
        answers = [key for key in ("completion", "response") if key in value][:1]
        text = "".join(_string(value, key, where) for key in ("prompt", *answers))
    else:
        keys = ", ".join(sorted(value)[:5]) or "none"
        raise DataError(f"{where} has no text that we know how to read (its keys: {keys})", hint=_FORMS)
    if not text.strip():
        raise DataError(f"{where} holds an empty text", hint="leave the line out")
    return text


def _messages(value: object, where: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise DataError(f'"messages" in {where} is not a list of messages', hint=_FORMS)
    messages = []
    for message in value:
        if not isinstance(message, dict):
            raise DataError(f"a message in {where} is not an object", hint='write {"role": "...", "content": "..."}')
        messages.append({key: _string(message, key, where) for key in ("role", "content")})
    return messages


def _string(value: Mapping[str, object], key: str, where: str) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        raise DataError(
            f'"{key}" in {where} is not a string',
            hint="only plain text is read; render images, tool calls and other parts into text, or leave the line out",
        )
    return text


def _doc_id(text: str, where: str) -> str:
    try:
        return hashlib.sha256(text.encode()).hexdigest()[:16]
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} holds half of a surrogate pair, which is not text",
            hint="write characters beyond \\uffff as a pair of escapes or as UTF-8",
        ) from error
