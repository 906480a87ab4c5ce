"""Streams of events: which chunks count, when they arrived, and how the answer ended."""

from __future__ import annotations

import json

import pytest

from oarlock.server.bench.http_stream import EventReader, Target


def data(chunk) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def text(value, finish=None) -> bytes:
    return data({"choices": [{"index": 0, "text": value, "finish_reason": finish}]})


def delta(finish=None, **fields) -> bytes:
    return data({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


USAGE = data({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})


def test_an_event_is_timed_by_its_last_byte_wherever_the_pieces_are_cut():
    reader = EventReader(is_chat=False, keep_text=True)
    whole = text("a") + b": ping\n\n" + text("b") + text("", "length") + USAGE + b"data: [DONE]\n\n"
    for at in range(len(whole)):
        reader.feed(float(at), whole[at : at + 1])
    ends = [whole.index(part) + len(part) - 2 for part in (text("a"), text("b"), text("", "length"))]
    assert reader.times == ends
    assert reader.texts == ["a", "b"]
    assert (reader.prompt_tokens, reader.completion_tokens) == (5, 3)
    assert reader.is_complete and reader.error is None and reader.malformed is None


def test_line_ends_of_the_other_kind():
    reader = EventReader(is_chat=False)
    reader.feed(1.0, text("a").replace(b"\n", b"\r\n") + b"data:[DONE]\r\n\r\n")
    assert reader.times == [1.0] and reader.is_complete


def test_the_role_of_a_chat_is_no_token_but_everything_said_is():
    reader = EventReader(is_chat=True)
    reader.feed(1.0, delta(role="assistant", content=""))
    assert reader.times == []
    reader.feed(2.0, delta(reasoning_content="hm"))
    reader.feed(3.0, delta(content="x"))
    reader.feed(4.0, delta(tool_calls=[{}]))
    reader.feed(5.0, delta(content="", finish="stop"))
    assert reader.times == [2.0, 3.0, 4.0, 5.0]


def test_a_stream_that_merely_stops_is_not_complete():
    reader = EventReader(is_chat=False)
    reader.feed(1.0, text("a") + USAGE)
    assert not reader.is_complete


@pytest.mark.parametrize("chunk", [{"error": {"message": "no memory"}}, {"object": "error", "message": "no memory"}])
def test_an_error_event(chunk):
    reader = EventReader(is_chat=False)
    reader.feed(1.0, text("a") + data(chunk))
    assert "no memory" in reader.error


@pytest.mark.parametrize(
    "piece", [b"data: {\n\n", b"data: 5\n\n", b"data: {}\n\n", b'data: {"choices": [3]}\n\n', b"data: \xff\n\n"]
)
def test_invalid_chunks_are_recorded_as_malformed(piece):
    reader = EventReader(is_chat=False)
    reader.feed(1.0, piece)
    assert reader.malformed is not None


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://127.0.0.1:8000", Target("127.0.0.1", 8000, False, "")),
        ("http://127.0.0.1:8000/v1/", Target("127.0.0.1", 8000, False, "")),
        ("https://models.example/proxy/v1", Target("models.example", 443, True, "/proxy")),
        ("http://[::1]:9", Target("::1", 9, False, "")),
    ],
)
def test_urls(url, target):
    assert Target.parse(url) == target
    assert Target.parse("http://[::1]:9").host_header == "[::1]:9"


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://u:p@x", "http://x?a=1", "http://x:a"]
)
def test_wrong_urls(url):
    with pytest.raises(ValueError):
        Target.parse(url)
