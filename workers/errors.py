"""The error of a rank after its start. Torch-free: the engine uses it."""

from oarlock.base.errors import EXIT_RANK_DIED, EXIT_RANK_HUNG


class WorkerError(Exception):
    """A rank ended, hung or raised an error after start, and no further step is possible. `rank` and `step_id` locate
    the failure.

    `hung` is true if the rank did not return a result in time.
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
