"""Files of KV blocks: what is damaged, short, foreign or gone is not taken, and directories keep to their limit."""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from oarlock.base.errors import StartupError
from oarlock.workers.kv_offload import KVReport, KVReportKind, KVReports, KVReportSender
from oarlock.workers.kv_tiers import rank_offload
from oarlock.workers.kv_tiers.directory import (
    DEAD_S,
    HEADER_BYTES,
    BlockDirectory,
    DamagedFileError,
    check_directory,
    disk_limit,
    path_of,
    read_block,
    write_block,
)
from oarlock.workers.kv_tiers.rank_offload import FileThreads

SIZE = 4096


def digest_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def content_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


@pytest.fixture
def files(tmp_path: Path) -> BlockDirectory:
    return BlockDirectory(str(tmp_path), "model", 0, 1 << 30)


def write(files: BlockDirectory, number: int) -> Path:
    write_block(files.path, digest_of(number), content_of(number).data)
    return Path(path_of(files.path, digest_of(number)))


def read(files: BlockDirectory, number: int) -> np.ndarray:
    into = np.zeros(SIZE, np.uint8)
    read_block(files.path, digest_of(number), into.data)
    return into


def test_a_block_comes_back(files: BlockDirectory, tmp_path: Path) -> None:
    path = write(files, 1)
    assert np.array_equal(read(files, 1), content_of(1))
    assert path.stat().st_size == HEADER_BYTES + SIZE
    assert path.stat().st_mode & 0o777 == 0o600
    folders = [folder for folder in tmp_path.rglob("*") if folder.is_dir()]
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    assert list((files.path / "tmp").iterdir()) == []


def _cut(path: Path) -> None:
    os.truncate(path, HEADER_BYTES + 100)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def _foreign(path: Path) -> None:
    path.write_bytes(b"x" * (HEADER_BYTES + SIZE))


def _other_block(path: Path) -> None:
    files = BlockDirectory(str(path.parents[3]), "model", 0, 1 << 30)
    os.rename(write(files, 2), path)


@pytest.mark.parametrize("harm", [_cut, _empty, _flip, _foreign, _other_block])
def test_files_of_other_blocks_are_not_used(files: BlockDirectory, harm) -> None:
    harm(write(files, 1))
    with pytest.raises(DamagedFileError):
        read(files, 1)


def test_a_failed_write_leaves_nothing(files: BlockDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, parts) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space left"):
        write(files, 1)
    assert [path for path in files.path.rglob("*") if path.is_file()] == []


def test_changes_are_reported_once(files: BlockDirectory, tmp_path: Path) -> None:
    other = BlockDirectory(str(tmp_path), "model", 0, 1 << 30)  # another process with the same model
    write(other, 1)
    write(other, 300)
    foreign = files.path / "01" / "README.txt"
    foreign.write_text("not a block")
    assert files.changes() == ([digest_of(1), digest_of(300)], [])
    assert files.changes() == ([], [])
    other.remove(digest_of(1))
    write(other, 3)
    appeared, vanished = files.changes()
    assert (appeared, vanished) == ([digest_of(3)], [digest_of(1)])


def test_room_is_made_of_what_was_not_used_for_longest(tmp_path: Path) -> None:
    each = HEADER_BYTES + SIZE
    files = BlockDirectory(str(tmp_path), "model", 0, 10 * each)
    older = BlockDirectory(str(tmp_path), "another model", 0, 10 * each)
    users_own = tmp_path / "notes" / "a" / "b" / f"{'0' * 64}.kv"
    users_own.parent.mkdir(parents=True)
    users_own.write_bytes(b"x" * 20 * each)
    begun = time.time() - 1000
    for number in range(12):
        path = write(older if number < 2 else files, number)
        os.utime(path, (begun + number, begun + number))
    read(files, 2)  # used now
    assert files.make_room() == (9 * each, 9)
    paths = {number: path_of((older if number < 2 else files).path, digest_of(number)) for number in range(12)}
    left = {number for number, path in paths.items() if os.path.exists(path)}
    assert left == {2, *range(4, 12)}
    assert users_own.exists()
    assert files.make_room() == (9 * each, 9)


