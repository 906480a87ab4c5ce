"""Panics of libraries in Rust, and the exceptions that may end a task.

PyO3 raises a panic as `PanicException`, which is not an `Exception`. It passes every `except Exception`, and would end
the loop or the thread that called the library for one request.
"""

from asyncio import CancelledError
from collections.abc import Generator
from contextlib import contextmanager

# Exceptions that end a task or the process. All others fail one request, even if they are not an `Exception`.
ENDS_TASK = (CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)


class LibraryPanicError(ValueError):
    """A library panicked at the data of one request or file."""


def panic_error(error: BaseException) -> LibraryPanicError:
    """Return the error to raise in place of the panic `error`. Raises `error` again if it is not a panic."""
    if isinstance(error, (Exception, *ENDS_TASK)):
        raise error
    return LibraryPanicError(f"the grammar library failed: {' '.join(str(error).split())[:200]}")


@contextmanager
def panics_as_errors() -> Generator[None]:
    """Raise `LibraryPanicError` for a panic inside the block."""
    try:
        yield
    except BaseException as error:
        raise panic_error(error) from error
