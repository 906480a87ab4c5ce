"""Which of several failures of ranks came first: what others raise because they have lost that rank is none."""

from collections.abc import Mapping
from typing import Any

from oarlock.workers.errors import WorkerError

_KINDS = ("raised", "ended", "failed")


class FirstCause:
    """Collects the messages of ranks, of which each one's first failure counts.

    `of_peer` in a message: it follows from the loss of another rank. `of_node`: the whole node of that rank is lost.
    """

    def __init__(self) -> None:
        self._failures: dict[tuple[int, bool], Mapping[str, Any]] = {}

    def add(self, rank: int, message: Mapping[str, Any]) -> bool:
        """Whether the message is a failure."""
        failed = message["kind"] in _KINDS
        if failed:
            self._failures.setdefault((rank, "of_node" in message), message)
        return failed

    @property
    def is_sure(self) -> bool:
        """Whether a rank has failed by itself; else what is known may follow from what is not known yet."""
        return any(not message.get("of_peer") for message in self._failures.values())

    def error(self, step_id: int) -> WorkerError | None:
        """`step_id`: of ranks that have not said in which step they failed. None without a failure."""
        for (rank, _), message in sorted(self._failures.items(), key=lambda failure: how_late(failure[1])):
            return WorkerError(rank, int(message.get("step_id", step_id)), message["cause"])
        return None


def how_late(message: Mapping[str, Any]) -> int:
    """The place of a failure in the order of causes: a rank's own, a lost node, what follows from a lost peer."""
    return 2 if message.get("of_peer") else 1 if "of_node" in message else 0