def test_unfinished_files_of_dead_processes_are_removed(files: BlockDirectory) -> None:
    dead, alive = files.path / "tmp" / "1-0", files.path / "tmp" / "2-0"
    for path in (dead, alive):
        path.write_bytes(b"half a block")
    os.utime(dead, (time.time() - DEAD_S - 10,) * 2)
    files.make_room()
    assert not dead.exists()
    assert alive.exists()


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    # /proc is there, and can only be read.
    for path in (file, tmp_path / "no" / "parent", Path("/proc/nothing"), Path("/proc")):
        with pytest.raises(StartupError, match=r"kv_offload_path .* cannot be used") as caught:
            check_directory(str(path))
        assert "--kv-offload-path" in caught.value.fix
    check_directory(str(tmp_path / "new"))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert disk_limit(str(tmp_path), 123) == 123
    assert disk_limit(str(tmp_path), None) > 0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Threads:
    """File threads of one rank with four slots, and what they report."""

    def __init__(self, files: BlockDirectory) -> None:
        read_fd, self._write_fd = os.pipe()
        self.reports = KVReports(read_fd)
        self.slots = np.zeros((4, SIZE), np.uint8)
        self.threads = FileThreads(files, self.slots, KVReportSender(self._write_fd, 3), num_ranks=1)
        self._received: SimpleQueue[KVReport] = SimpleQueue()

    def next(self, kind: KVReportKind) -> KVReport:
        """The next report of that kind; others are dropped."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for report in self.reports.receive():
                self._received.put(report)
            while not self._received.empty():
                report = self._received.get()
                if report.kind is kind:
                    return report
            time.sleep(0.001)
        raise AssertionError(f"no report {kind.name}")

    def close(self) -> None:
        self.threads.close()
        self.reports.close()
        os.close(self._write_fd)


@pytest.fixture
def threads(files: BlockDirectory) -> Iterator[Threads]:
    running = Threads(files)
    yield running
    running.close()


def test_threads_write_read_and_report(threads: Threads) -> None:
    threads.slots[1] = content_of(1)
    threads.threads.write([(1, digest_of(1))])
    assert threads.next(KVReportKind.WRITTEN) == KVReport(KVReportKind.WRITTEN, 3, results=[(1, True)])
    threads.threads.read([(0, digest_of(1)), (2, digest_of(2))])
    assert threads.next(KVReportKind.READ).results == [(0, True), (2, False)]
    assert np.array_equal(threads.slots[0], content_of(1))


def test_failures_are_logged_once_and_other_blocks_continue(
    files: BlockDirectory, threads: Threads, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        _flip(write(files, number))
    write(files, 3)
    threads.threads.read([(0, digest_of(1)), (1, digest_of(2)), (2, digest_of(3))])
    assert threads.next(KVReportKind.READ).results == [(0, False), (1, False), (2, True)]
    assert not os.path.exists(path_of(files.path, digest_of(1)))
    assert caplog.text.count("event=kv_offload_failed kind=damaged") == 1


def test_a_directory_that_vanishes(
    files: BlockDirectory, threads: Threads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folders in it are made again; where it is gone itself, blocks are not written."""
    os.rename(tmp_path / "oarlock-model", tmp_path / "elsewhere")
    threads.threads.write([(0, digest_of(1))])
    assert threads.next(KVReportKind.WRITTEN).results == [(0, True)]
    away = tmp_path.with_name("away")
    os.rename(tmp_path, away)
    try:
        threads.threads.keep()
        threads.threads.write([(0, digest_of(2)), (0, digest_of(3))])
        results = threads.next(KVReportKind.WRITTEN).results + threads.next(KVReportKind.WRITTEN).results
        threads.threads.read([(0, digest_of(1))])
        assert threads.next(KVReportKind.READ).results == [(0, False)]
    finally:
        os.rename(away, tmp_path)
    assert results == [(0, False), (0, False)]
    assert caplog.text.count("event=kv_offload_failed kind=unwritable") == 1


