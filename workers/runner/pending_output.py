"""Outputs of steps that were launched: there at once, or when the device has computed them, and what waits for those.

A rank that waited itself could not launch the next step meanwhile, and the device would stand still in between.
"""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from oarlock.workers.protocol import StepOutput


class PendingOutput(Protocol):
    """Output of a launched step that a device may still compute."""

    def wait(self) -> StepOutput | None:
        """Blocks until the step has been computed. The output on rank 0, None on others. Called once."""


# A launched step: its output where it is over, which is None on ranks that do not answer.
Launched = StepOutput | PendingOutput | None


def wait_for(launched: Launched) -> StepOutput | None:
    """Blocks until the step has been computed, and returns its output."""
    return launched if launched is None or isinstance(launched, StepOutput) else launched.wait()


class AnsweringThread:
    """Waits for outputs in the order of their steps, and sends each as soon as it is there. It does not spin."""

    def __init__(
        self,
        send: Callable[[StepOutput], None],
        on_failure: Callable[[int, Exception], None],
        begin: Callable[[], object],
    ) -> None:
        """`on_failure` gets the number of the step that failed and why; nothing is sent afterwards. `begin`: what the
        thread does before it waits for a device."""
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
