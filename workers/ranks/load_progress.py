"""The progress of ranks while they load, from their messages, and which rank is stuck when none makes progress."""

from collections.abc import Sequence

from oarlock.workers.config import WorkerInfo
from oarlock.workers.distributed.shm_layout import last_of
from oarlock.workers.errors import StartupError

HUNG = 6  # exit code

# Phases in the order in which every rank goes through them. A rank's message has one as its kind or as its name.
PHASES = ("starting", "joining", "loading", "loaded", "allocating", "timing", "ready")
_DOING = {
    "starting": "importing its libraries",
    "joining": "waiting for the other ranks to join",
    "loading": "reading the weights",
    "loaded": "waiting for the other ranks",
    "allocating": "allocating KV memory and trying the model out",
    "timing": "timing a few steps",
    "ready": "waiting for the other ranks",
}


class LoadProgress:
    """The state of all ranks, updated by `handle`."""

    def __init__(self, size: int) -> None:
        self._phases = ["starting"] * size
        self._fractions = [0.0] * size
        self._blocks: dict[int, int] = {}
        self.infos: dict[int, WorkerInfo] = {}

    def handle(self, rank: int, message: dict) -> None:
        """Handles a message of a loading rank. Raises `StartupError` when the rank has failed or ended."""
        kind = message["kind"]
        if kind == "failed":
            raise StartupError(message["cause"], message["fix"], int(message["exit_code"]))
        if kind == "ended":
            raise StartupError(
                f"rank {rank} ended while loading ({message['cause']}).",
                "If it was killed, the machine ran out of memory: use a smaller model or more ranks.",
                4,
            )
        if kind == "phase":
            self._phases[rank] = message["name"]
        elif kind == "progress":
            self._fractions[rank] = float(message["fraction"])
        elif kind == "loaded":
            self._phases[rank] = kind
            self._blocks[rank] = int(message["num_blocks"])
        elif kind == "ready":
            self._phases[rank] = kind
            self.infos[rank] = WorkerInfo.from_json(message["info"])

    @property
    def fraction(self) -> float:
        """The share of its weights that the slowest rank has read, 0 to 1."""
        return min(self._fractions)

    @property
    def num_blocks(self) -> int | None:
        """The smallest number of KV blocks that any rank has memory for; None until all have reported theirs."""
        return min(self._blocks.values()) if len(self._blocks) == len(self._phases) else None

    @property
    def is_done(self) -> bool:
        return len(self.infos) == len(self._phases)

    def no_progress_error(self, collectives: Sequence[int], timeout_s: float) -> StartupError:
        """The error after `timeout_s` without a message. `collectives`: the latest one that each rank has reached."""
        phases = [PHASES.index(phase) for phase in self._phases]
        last = last_of(phases, collectives)
        rank = phases.index(min(phases)) if last is None else last
        phase = self._phases[rank]
        share = f" ({self._fractions[rank]:.0%} read)" if phase == "loading" else ""
        others = "" if last is not None else "; other ranks are as far"
        return StartupError(
            f"rank {rank} has made no progress for {timeout_s:g} s while {_DOING[phase]}{share}{others}.",
            "If the model or Python's packages lie on a network file system, see whether it answers; then start again.",
            HUNG,
        )
