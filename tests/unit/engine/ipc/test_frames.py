"""Frames survive any cutting of the stream, and anything else is a typed error."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.engine.ipc import frames
from oarlock.engine.ipc.frames import FrameError, FrameReader, encode

_HEADS = st.dictionaries(st.text(max_size=8), st.one_of(st.integers(), st.text(max_size=20), st.booleans()), max_size=4)
_INTS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=30)
_FLOATS = st.lists(st.floats(width=32, allow_nan=False), max_size=10)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(_HEADS, _INTS, _FLOATS), max_size=4), st.integers(1, 50))
def test_what_goes_in_comes_out_however_the_stream_is_cut(messages, cut) -> None:
    stream = b"".join(encode({**head, "kind": "x"}, ints, floats) for head, ints, floats in messages)
    reader = FrameReader()
    got = [frame for start in range(0, len(stream), cut) for frame in reader.feed(stream[start : start + cut])]
    reader.finish()
    assert [(f.head, f.ints.tolist(), f.floats.tolist()) for f in got] == [
        ({**head, "kind": "x"}, ints, floats) for head, ints, floats in messages
    ]


@settings(max_examples=150, deadline=None)
@given(st.binary(min_size=16, max_size=200))
def test_random_bytes_are_a_typed_error(data: bytes) -> None:
    reader = FrameReader()
    with pytest.raises(FrameError):
        reader.feed(data)
        reader.finish()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_frame_is_a_frame_or_a_typed_error(data) -> None:
    good = encode({"kind": "events", "ids": [1, 2], "text": "é"}, [1, 2, 3], [0.5])
    position = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[position] ^= data.draw(st.integers(1, 255))
    reader = FrameReader()
    try:
        got = reader.feed(bytes(bad))
        reader.finish()
    except FrameError:
        return
    assert len(got) == 1 and isinstance(got[0].kind, str)


@pytest.mark.parametrize("keep", [1, 15, 16, 20, -1])
def test_a_truncated_frame_is_noticed_at_the_end(keep: int) -> None:
    reader = FrameReader()
    assert reader.feed(encode({"kind": "x"}, [1, 2, 3])[:keep]) == []
    with pytest.raises(FrameError, match="inside a frame"):
        reader.finish()


@pytest.mark.parametrize(
    "head", [b"", b"{", b"[]", b"null", b'{"kind": 3}', b"{}", b"\xff\xfe", b"[" * 100_000, b'{"kind":"x"} x']
)
def test_heads_that_are_no_heads(head: bytes) -> None:
    with pytest.raises(FrameError):
        FrameReader().feed(struct.pack("<IIII", frames._MAGIC, len(head), 0, 0) + head)


@pytest.mark.parametrize("sizes", [(2**32 - 1, 0, 0), (0, 2**31, 0), (10, 2**25, 2**25), (2**23 + 1, 0, 0)])
def test_sizes_are_bounded_before_anything_is_kept(sizes) -> None:
    with pytest.raises(FrameError, match="too large"):
        FrameReader().feed(struct.pack("<IIII", frames._MAGIC, *sizes))


def test_the_writer_refuses_what_the_reader_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 100)
    with pytest.raises(FrameError, match="too large"):
        encode({"kind": "x"}, range(100))
    for ints in ([2**31], ["a"], [1.5]):
        with pytest.raises(FrameError, match="cannot hold"):
            encode({"kind": "x"}, ints)
