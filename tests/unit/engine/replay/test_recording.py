"""A recording is readable however it ended, and recording never harms serving."""

import asyncio
import contextlib
import json
import os
import resource
import stat
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from oarlock.base.errors import StartupError
from oarlock.engine.client import EngineClient
from oarlock.engine.core.engine_core import EngineCore
from oarlock.engine.errors import EngineDeadError
from oarlock.engine.replay import recording
from oarlock.engine.replay.__main__ import _end_reason, _steps
from oarlock.engine.replay.recording import (
    _END_BYTES,
    HEADER,
    OUTPUT,
    STEP,
    Header,
    Recording,
    RecordingExecutor,
    RecordingWriter,
    end_of_killed,
)
from oarlock.engine.types import Grammar
from oarlock.workers.errors import WorkerError
from oarlock.workers.protocol import pack_step, unpack_output, unpack_step
from tests.unit.engine.engine_fakes import FakeExecutor, Faults, make_config, make_info, make_request
from tests.unit.engine.sampling_fakes import CountingGrammar

HEADER_FIELDS = Header(worker={}, info={}, model={}, versions={"oarlock": "1.2.3"}, layout="x", started="now")


def write(path: Path, contents: list[bytes], end: str | None = "done") -> bytes:
    writer = RecordingWriter(str(path))
    writer.write_header(HEADER_FIELDS)
    for number, content in enumerate(contents):
        writer.write(OUTPUT if number % 2 else STEP, content)
    if end is not None:
        writer.end(end)
    writer.close()
    assert writer.size == path.stat().st_size
    return path.read_bytes()


def test_written_files_are_read_back(tmp_path: Path) -> None:
    contents = [b"one", b"", b"\xff" * 100_000, b"four"]
    write(tmp_path / "r", contents)
    recording = Recording(str(tmp_path / "r"))
    assert recording.header == HEADER_FIELDS
    records = list(recording.records())
    assert [bytes(record.content) for record in records] == contents
    assert [record.kind for record in records] == [STEP, OUTPUT, STEP, OUTPUT]
    assert (recording.torn, recording.end) == (None, "done")
    assert stat.S_IMODE((tmp_path / "r").stat().st_mode) == 0o600  # it holds what users wrote


@pytest.mark.slow
def test_a_file_torn_at_any_byte_gives_its_whole_records(tmp_path: Path) -> None:
    contents = [b"first", b"second!", b"third"]
    whole = write(tmp_path / "whole", contents, end=None)
    ends = [len(whole)]
    for content in reversed(contents):
        ends.insert(0, ends[0] - len(content) - 13)
    end_of_header = whole.index(b" " * _END_BYTES) - 13
    for length in range(len(whole) + 1):
        path = tmp_path / "torn"
        path.write_bytes(whole[:length])
        if length < end_of_header:
            with pytest.raises(StartupError) as caught:
                Recording(str(path))
            assert caught.value.exit_code == 3
            continue
        recording = Recording(str(path))
        found = [bytes(record.content) for record in recording.records()]
        assert found == contents[: sum(end <= length for end in ends[1:])]
        assert (recording.torn is None) == (length in (end_of_header, *ends))
        assert recording.end is None


def test_a_damaged_record_ends_the_reading(tmp_path: Path) -> None:
    whole = bytearray(write(tmp_path / "r", [b"first", b"second", b"third"]))
    whole[whole.index(b"second") + 2] ^= 1
    (tmp_path / "r").write_bytes(whole)
    recording = Recording(str(tmp_path / "r"))
    assert [bytes(record.content) for record in recording.records()] == [b"first"]
    assert recording.torn is not None and "checksum" in recording.torn


def test_a_length_beyond_the_file_asks_for_no_memory(tmp_path: Path) -> None:
    whole = write(tmp_path / "r", [], end=None)
    (tmp_path / "r").write_bytes(whole + STEP + (1 << 60).to_bytes(8, "little") + bytes(4))
    recording = Recording(str(tmp_path / "r"))
    assert list(recording.records()) == []
    assert recording.torn is not None and "incomplete" in recording.torn


@pytest.mark.parametrize(
    ("content", "cause"),
    [(b"", "not a recording"), (b"hello, world, this is text", "not a recording"), (None, "cannot be read")],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes | None, cause: str) -> None:
    if content is not None:
        (tmp_path / "r").write_bytes(content)
    with pytest.raises(StartupError, match=cause) as caught:
        Recording(str(tmp_path / "r"))
    assert caught.value.fix


@pytest.mark.parametrize(
    ("header", "cause"),
    [
        (asdict(HEADER_FIELDS) | {"format": 99}, "format 99"),
        (asdict(HEADER_FIELDS) | {"surprise": 1}, "cannot be read"),
        ([1, 2], "cannot be read"),
    ],
)
def test_another_version_is_named(tmp_path: Path, header: object, cause: str) -> None:
    writer = RecordingWriter(str(tmp_path / "r"))
    writer.write(HEADER, json.dumps(header).encode())
    writer.close()
    with pytest.raises(StartupError, match=cause):
        Recording(str(tmp_path / "r"))


