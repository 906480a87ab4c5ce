"""Ranks of classes that transformers' code computes, as threads of this process.

Transformers changes torch's default dtype while it builds a class, for all threads: so ranks load one after the other.
"""

import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest

from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.transformers_backend import choice
from oarlock.workers.transformers_backend.class_description import ClassDescription
from oarlock.workers.transformers_backend.inspection import look
from oarlock.workers.transformers_backend.observers import register


class ClassRunner(ModelRunner):
    """A rank that loads alone."""

    _loading = threading.Lock()

    def load(self, on_progress: Callable[[float], None]) -> None:
        """Load while no other rank of this process does."""
        with self._loading:
            super().load(on_progress)


def look_in_this_process(patch: pytest.MonkeyPatch) -> None:
    """Let preflight look at classes without a child process, which takes seconds to import transformers."""
    patch.setattr(choice, "class_description", _looked_at)


@lru_cache(maxsize=64)
def _looked_at(directory: Path, ranks: int, *, trusts_code: bool = False) -> ClassDescription:
    register()
    description, fault = look(directory, ranks, trusts_code=trusts_code)
    assert fault is None, fault
    return description
