"""LoRA adapters between the engine and its ranks: commands in steps, results in outputs, the interface of a rank.

An adapter is known by its *digest*, of its settings and weights. Ranks keep adapters in host memory, and have *slots*
in the memory of their device, numbered from 1; slot 0 means no adapter. Only the engine decides on the content of
both. A step may have commands, which every rank runs in their order before the rest of the step, even if the step is
refused. Loading takes longer than a step, so ranks prepare an adapter in the background, and the engine asks with
REPORT until all of them have it. Torch-free.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np

from oarlock.workers.adapter_digest import ADAPTER_DIGEST_BYTES
from oarlock.workers.config import WorkerConfig

NO_SLOT = 0
MAX_LOADING = 4  # adapters that ranks prepare at the same time
MAX_NAME_BYTES = 256
MAX_DIRECTORY_BYTES = 4096
MAX_REASON_BYTES = 1024  # the rest of a longer reason is cut off
# The reason of a preparation that read nothing for `watched_reads.STALL_S`. The disk may respond later.
STALLED = "stalled"
MAX_TEXT_BYTES = MAX_NAME_BYTES + 1 + MAX_DIRECTORY_BYTES


class CommandKind(IntEnum):
    """Operation of a rank on an adapter."""

    PREPARE = 0  # begin to read its directory into host memory
    PUT = 1  # copy it from host memory to a slot, in place of the adapter there
    DROP = 2  # forget it: empty its slot, free its host memory, stop preparing it
    REPORT = 3  # return the preparations that have ended on all ranks with the output of this step


class AdapterCommand(NamedTuple):
    """One command of a step."""

    kind: CommandKind
    digest: str = "00" * ADAPTER_DIGEST_BYTES  # hexadecimal; REPORT has none
    slot: int = NO_SLOT  # only of PUT
    name: str = ""  # only of PREPARE, for logs and replays
    directory: str = ""  # only of PREPARE


class AdapterReport(NamedTuple):
    """The end of one preparation, on all ranks."""

    digest: str
    failure: str | None  # the reason, or `STALLED`; None: every rank has it


class AdapterError(Exception):
    """A slot cannot get an adapter, because its preparation has failed or was never asked for."""


class RankAdapters(Protocol):
    """Adapters of one rank: the part that reads files and holds memory. Every rank gets the same calls in the same
    order, from one thread."""

    def prepare(self, digest: str, directory: str) -> None:
        """Begin to read the adapter in `directory` into host memory, and return at once. Never raises.

        Fails, as `ready` reports, if its content has another digest, since the file may have changed, or if it does not
        fit the model. A failed preparation leaves nothing behind, except for a thread that a disk still blocks.
        """

    def put(self, digest: str, slot: int) -> None:
        """Copy a prepared adapter to `slot`, 1 to `max_loras`, in place of its content, before this step computes. The
        slot that the adapter may have had before is empty then.

        Waits for the end of its preparation, which in a replay may take longer than in the recorded run. Raises
        `AdapterError` if that has failed.
        """

    def drop(self, digest: str) -> None:
        """Empty the slot of an adapter, free its host memory, and cancel its preparation, which is then not reported.
        Never raises; an unknown digest is ignored."""

    def ready(self) -> Mapping[str, str | None]:
        """Return the preparations that have ended since the last call: digest -> reason of the failure, or None.

        A preparation whose files could not be read for long ends with the reason `STALLED`, even if its thread is still
        blocked.
        """


class AdapterControl:
    """Control of one rank's adapters by the commands of steps."""

    def __init__(self, adapters: RankAdapters, all_agree: Callable[[bool], bool] = bool) -> None:
        """`all_agree`: votes of all ranks (`Votes.all_agree`). All of them vote alike, since they get the same
        commands."""
        self._adapters = adapters
        self._all_agree = all_agree
        self._preparing: dict[str, None] = {}  # ordered by their commands; the same on all ranks
        self._results: dict[str, str | None] = {}  # preparations that have ended here, and perhaps not elsewhere

    def run(self, commands: Iterable[AdapterCommand]) -> list[AdapterReport]:
        """Run the commands of a step in their order, and return the reports for its output. Raises `AdapterError`."""
        reports: list[AdapterReport] = []
        for kind, digest, slot, _, directory in commands:
            if kind is CommandKind.PREPARE:
                self._preparing[digest] = None
                self._adapters.prepare(digest, directory)
            elif kind is CommandKind.PUT:
                self._adapters.put(digest, slot)
            elif kind is CommandKind.DROP:
                self._preparing.pop(digest, None)
                self._results.pop(digest, None)
                self._adapters.drop(digest)
            else:
                reports += self._ended()
        return reports

    def _ended(self) -> list[AdapterReport]:
        """Return the preparations that have ended on all ranks since the last report."""
        ended = self._adapters.ready()
        self._results |= {digest: failure for digest, failure in ended.items() if digest in self._preparing}
        reports = []
        for digest in list(self._preparing):
            if not self._all_agree(digest in self._results):
                continue
            failure = self._results.pop(digest)
            del self._preparing[digest]
            if not self._all_agree(failure is None):
                self._adapters.drop(digest)  # some ranks have it
                if not self._all_agree(failure != STALLED):  # so that all ranks report the same
                    failure = STALLED
                failure = failure or "another rank could not load it: see its log"
            reports.append(AdapterReport(digest, failure))
        return reports


