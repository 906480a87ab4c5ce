"""Joins the progress of several replicas that start side by side: the one furthest behind is shown."""

from functools import partial

from oarlock.engine.config import OnProgress


class JoinedProgress:
    """Passes on the phase and share of the replica that is furthest behind, whenever those change."""

    def __init__(self, num_replicas: int, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._phases: list[str] = []  # in the order in which they were first seen
        self._places: list[tuple[int, float, str]] = [(-1, 0.0, "")] * num_replicas  # place of the phase, share, detail
        self._shown: tuple[int, float, str] | None = None

    def of(self, number: int) -> OnProgress:
        """Callback to which replica `number` reports its progress."""
        return partial(self._report, number)

    def _report(self, number: int, phase: str, fraction: float, detail: str = "") -> None:
        if phase not in self._phases:
            self._phases.append(phase)
        self._places[number] = self._phases.index(phase), fraction, detail
        last = min(self._places)
        if last[0] >= 0 and last != self._shown:
            self._shown = last
            self._on_progress(self._phases[last[0]], *last[1:])
