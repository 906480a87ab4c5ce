"""Errors of starting and running ranks. Torch-free, so that the engine and the server can import them."""


class StartupError(Exception):
    """The ranks cannot start as configured: one line of cause and one of fix, shown to the operator as they are.

    `exit_code` follows the documented table: 3 bad configuration or model, 4 out of memory at start.
    """

    def __init__(self, cause: str, fix: str, exit_code: int = 3) -> None:
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