@pytest.mark.slow
def test_the_first_rank_tells_what_others_wrote_and_makes_room(
    files: BlockDirectory, threads: Threads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_offload, "_LOOK_S", 0.01)
    write(files, 1)
    threads.threads.keep()
    usage = threads.next(KVReportKind.USAGE)
    assert (usage.num_bytes, usage.num_blocks) == (HEADER_BYTES + SIZE, 1)
    assert threads.next(KVReportKind.APPEARED).digests == [digest_of(1)]
    write(BlockDirectory(str(tmp_path), "model", 0, 1 << 30), 2)
    assert threads.next(KVReportKind.APPEARED).digests == [digest_of(2)]
    beside = Threads(BlockDirectory(str(tmp_path), "model", 0, 1 << 30))  # another server of the same directory
    beside.threads.keep()
    assert sorted(beside.next(KVReportKind.APPEARED).digests) == sorted([digest_of(1), digest_of(2)])
    files.remove(digest_of(2))  # by hand
    for one in (threads, beside):
        assert one.next(KVReportKind.VANISHED).digests == [digest_of(2)]
    beside.close()


def test_the_directory_is_kept_by_a_process_that_is_started_again(
    files: BlockDirectory, threads: Threads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However it ends, and it ends with the rank: so no walk over many files holds up the rank's own threads."""
    monkeypatch.setattr(rank_offload, "_LOOK_S", 0.01)
    write(files, 1)
    threads.threads.keep()
    assert threads.next(KVReportKind.APPEARED).digests == [digest_of(1)]
    keeper = threads.threads._keeper
    assert keeper is not None and keeper._child is not None
    first = keeper._child
    assert first.pid != os.getpid()
    os.kill(first.pid, signal.SIGKILL)
    write(files, 2)
    while digest_of(2) not in threads.next(KVReportKind.APPEARED).digests:
        pass
    until(lambda: 'kind=keeper cause="ended with status -9"' in caplog.text)
    last = keeper._child
    threads.threads.close()
    assert last.poll() is not None and last is not first


def test_room_is_made_when_enough_was_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Long before the next look."""
    caplog.set_level(logging.INFO, "oarlock.kv_offload")
    running = Threads(BlockDirectory(str(tmp_path), "model", 0, 10 * (HEADER_BYTES + SIZE)))
    try:
        running.threads.keep()
        assert running.next(KVReportKind.USAGE).num_blocks == 0
        running.threads.write([(0, digest_of(number)) for number in range(11)])
        while (usage := running.next(KVReportKind.USAGE)).num_blocks != 9:
            assert usage.num_blocks <= 10
        until(lambda: "event=kv_offload_evicted" in caplog.text)
    finally:
        running.close()
    assert "limit=" in caplog.text and sum(file.suffix == ".kv" for file in tmp_path.rglob("*")) < 11


def test_many_reports_pass_the_pipe() -> None:
    read_fd, write_fd = os.pipe()
    reports, sender = KVReports(read_fd), KVReportSender(write_fd, 1)
    results = [(slot, slot % 3 == 0) for slot in range(2000)]
    digests = [digest_of(number) for number in range(500)]
    sender.results(KVReportKind.READ, results)
    sender.digests(KVReportKind.APPEARED, digests)
    sender.usage(1 << 40, 12345)
    received = reports.receive()
    assert [entry for report in received for entry in report.results] == results
    assert [digest for report in received for digest in report.digests] == digests
    assert (received[-1].num_bytes, received[-1].num_blocks) == (1 << 40, 12345)
    assert {report.rank for report in received} == {1}
    os.close(write_fd)
    assert reports.receive() == []
    reports.close()
