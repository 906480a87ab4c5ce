"""Commands for LoRA adapters: their bytes, the votes of several ranks, and the digest of a directory."""

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from oarlock.workers.adapter_digest import adapter_digest, adapter_files
from oarlock.workers.adapters import (
    MAX_REASON_BYTES,
    STALLED,
    AdapterCommand,
    AdapterControl,
    AdapterReport,
    CommandKind,
    command_fields,
    read_commands,
    read_reports,
    report_fields,
)

A, B, C, D = (bytes([number] * 16).hex() for number in (1, 2, 3, 4))


def test_commands_and_reports_survive_the_trip() -> None:
    commands = [
        AdapterCommand(CommandKind.PREPARE, A, name="größe", directory="/a b/\udcff"),
        AdapterCommand(CommandKind.PUT, B, 3),
        AdapterCommand(CommandKind.PREPARE, C, name="", directory="/c"),
        AdapterCommand(CommandKind.DROP, A),
        AdapterCommand(CommandKind.REPORT),
    ]
    assert read_commands(*command_fields(commands).values()) == commands
    reports = [
        AdapterReport(A, None),
        AdapterReport(B, "bad file"),
        AdapterReport(C, None),
        AdapterReport(A, "é" * 2000),
    ]
    read = read_reports(*report_fields(reports).values())
    assert read[:3] == reports[:3]
    assert read[3].failure == "é" * (MAX_REASON_BYTES // 2)
    assert not read_commands(*command_fields([]).values()) and not read_reports(*report_fields([]).values())


class Adapters:
    """Adapters of one rank, whose preparations end when a test lets them."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.ended: dict[str, str | None] = {}

    def prepare(self, digest: str, directory: str) -> None:
        self.calls.append(("prepare", digest, directory))

    def put(self, digest: str, slot: int) -> None:
        self.calls.append(("put", digest, slot))

    def drop(self, digest: str) -> None:
        self.calls.append(("drop", digest))

    def ready(self) -> Mapping[str, str | None]:
        ended, self.ended = self.ended, {}
        return ended


class Ballot:
    """Votes of ranks in threads, as `Votes` counts them."""

    def __init__(self, size: int) -> None:
        self._barrier, self._votes = threading.Barrier(size), [False] * size

    def of(self, rank: int) -> Callable[[bool], bool]:
        def all_agree(vote: bool) -> bool:
            self._votes[rank] = vote
            self._barrier.wait(10)
            result = all(self._votes)
            self._barrier.wait(10)
            return result

        return all_agree


def together(controls: list[AdapterControl], *commands: AdapterCommand) -> list[list[AdapterReport]]:
    """Run the same commands on all ranks, each in its thread."""
    found: list[list[AdapterReport]] = [[] for _ in controls]

    def run(rank: int) -> None:
        found[rank] = controls[rank].run(commands)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(controls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "ranks cast different votes"
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_an_adapter_is_reported_once_all_ranks_have_it(size: int) -> None:
    ballot, ranks = Ballot(size), [Adapters() for _ in range(size)]
    controls = [AdapterControl(rank, ballot.of(number)) for number, rank in enumerate(ranks)]
    report = AdapterCommand(CommandKind.REPORT)
    prepare = [AdapterCommand(CommandKind.PREPARE, digest, directory=f"/{digest}") for digest in (A, B, C, D)]
    together(controls, *prepare)
    for number, rank in enumerate(ranks):
        rank.ended = {B: None} | dict.fromkeys((C, D), None)
        if number == size - 1:
            rank.ended |= {C: "no memory", D: STALLED}
    expected = [AdapterReport(B, None), AdapterReport(C, "no memory"), AdapterReport(D, STALLED)]
    first = together(controls, report)
    assert first[-1] == expected and [one.digest for one in first[0]] == [B, C, D]
    assert first[0][1].failure is not None, "a rank reports an adapter that another lacks"
    assert first[0][2] == expected[2], "ranks report different reasons for the disk of one"
    ranks[0].ended = {A: None}
    late = together(controls, report)
    assert late[0] == ([AdapterReport(A, None)] if size == 1 else [])
    for rank in ranks[1:]:
        rank.ended = {A: None}
    assert together(controls, report, AdapterCommand(CommandKind.PUT, A, 2))[0] == (
        [] if size == 1 else [AdapterReport(A, None)]
    )
    assert all({("put", A, 2), ("drop", C), ("drop", D)} <= {*rank.calls} for rank in ranks)


def test_a_preparation_that_was_dropped_is_not_reported() -> None:
    rank = Adapters()
    control, prepare = AdapterControl(rank), AdapterCommand(CommandKind.PREPARE, A, directory="/a")
    control.run([prepare, AdapterCommand(CommandKind.DROP, A)])
    rank.ended = {A: None}
    assert control.run([AdapterCommand(CommandKind.REPORT)]) == []
    assert control.run([prepare, AdapterCommand(CommandKind.REPORT)]) == []
    rank.ended = {A: None}
    assert control.run([AdapterCommand(CommandKind.REPORT)]) == [AdapterReport(A, None)]


def test_the_digest_is_of_settings_and_weights(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("other files do not count")
    with pytest.raises(FileNotFoundError):
        adapter_digest(tmp_path)
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    config.write_bytes(b"{}")
    with pytest.raises(FileNotFoundError):
        adapter_digest(tmp_path)
    weights.write_bytes(np.arange(1000).tobytes())
    digests = [adapter_digest(tmp_path)]
    config.write_bytes(b"{ }")
    digests.append(adapter_digest(tmp_path))
    weights.write_bytes(np.arange(1, 1001).tobytes())
    digests.append(adapter_digest(tmp_path))
    config.write_bytes(b"{} ")
    (tmp_path / "README.md").unlink()
    digests.append(adapter_digest(tmp_path))
    assert len(set(digests)) == 4 and all(len(bytes.fromhex(one)) == 16 for one in digests)
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(OSError, match="not a regular file"):
        adapter_digest(tmp_path)
    weights.unlink()
    weights.touch()
    os.truncate(weights, 1 << 40)  # of holes; reading them takes half an hour
    with pytest.raises(OSError, match=r"safetensors has 1099511627776 bytes, more than any adapter"):
        adapter_digest(tmp_path)


@pytest.mark.parametrize(
    ("there", "files"),
    [
        (("adapter_config.json", "a.gguf"), ("adapter_config.json", "adapter_model.safetensors")),
        (("adapter_model.safetensors", "a.gguf"), ("a.gguf",)),
        (("lost -> adapter_config.json", "a.gguf"), ("adapter_config.json", "adapter_model.safetensors")),
        (("adapter_model.safetensors",), "neither adapter_config.json nor a GGUF file"),
        (("a.gguf", "b.gguf"), "several GGUF files"),
    ],
)
def test_the_files_of_a_directory(tmp_path: Path, there: tuple[str, ...], files: tuple[str, ...] | str) -> None:
    for name in there:
        target, _, link = name.partition(" -> ")
        (tmp_path / link).symlink_to(tmp_path / target) if link else (tmp_path / name).touch()
    if isinstance(files, str):
        with pytest.raises(FileNotFoundError, match=f"the directory has {files}"):
            adapter_files(tmp_path)
    else:
        assert adapter_files(tmp_path).paths == tuple(tmp_path / name for name in files)


def test_the_digest_of_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert adapter_digest(tmp_path) == adapter_digest(tmp_path / "a.gguf")
