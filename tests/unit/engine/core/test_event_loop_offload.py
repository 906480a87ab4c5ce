"""The engine's loop waits for files as it waits for anything else: asleep, and awake when ranks report."""

import os
import socket
import threading
from random import Random

import pytest

from oarlock.base.errors import EXIT_OK
from oarlock.engine.config import EngineConfig
from oarlock.engine.core import event_loop
from oarlock.engine.core.event_loop import EngineLoop
from oarlock.engine.ipc.frames import FrameReader, FrameSocket
from oarlock.engine.ipc.messages import Events, Stop, Submit, encode, read_from_engine
from oarlock.engine.kv_cache.block_events import extend_hashes
from oarlock.engine.types import Request, SamplingParams, TokenEvent
from oarlock.workers.kv_offload import Copy, KVOffloadInfo, KVReportKind, KVReports, KVReportSender
from tests.unit.engine.kv_cache.chained_ranks import ChainedRanks, Files
from tests.unit.engine.kv_cache.test_kv_offload import CONFIG, FAST, files_of, info_of, prompt_of, texts_without


class PipedRanks(ChainedRanks):
    """Ranks whose files are read when `answer` is called, which tells the engine through a pipe."""

    def __init__(self, files: Files, read_fd: int, write_fd: int) -> None:
        super().__init__(CONFIG, info_of(KVOffloadInfo(60, 64, FAST), 20), Random(1), files=files)
        self._reports, self.sender = KVReports(read_fd), KVReportSender(write_fd, 0)
        self.is_asked = threading.Event()

    @property
    def kv_reports(self) -> KVReports:
        return self._reports

    def submit(self, step, *, masks_follow: bool = False) -> None:
        super().submit(step, masks_follow=masks_follow)
        if any(kind is Copy.READ for kind, *_ in self._pending):
            self.is_asked.set()

    def answer(self) -> None:
        pending, self._pending = self._pending, []
        for report in [self._end(*job) for job in pending]:
            self.sender.results(report.kind, report.results)


def received(reader: FrameReader, ours: socket.socket) -> list[TokenEvent]:
    messages = map(read_from_engine, reader.feed(ours.recv(1 << 16)))
    return [event for message in messages if isinstance(message, Events) for event in message.read()]


def test_the_loop_sleeps_until_files_are_read() -> None:
    files = files_of(prompt_of(1))
    request = Request(4, prompt_of(1), SamplingParams(max_tokens=3))
    pipe = os.pipe()
    ranks = PipedRanks(files, *pipe)
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    loop = EngineLoop(EngineConfig(CONFIG, heartbeat_interval_s=3600), ranks, FrameSocket(theirs))
    ranks.sender.digests(KVReportKind.APPEARED, list(files))
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(loop.run()))
    thread.start()
    ours.sendall(encode(Submit.of(request)))
    assert ranks.is_asked.wait(60)
    ranks.answer()
    reader, events = FrameReader(), list[TokenEvent]()
    while not any(event.finish_reason is not None for event in events):
        events += received(reader, ours)
    loop.stop()
    ours.close()
    thread.join(60)
    assert ended == [EXIT_OK]
    assert [token for event in events for token in event.token_ids] == texts_without([request])[4]
    assert max(event.num_cached_tokens for event in events) == 40
    ranks.kv_reports.close()
    os.close(pipe[1])


class WritingRanks(PipedRanks):
    """Ranks whose disk answers at once, or never."""

    def __init__(self, files: Files, read_fd: int, write_fd: int, *, answers: bool) -> None:
        super().__init__(files, read_fd, write_fd)
        self._answers = answers

    def submit(self, step, *, masks_follow: bool = False) -> None:
        super().submit(step, masks_follow=masks_follow)
        if self._answers:
            self.answer()


@pytest.mark.parametrize("answers", [True, False], ids=["a disk", "a disk that does not answer"])
def test_a_loop_that_is_stopped_writes_cached_blocks(monkeypatch: pytest.MonkeyPatch, *, answers: bool) -> None:
    if not answers:
        monkeypatch.setattr(event_loop, "FLUSH_S", 0.2)
    files, pipe = Files(), os.pipe()
    ranks = WritingRanks(files, *pipe, answers=answers)
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    loop = EngineLoop(EngineConfig(CONFIG, heartbeat_interval_s=3600), ranks, FrameSocket(theirs))
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(loop.run()))
    thread.start()
    for number in (1, 2):  # the second is not answered when the loop is told to stop
        assert not files
        ours.sendall(encode(Submit.of(Request(number, prompt_of(number), SamplingParams(max_tokens=3)))))
        reader, events = FrameReader(), list[TokenEvent]()
        while number == 1 and not any(event.finish_reason is not None for event in events):
            events += received(reader, ours)
    ours.sendall(encode(Stop()))
    thread.join(60)
    assert ended == [EXIT_OK]
    extend_hashes(hashes := list[bytes](), prompt_of(1), b"", CONFIG.block_size, 10)
    assert files.keys() >= set(hashes) if answers else not files
    ours.close()
    ranks.kv_reports.close()
    os.close(pipe[1])
