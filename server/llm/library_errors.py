"""Errors of libraries in Rust, whose panics reach Python as a `BaseException` that `except Exception` lets pass."""


def is_library_error(error: BaseException) -> bool:
    """Return whether `error` is an ordinary exception, or a panic of a library in Rust."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
