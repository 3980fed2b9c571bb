"""Times from the arrival of bytes: chunks, merged tokens, loops, and 256 streams at once."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest

from kvtriage.engines.vllm.client import Client, Piece
from kvtriage.engines.vllm.failures import Unanswered
from kvtriage.engines.vllm.timing import Stream, closed_loop, mean_steps, open_loop, read_stream, stream_body
from tests.unit.engines.vllm.misbehaving.player import Player
from tests.unit.engines.vllm.misbehaving.serving import playing


def event(*tokens: int) -> bytes:
    return f"data: {json.dumps({'choices': [{'text': 'x', 'token_ids': list(tokens)}]})}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def test_each_token_has_the_time_of_its_piece() -> None:
    found = read_stream([Piece(1.5, event(7)), Piece(1.75, event(8)), Piece(2.0, event(9) + DONE)], 1.0, 3)
    assert found == Stream((7, 8, 9), (0.5, 0.75, 1.0))
    assert found.ttft_s == 0.5


def test_tokens_that_come_together_share_the_time_since_the_piece_before() -> None:
    found = read_stream([Piece(1.0, event(1)), Piece(2.0, event(2, 3, 4, 5)), Piece(2.0, DONE)], 0.0, 5)
    assert found.arrival_s == (1.0, 1.25, 1.5, 1.75, 2.0)


def test_an_event_counts_when_its_last_byte_is_there() -> None:
    whole = event(1)
    found = read_stream([Piece(1.0, whole[:9]), Piece(2.0, whole[9:]), Piece(3.0, event(2) + DONE)], 0.0, 2)
    assert found.arrival_s == (2.0, 3.0)


def spoken(text: str) -> bytes:
    return f"data: {json.dumps({'choices': [{'text': text, 'token_ids': None}]})}\n\n".encode()


def counted(tokens: int) -> bytes:
    return f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': tokens}})}\n\n".encode()


def test_a_stream_of_text_is_a_token_for_each_chunk_unless_the_server_counts() -> None:
    pieces = [Piece(1.0, spoken("a")), Piece(2.0, spoken("b")), Piece(4.0, spoken("c") + DONE)]
    assert read_stream(pieces, 0.5, 3) == Stream((), (0.5, 1.5, 3.5))


def test_counted_tokens_are_shared_out_over_the_chunks_of_their_text() -> None:
    pieces = [Piece(1.0, spoken("a")), Piece(2.0, spoken("bcd")), Piece(3.0, spoken("") + counted(4) + DONE)]
    assert read_stream(pieces, 0.0, 4) == Stream((), (1.0, 1.0, 1.5, 2.0))


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [Piece(1.0, spoken("a") + spoken("b") + counted(3) + DONE)],
        [Piece(1.0, spoken("a") + spoken("b"))],
        [Piece(1.0, event(1))],
        [Piece(1.0, event(1) + DONE)],
        [Piece(1.0, event(1, 2, 3) + DONE)],
        [Piece(1.0, b'data: {"error": {"message": "no"}}\n\n')],
        [Piece(1.0, b"data: {broken\n\n")],
        [Piece(1.0, b'data: {"choices": [{"text": "words alone"}]}\n\n')],
    ],
)
def test_half_a_stream_is_none(pieces: list[Piece]) -> None:
    with pytest.raises(Unanswered):
        read_stream(pieces, 0.0, 2)


def test_means_over_streams_add_up_to_the_whole() -> None:
    ttft, steps = mean_steps([Stream((1, 2), (1.0, 2.0)), Stream((1, 2), (3.0, 3.5))])
    assert (ttft, steps) == (2.0, (0.75,))


def bodies(count: int, tokens: int = 3) -> list[dict[str, object]]:
    return [stream_body("m", [1, 2, i], tokens, str(i)) for i in range(count)]


def test_a_closed_loop_keeps_its_concurrency(tmp_path: Path) -> None:
    player = Player(str(tmp_path), step_s=0.03)
    with playing(player) as url, Client(url) as client:
        streams = closed_loop(client, bodies(6), 2)
    assert [len(stream.token_ids) for stream in streams] == [3] * 6
    assert player.most_running > 1
    first, _, third, _, fifth, _ = player.came_s
    assert third >= first + 3 * player.step_s
    assert fifth >= first + 6 * player.step_s
    assert {body["cache_salt"] for body in player.bodies} == {str(i) for i in range(6)}


def test_merged_tokens_are_recognised_over_the_wire(tmp_path: Path) -> None:
    player = Player(str(tmp_path), tokens_per_chunk=4, step_s=0.02)
    with playing(player) as url, Client(url) as client:
        (stream,) = closed_loop(client, bodies(1, tokens=8), 1)
    assert len(stream.token_ids) == 8
    steps = [after - before for before, after in itertools.pairwise(stream.arrival_s)]
    assert steps[0] < 0.02, "the first four came in one read"
    assert steps[4:] == pytest.approx([steps[4]] * 3), "the other four share the time since then"


def test_an_open_loop_starts_each_stream_when_it_is_due_and_times_it_from_then(tmp_path: Path) -> None:
    player, due_s = Player(str(tmp_path)), (0.0, 0.1, 0.2)
    with playing(player) as url, Client(url) as client:
        started = time.perf_counter()
        streams = open_loop(client, bodies(3), due_s)
        took = time.perf_counter() - started
    for came_s, due, stream in zip(player.came_s, due_s, streams, strict=True):
        assert came_s >= started + due
        assert 0 < stream.ttft_s < took - due


def test_256_streams_at_once_all_arrive(tmp_path: Path) -> None:
    with playing(Player(str(tmp_path), step_s=0.001)) as url, Client(url) as client:
        streams = closed_loop(client, bodies(256), 256)
    assert [len(stream.token_ids) for stream in streams] == [3] * 256
