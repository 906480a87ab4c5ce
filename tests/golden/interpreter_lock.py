"""Triton's interpreter for ranks that are threads: it parses a kernel at its first launch, and swaps functions of
`triton.language` while one runs. Neither may happen in two threads at once; CPython 3.11's parser fails when it does.
"""

import threading
from typing import Any

import pytest


def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one thread at a time parse or run a kernel, until `monkeypatch` undoes it."""
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction

    lock = threading.RLock()  # a kernel that runs parses the functions that it calls
    launch, rewrite = GridExecutor.__call__, InterpretedFunction.rewrite

    def launch_alone(executor: GridExecutor, *arguments: Any, **options: Any) -> None:
        with lock:
            launch(executor, *arguments, **options)

    def rewrite_alone(function: InterpretedFunction) -> Any:
        with lock:
            return rewrite(function)

    monkeypatch.setattr(GridExecutor, "__call__", launch_alone)
    monkeypatch.setattr(InterpretedFunction, "rewrite", rewrite_alone)
