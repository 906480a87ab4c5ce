"""Triton's interpreter for ranks that are threads: it swaps functions of `triton.language` while a kernel runs."""

import threading
from typing import Any

import pytest


def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a launch waits for the one of another thread, until `monkeypatch` undoes it."""
    from triton.runtime.interpreter import GridExecutor

    lock, launch = threading.Lock(), GridExecutor.__call__

    def alone(executor: GridExecutor, *arguments: Any, **options: Any) -> None:
        with lock:
            launch(executor, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", alone)
