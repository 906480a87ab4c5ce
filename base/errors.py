"""The error of a start that fails, the exit codes, and the text of a wrong value in an error."""

from typing import Final

# Exit codes of the server and of its engine. Only the server uses 2, a wrong command line.
EXIT_OK: Final = 0
EXIT_BUG: Final = 1
EXIT_CONFIGURATION: Final = 3  # wrong configuration or model
EXIT_OUT_OF_MEMORY: Final = 4  # out of memory at start
EXIT_RANK_DIED: Final = 5  # a rank or the engine died
EXIT_RANK_HUNG: Final = 6  # a rank or the engine hung


def shown(value: object) -> str:
    """Return `value` in one line for an error, shortened if it is long."""
    if type(value) is int and abs(value) > 10**40:
        return "an integer of more than 40 digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:70]}… ({len(text)} characters)"


class StartupError(Exception):
    """The program cannot start as configured. One line of cause and one of fix are shown to the operator unchanged."""

    def __init__(self, cause: str, fix: str, exit_code: int = EXIT_CONFIGURATION) -> None:
        super().__init__(f"{cause} {fix}")
        self.cause = cause
        self.fix = fix
        self.exit_code = exit_code