# -- arrays of a step and of its output


def max_commands(config: WorkerConfig) -> int:
    """Return the most commands of a step: each adapter in host memory leaves at most once, and another takes its place;
    each slot is filled at most once; one command asks for reports."""
    return 2 * config.num_host_adapters + config.max_loras + 1 if config.max_loras else 0


def command_fields(commands: list[AdapterCommand]) -> dict[str, np.ndarray]:
    """Return the fields of `StepMetadata` for `commands`."""
    texts = [_text_of(command) for command in commands]
    numbers = [(command.kind, command.slot, len(text)) for command, text in zip(commands, texts, strict=True)]
    return {
        "adapter_commands": np.array(numbers, np.int32).reshape(-1, 3),
        "adapter_digests": _digests(command.digest for command in commands),
        "adapter_texts": np.frombuffer(b"".join(texts), np.uint8),
    }


def read_commands(numbers: np.ndarray, digests: np.ndarray, texts: np.ndarray) -> list[AdapterCommand]:
    """Return the commands of a step from its fields, as `command_fields` returns them."""
    commands, data, start = [], texts.tobytes(), 0
    for (kind, slot, length), digest in zip(numbers.tolist(), digests, strict=True):
        name, _, directory = data[start : start + length].partition(b"\0")
        start += length
        names = name.decode(errors="replace"), os.fsdecode(directory)
        commands.append(AdapterCommand(CommandKind(kind), digest.tobytes().hex(), slot, *names))
    return commands


def report_fields(reports: list[AdapterReport]) -> dict[str, np.ndarray]:
    """Return the fields of `StepOutput` for `reports`."""
    reasons = [b"" if report.failure is None else _cut(report.failure or "unknown") for report in reports]
    return {
        "adapter_digests": _digests(report.digest for report in reports),
        "adapter_failures": np.array([len(reason) for reason in reasons], np.int32),
        "adapter_reasons": np.frombuffer(b"".join(reasons), np.uint8),
    }


def read_reports(digests: np.ndarray, failures: np.ndarray, reasons: np.ndarray) -> list[AdapterReport]:
    """Return the reports of an output from its fields, as `report_fields` returns them."""
    reports, data, start = [], reasons.tobytes(), 0
    for digest, length in zip(digests, failures.tolist(), strict=True):
        reason = data[start : start + length].decode(errors="replace") if length else None
        reports.append(AdapterReport(digest.tobytes().hex(), reason))
        start += length
    return reports


def _text_of(command: AdapterCommand) -> bytes:
    if command.kind is not CommandKind.PREPARE:
        return b""
    return command.name.encode() + b"\0" + os.fsencode(command.directory)


def _cut(reason: str) -> bytes:
    return reason.encode(errors="replace")[:MAX_REASON_BYTES]


def _digests(digests: Iterable[str]) -> np.ndarray:
    """Return uint8 [U, 16]."""
    return np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(-1, ADAPTER_DIGEST_BYTES)