def test_a_recording_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(b"evidence")
    with pytest.raises(StartupError, match="already exists") as caught:
        RecordingWriter(str(tmp_path / "r"))
    assert "--record" in caught.value.fix and (tmp_path / "r").read_bytes() == b"evidence"
    with pytest.raises(StartupError, match="cannot be created"):
        RecordingWriter(str(tmp_path / "no" / "such" / "folder"))


class Scene:
    """The fake ranks behind a recorder, and a scheduler to feed them."""

    def __init__(self, path: Path, limit: int | None = None, faults: Faults | None = None) -> None:
        config = make_config()
        config = replace(config, worker=config.worker.with_(model_path=str(path.parent)))
        self.fake = FakeExecutor(config, make_info(config), faults)
        self.executor = RecordingExecutor(self.fake, RecordingWriter(str(path)), limit)
        self.engine_core = EngineCore(config, self.executor, lambda: 0.0)

    def serve(self, first: int = 1, count: int = 3) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {}
        for number in range(first, first + count):
            self.engine_core.scheduler.add(make_request(number, [5, 6, number], logprobs=1), 0.0)
        while self.engine_core.begin() is not None:
            for event in self.engine_core.finish():
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
        return tokens


def test_every_step_and_answer_is_in_the_file(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "r")
    served = scene.serve()
    scene.executor.ping()
    scene.executor.close()
    assert scene.fake.is_closed and scene.fake.num_pings == 1
    recording = Recording(str(tmp_path / "r"))
    records = list(recording.records())
    assert len(records) == 2 * scene.fake.num_steps > 0
    assert recording.end == "the server stopped normally" and recording.torn is None
    replayed = []
    fresh = FakeExecutor(make_config(), scene.fake.info)  # computes from the recorded steps, and checks them
    for step, answer in zip(records[::2], records[1::2], strict=True):
        fresh.submit(unpack_step(step.content))
        expected, got = unpack_output(answer.content), fresh.collect()
        assert (expected.token_ids == got.token_ids).all() and (expected.logprobs == got.logprobs).all()
        replayed += expected.token_ids.tolist()
    assert sorted(replayed) == sorted(token for tokens in served.values() for token in tokens)


def test_recording_takes_the_memory_of_the_steps_there_are(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "small")
    scene.fake.config = scene.fake.config.with_(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=131_072)
    tracemalloc.start()
    executor = RecordingExecutor(scene.fake, RecordingWriter(str(tmp_path / "r")), None)
    scene.engine_core.executor = executor
    scene.engine_core.scheduler.add(make_request(1, [5] * 60, logprobs=1, max_tokens=2), 0.0)
    while scene.engine_core.begin() is not None:
        scene.engine_core.finish()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(list(Recording(str(tmp_path / "r")).records())) == 2 * scene.fake.num_steps
    assert peak < 4 << 20


def test_a_step_larger_than_any_before_is_recorded_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_FIRST_BUFFER_BYTES", 1)
    scene = Scene(tmp_path / "r")
    served = scene.serve(count=1) | scene.serve(first=2, count=9)
    scene.executor.close()
    answers = list(Recording(str(tmp_path / "r")).records())[1::2]
    recorded = [token for answer in answers for token in unpack_output(answer.content).token_ids.tolist()]
    assert sorted(recorded) == sorted(token for tokens in served.values() for token in tokens)


def test_the_step_that_kills_a_rank_is_in_the_file(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "r", faults=Faults(die_at_step=2))
    with pytest.raises(WorkerError):
        scene.serve()
    records = list(Recording(str(tmp_path / "r")).records())  # nothing was closed: as after kill -9
    assert [record.kind for record in records] == [STEP, OUTPUT, STEP]
    assert unpack_step(records[-1].content).step_id == 2


