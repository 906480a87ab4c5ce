"""What can go wrong below the engine. Torch-free, so that the engine and the server can name these classes."""


class StartupError(Exception):
    """The group cannot start as configured: one line of cause, one line of fix, shown to the operator as they are.

    `exit_code` follows the documented table: 3 bad configuration or model, 4 out of memory at start.
    """

    def __init__(self, cause: str, fix: str, exit_code: int = 3) -> None:
        super().__init__(f"{cause} {fix}")
        self.cause = cause
        self.fix = fix
        self.exit_code = exit_code


class WorkerError(Exception):
    """A rank died, hung or raised after start. The group cannot go on: `rank` and `step_id` say where it stopped.

    `hung` is true when the rank stopped answering rather than failing by itself.
    """

    def __init__(self, rank: int, step_id: int, cause: str, *, hung: bool = False) -> None:
        super().__init__(f"rank {rank} failed at step {step_id}: {cause}")
        self.rank = rank
        self.step_id = step_id
        self.cause = cause
        self.hung = hung
