"""Starts the processes of engines and ranks before anything else: they import their libraries, which takes seconds."""

from __future__ import annotations

from oarlock.engine.engine_process import EngineProcess
from oarlock.server.config.settings import Settings


def engine_processes(settings: Settings) -> list[EngineProcess]:
    """One for each replica, with the ranks of this host. Of the kernels for CPUs they share one compilation."""
    compiles = None if settings.device == "cuda" else (settings.model, settings.dtype)
    num_ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size // settings.nnodes
    return [
        EngineProcess(num_ranks, compiles=None if number else compiles) for number in range(settings.data_parallel_size)
    ]
