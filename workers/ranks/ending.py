"""How a group of nodes ended, as every node reads it in the store."""

import json
from dataclasses import asdict, dataclass

from oarlock.workers.errors import EXIT_BUG, EXIT_OK, StartupError, WorkerError


@dataclass(frozen=True, slots=True)
class Ending:
    """`exit_code` is that of every node. A `fix` comes with a start that failed."""

    exit_code: int
    cause: str = ""
    fix: str = ""

    @staticmethod
    def of(failure: Exception | None) -> "Ending":
        if failure is None:
            return Ending(EXIT_OK)
        if isinstance(failure, StartupError):
            return Ending(failure.exit_code, failure.cause, failure.fix)
        if isinstance(failure, WorkerError):
            return Ending(failure.exit_code, str(failure))
        return Ending(EXIT_BUG, str(failure) or type(failure).__name__)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(payload: bytes) -> "Ending":
        return Ending(**json.loads(payload))
