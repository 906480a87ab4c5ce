"""Which of several failures of ranks came first: what others raise because they have lost that rank is none."""

from collections.abc import Mapping
from typing import Any

from oarlock.workers.errors import WorkerError

_KINDS = ("raised", "ended", "failed")


class FirstCause:
    """Collects the messages of ranks, of which each one's first failure counts."""

    def __init__(self) -> None:
        self._failures: dict[int, Mapping[str, Any]] = {}

    def add(self, rank: int, message: Mapping[str, Any]) -> bool:
        """Whether the message is a failure."""
        failed = message["kind"] in _KINDS
        if failed:
            self._failures.setdefault(rank, message)
        return failed

    @property
    def is_sure(self) -> bool:
        """Whether a rank has failed by itself; else what is known may follow from what is not known yet."""
        return any(not message.get("of_peer") for message in self._failures.values())

    def error(self, step_id: int) -> WorkerError | None:
        """`step_id`: of ranks that have not said in which step they failed. None without a failure."""
        for rank, message in sorted(self._failures.items(), key=lambda failure: bool(failure[1].get("of_peer"))):
            return WorkerError(rank, int(message.get("step_id", step_id)), message["cause"])
        return None
