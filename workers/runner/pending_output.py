"""Outputs of launched steps, available at once or when the device has computed them, and the thread that waits for
them.

If a rank's main thread waited, it could not launch the next step meanwhile, and the device would be idle in between.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from oarlock.workers.adapters import AdapterReport, report_fields
from oarlock.workers.protocol import StepOutput


class PendingOutput(Protocol):
    """Output of a launched step that a device may still compute."""

    def wait(self) -> StepOutput | None:
        """Block until the step has been computed; return the output on rank 0, None on others. Called once."""


# A launched step: its output if it is finished; None on ranks that do not return outputs.
Launched = StepOutput | PendingOutput | None


def wait_for(launched: Launched) -> StepOutput | None:
    """Block until the step has been computed, and return its output."""
    return launched if launched is None or isinstance(launched, StepOutput) else launched.wait()


class _WithReports:
    """Output of a launched step, to which reports about adapters are added."""

    def __init__(self, launched: PendingOutput, reports: list[AdapterReport]) -> None:
        self._launched, self._reports = launched, reports

    def wait(self) -> StepOutput | None:
        output = self._launched.wait()
        return None if output is None else _add(self._reports, output)


def with_reports(launched: Launched, reports: list[AdapterReport]) -> Launched:
    """Return `launched` with reports about adapters in its output."""
    if launched is None or not reports:
        return launched
    return _add(reports, launched) if isinstance(launched, StepOutput) else _WithReports(launched, reports)


def _add(reports: list[AdapterReport], output: StepOutput) -> StepOutput:
    return replace(output, **report_fields(reports))


class AnsweringThread:
    """Thread that waits for outputs in the order of their steps, and sends each as soon as it is computed. Does not
    spin."""

    def __init__(
        self,
        send: Callable[[StepOutput], None],
        on_failure: Callable[[int, Exception], None],
        begin: Callable[[], object],
    ) -> None:
        """Start the thread.

        `on_failure` is called with the number of the step that failed and the error; nothing is sent afterwards.
        `begin`: called in the thread before it waits for a device.
        """
        self._send, self._on_failure, self._begin = send, on_failure, begin
        self._steps: queue.SimpleQueue[tuple[int, Launched] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def add(self, step_id: int, launched: Launched) -> None:
        self._steps.put((step_id, launched))

    def close(self, timeout_s: float = 1.0) -> None:
        """Wait for the steps that were added, unless the device hangs."""
        self._steps.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        self._begin()
        while (item := self._steps.get()) is not None:
            step_id, launched = item
            try:
                output = wait_for(launched)
                assert output is not None, "rank 0 answers every step"
                self._send(output)
            except Exception as error:
                self._on_failure(step_id, error)
                return
