"""Frames survive any cutting of the stream, and anything else is a typed error."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.engine.ipc import frames
from oarlock.engine.ipc.frames import FrameError, FrameReader, as_frame

_PAYLOADS = st.lists(st.binary(max_size=200), max_size=6)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(_PAYLOADS, st.integers(1, 50))
def test_frames_survive_any_division_of_the_stream(payloads: list[bytes], cut: int) -> None:
    stream = b"".join(map(as_frame, payloads))
    reader = FrameReader()
    got = [payload for start in range(0, len(stream), cut) for payload in reader.feed(stream[start : start + cut])]
    reader.finish()
    assert got == payloads


def test_payloads_stay_as_they_are_when_more_arrives() -> None:
    first, second = as_frame(b"the first one"), as_frame(b"next")
    reader = FrameReader()
    got = reader.feed(first[:9]) + reader.feed(first[9:] + second[:3]) + reader.feed(second[3:])
    reader.feed(as_frame(bytes(50))[:40])
    assert got == [b"the first one", b"next"]


@settings(max_examples=150, deadline=None)
@given(st.binary(min_size=8, max_size=200))
def test_random_bytes_are_a_typed_error(data: bytes) -> None:
    reader = FrameReader()
    with pytest.raises(FrameError):
        reader.feed(data)
        reader.finish()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_prefix_is_a_typed_error(data) -> None:
    bad = bytearray(as_frame(b"payload"))
    bad[data.draw(st.integers(0, 7))] ^= data.draw(st.integers(1, 255))
    reader = FrameReader()
    with pytest.raises(FrameError):
        reader.feed(bytes(bad))
        reader.finish()


@pytest.mark.parametrize("keep", [1, 7, 8, 12, -1])
def test_a_truncated_frame_is_noticed_at_the_end(keep: int) -> None:
    reader = FrameReader()
    assert reader.feed(as_frame(b"payload")[:keep]) == []
    with pytest.raises(FrameError, match="inside a frame"):
        reader.finish()


@pytest.mark.parametrize("size", [2**32 - 1, 2**31, (256 << 20) + 1])
def test_sizes_are_bounded_before_anything_is_kept(size: int) -> None:
    with pytest.raises(FrameError, match="too large"):
        FrameReader().feed(struct.pack("<II", frames._MAGIC, size))


def test_the_writer_refuses_what_the_reader_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 100)
    assert FrameReader().feed(as_frame(bytes(100))) == [bytes(100)]
    with pytest.raises(FrameError, match="too large"):
        as_frame(bytes(101))
