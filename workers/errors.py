"""Errors of starting and running ranks, and the exit codes that follow. Torch-free: engine and server use them."""

from typing import Final

# Exit codes of the server and of its engine. 2, a wrong command line, is the server's alone.
EXIT_OK: Final = 0
EXIT_BUG: Final = 1
EXIT_CONFIGURATION: Final = 3  # of the configuration, or of the model
EXIT_OUT_OF_MEMORY: Final = 4  # at start
EXIT_RANK_DIED: Final = 5  # or the engine
EXIT_RANK_HUNG: Final = 6  # or the engine


def shown(value: object) -> str:
    """`value` in one line of an error, whatever its size."""
    if type(value) is int and abs(value) > 10**40:
        return "an integer of more than 40 digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:70]}… ({len(text)} characters)"


class StartupError(Exception):
    """The ranks cannot start as configured: one line of cause and one of fix, shown to the operator as they are."""

    def __init__(self, cause: str, fix: str, exit_code: int = EXIT_CONFIGURATION) -> None:
        super().__init__(f"{cause} {fix}")
        self.cause = cause
        self.fix = fix
        self.exit_code = exit_code


class WorkerError(Exception):
    """A rank ended, hung or raised after start, and no further step is possible. `rank` and `step_id` name where.

    `hung` is true when the rank did not answer in time.
    """

    def __init__(self, rank: int, step_id: int, cause: str, *, hung: bool = False) -> None:
        super().__init__(f"rank {rank} failed at step {step_id}: {cause}")
        self.rank = rank
        self.step_id = step_id
        self.cause = cause
        self.hung = hung

    @property
    def exit_code(self) -> int:
        return EXIT_RANK_HUNG if self.hung else EXIT_RANK_DIED
