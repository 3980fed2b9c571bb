from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.errors import DataError
from kvtriage.tasks.corpus import Document, demo_english, read_documents
from tests.unit.tasks.texts import WordTokenizer, documents_of, line

RENDER = WordTokenizer().render_chat


def read(data: str | bytes) -> tuple[Document, ...]:
    return read_documents(data.encode() if isinstance(data, str) else data, "traffic.jsonl", RENDER)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"text": "as it stands"}, "as it stands"),
        ({"text": "of the two", "prompt": "not this", "id": 7}, "of the two"),
        ({"prompt": "Why?", "completion": " Because."}, "Why? Because."),
        ({"prompt": "Why?", "response": " Because."}, "Why? Because."),
        ({"prompt": "Why?", "completion": " This.", "response": " Not that."}, "Why? This."),
        ({"prompt": "Why?"}, "Why?"),
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]},
            "<user> Hi\n<assistant> Yes\n",
        ),
        ({"messages": [{"role": "user", "content": "Hi", "name": "Al"}], "prompt": "not this"}, "<user> Hi\n"),
    ],
)
def test_each_form_becomes_one_text(fields: dict[str, object], text: str) -> None:
    (document,) = read(line(**fields))
    assert document.text == text
    assert document.doc_id == hashlib.sha256(text.encode()).hexdigest()[:16]


def test_repeats_are_used_once_and_counted() -> None:
    documents = read(line(text="one") + line(text="two") + line(prompt="o", completion="ne") + line(text="one"))
    assert [(document.text, document.copies) for document in documents] == [("one", 3), ("two", 1)]


def test_blank_lines_carriage_returns_and_a_byte_order_mark_are_nothing() -> None:
    assert [document.text for document in read(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')] == ["a", "b"]


def test_only_a_line_feed_ends_a_line() -> None:
    assert read('{"text": "a\u2028b\x85c"}')[0].text == "a\u2028b\x85c"


@pytest.mark.parametrize("data", ["", "\n\n", " \r\n"])
def test_an_empty_file_is_refused(data: str) -> None:
    with pytest.raises(DataError, match=r"traffic\.jsonl is empty"):
        read(data)


@pytest.mark.parametrize(
    ("bad", "named", "hint"),
    [
        (b"\x1f\x8b\x08", "is not UTF-8 text", "is it compressed?"),
        (b"once upon a time", "is not JSON", '{"text": "..."}'),
        (b'{"text": "a"', "is not JSON", "one object"),
        (b"[" * 100_000, "is not JSON", "one object"),
        (b"1" * 10_000, "is not JSON", "one object"),
        (b'[{"text": "a"}]', "is JSON but not an object", "write the entries of an array one to a line"),
        (b'"text"', "is JSON but not an object", "one object"),
        (
            b'{"conversation": 1, "id": 2}',
            "no text that we know how to read (its keys: conversation, id)",
            '"messages"',
        ),
        (b"{}", "no text that we know how to read (its keys: none)", '"prompt"'),
        (b'{"text": ""}', "holds an empty text", "leave the line out"),
        (b'{"text": " \\n"}', "holds an empty text", "leave the line out"),
        (b'{"prompt": "", "completion": ""}', "holds an empty text", "leave the line out"),
        (b'{"text": 3}', '"text"', "plain text"),
        (b'{"text": null, "prompt": "a"}', '"text"', "plain text"),
        (b'{"prompt": "a", "response": ["b"]}', '"response"', "plain text"),
        (b'{"text": "\\ud83d"}', "half of a surrogate pair", "pair of escapes"),
        (b'{"messages": "hello"}', "is not a list of messages", "one object"),
        (b'{"messages": []}', "is not a list of messages", "one object"),
        (b'{"messages": ["hello"]}', "is not an object", '"role"'),
        (b'{"messages": [{"role": "user"}]}', '"content"', "tool calls"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', '"content"', "images"),
    ],
)
def test_a_bad_line_is_named_by_its_number(bad: bytes, named: str, hint: str) -> None:
    with pytest.raises(DataError) as caught:
        read(b'{"text": "fine"}\n\n' + bad + b'\n{"text": "fine"}\n')
    assert "line 3 of traffic.jsonl" in caught.value.message
    assert named in caught.value.message
    assert hint in caught.value.hint


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip), min_size=1, unique=True)
)
def test_any_texts_come_back_as_they_were(texts: list[str]) -> None:
    assert [document.text for document in documents_of(texts)] == texts


@given(st.binary(max_size=60))
def test_any_bytes_are_documents_or_a_data_error(data: bytes) -> None:
    try:
        documents = read(data)
    except DataError:
        return
    assert all(document.text.strip() for document in documents)


def test_the_demo_text_is_english_in_documents_of_useful_length() -> None:
    data = demo_english()
    documents = read(data)
    assert len(documents) == data.count(b"\n") >= 28
    assert all(11_000 <= len(document.text) < 20_000 for document in documents)
    assert sum("the" in document.text.split() for document in documents) == len(documents)
    assert json.loads(data.split(b"\n")[0])["text"] == documents[0].text


def test_the_demo_text_repeats_no_paragraph() -> None:
    paragraphs = [paragraph for document in read(demo_english()) for paragraph in document.text.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs))