def test_at_its_limit_recording_stops_and_serving_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unlimited = Scene(tmp_path / "all")
    everything = unlimited.serve(count=20)
    unlimited.executor.close()
    size = (tmp_path / "all").stat().st_size
    scene = Scene(tmp_path / "r", limit=size // 2)
    assert scene.serve(count=20) == everything
    scene.executor.close()
    assert (tmp_path / "r").stat().st_size <= size // 2 + 100  # and the end record
    recording = Recording(str(tmp_path / "r"))
    assert 0 < len(list(recording.records())) < 2 * scene.fake.num_steps
    assert recording.end is not None and "limit" in recording.end
    assert [line for line in caplog.messages if "recording_stopped" in line and "limit" in line]


def test_a_full_disk_stops_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(tmp_path / "r")
    first = scene.serve(1)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    assert scene.serve(10) and first
    scene.executor.close()
    assert sum("No space left" in line for line in caplog.messages) == 1
    monkeypatch.undo()
    assert list(Recording(str(tmp_path / "r")).records())


@pytest.mark.parametrize(
    ("scenario", "ending"),
    [
        ({}, "the server stopped normally"),
        ({"die_at_step": 3}, "rank 1"),
        ({"killed_at_step": 3}, "the engine process was ended by SIGKILL"),
    ],
)
@pytest.mark.slow
def test_a_recording_says_how_its_engine_ended(tmp_path: Path, scenario: dict, ending: str) -> None:
    async def scene() -> None:
        path, config = str(tmp_path / "r"), make_config(record_path=str(tmp_path / "r"))
        config = replace(config, worker=config.worker.with_(model_path=json.dumps(scenario)))
        client = await EngineClient.start(
            config, lambda *_: None, command=[str(Path(__file__).parents[1] / "fake_engine.py")]
        )
        with contextlib.suppress(EngineDeadError):
            async for _ in client.generate(make_request(1, [1, 2], max_tokens=6)):
                pass
        if scenario:
            await client.dead.wait()
        recording = Recording(path)
        assert recording.is_being_written != bool(scenario)
        await client.close()
        kinds = [record.kind for record in recording.records()]
        assert kinds == ([STEP, OUTPUT, STEP, OUTPUT, STEP] if scenario else [STEP, OUTPUT] * 6), "also the last step"
        assert recording.torn is None and ending in (recording.end or ""), recording.end

    asyncio.run(asyncio.wait_for(scene(), 100))


def test_a_file_that_cannot_grow_is_reported_and_holds_whole_records(tmp_path: Path) -> None:
    """The system itself refuses, after a part of a record: as on a full disk."""
    scene = Scene(tmp_path / "r")
    scene.serve(count=2)
    whole = list(Recording(str(tmp_path / "r")).records())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "r").stat().st_size + 50, before[1]))
    try:
        assert scene.serve(first=9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    scene.executor.end("the server stopped normally")  # later, and not what ended the recording
    scene.executor.close()
    recording = Recording(str(tmp_path / "r"))
    assert [bytes(record.content) for record in recording.records()] == [bytes(record.content) for record in whole]
    assert recording.torn is None
    assert recording.end == "the file could not be written (File too large); serving continued"
    assert _end_reason(recording) == recording.end


def test_a_recording_without_an_end_is_of_a_server_that_runs_or_was_killed(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "r")
    scene.serve()
    recording = Recording(str(tmp_path / "r"))
    assert "still recording" in _end_reason(recording)
    assert scene.executor._writer is not None
    scene.executor._writer.close()  # by the kernel
    assert "was killed with its engine" in _end_reason(recording)
    end_of_killed(str(tmp_path / "r"), "ended by SIGKILL " + "ä" * 999)
    end_of_killed(str(tmp_path / "r"), "something else")
    assert len(list(recording.records())) == 2 * scene.fake.num_steps and recording.torn is None
    assert recording.end is not None and recording.end.startswith("ended by SIGKILL ä")
    end_of_killed(str(tmp_path / "moved away"), "x")


def test_an_end_that_was_half_written_costs_no_step(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "r")
    scene.serve()
    scene.executor.close()
    data = (tmp_path / "r").read_bytes()
    (tmp_path / "r").write_bytes(data.replace(b"normally", b"norm    "))
    recording = Recording(str(tmp_path / "r"))
    assert len(list(recording.records())) == 2 * scene.fake.num_steps
    assert recording.end is None and recording.torn is None


def test_a_write_that_took_a_part_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, parts: real(fd, [b"".join(parts)[:7]]))
    monkeypatch.setattr(os, "write", lambda fd, rest, write=os.write: write(fd, bytes(rest)[:5]))
    write(tmp_path / "r", [b"a long enough step", b"its answer"])
    assert len(list(Recording(str(tmp_path / "r")).records())) == 2


def test_a_start_that_fails_leaves_no_file(tmp_path: Path) -> None:
    writer = RecordingWriter(str(tmp_path / "r"))
    writer.discard()
    assert not (tmp_path / "r").exists()


def test_masks_that_come_late_are_in_the_file(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "r")
    served = []
    state = CountingGrammar(grammar := Grammar("lark", "9"))
    scene.engine_core.scheduler.add(make_request(1, [5, 6], grammar=grammar, max_tokens=9), 0.0, state)
    while scene.engine_core.begin() is not None:
        served += [token for event in scene.engine_core.finish() for token in event.token_ids]
    scene.executor.close()
    steps = list(_steps(Recording(str(tmp_path / "r"))))
    fresh = FakeExecutor(make_config(), scene.fake.info)
    for (step, _), token in zip(steps, served, strict=True):
        fresh.submit(step)
        assert fresh.collect().token_ids.tolist() == [token]
    again, expected = CountingGrammar(grammar), np.empty_like(steps[0][0].mask_bits)
    for (step, answer), token in zip(steps, served, strict=True):
        assert answer is not None and answer.token_ids.tolist() == [token]
        again.fill_masks((), expected)
        np.testing.assert_array_equal(step.mask_bits, expected)
        again.accept([token])


def test_a_step_packs_to_the_same_bytes_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "r")
    scene.serve(count=2)
    scene.executor.close()
    content = next(Recording(str(tmp_path / "r")).records()).content
    again = memoryview(bytearray(len(content)))
    assert pack_step(unpack_step(content), again) == len(content)
    assert unpack_step(again).token_ids.tolist() == unpack_step(content).token_ids.tolist()
