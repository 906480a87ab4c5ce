"""Oarlock's public interface: `oarlock.LLM` and what it takes and returns, `oarlock.__version__`, `python -m oarlock`.

Heavy parts are imported at first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from server.version import VERSION as __version__

if TYPE_CHECKING:
    from engine.errors import RequestError, StartupError
    from server.entrypoints.offline.llm import LLM
    from server.entrypoints.offline.outputs import CompletionOutput, RequestOutput
    from server.entrypoints.offline.pooling import EmbeddingRequestOutput, ScoringRequestOutput
    from server.entrypoints.offline.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StartupError",
    "__version__",
]

_HOMES = {
    "LLM": "server.entrypoints.offline.llm",
    "CompletionOutput": "server.entrypoints.offline.outputs",
    "RequestOutput": "server.entrypoints.offline.outputs",
    "EmbeddingRequestOutput": "server.entrypoints.offline.pooling",
    "ScoringRequestOutput": "server.entrypoints.offline.pooling",
    "SamplingParams": "server.entrypoints.offline.sampling_params",
    "RequestError": "engine.errors",
    "StartupError": "engine.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'oarlock' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


if __name__ == "__main__":
    from server.entrypoints.cli import main

    sys.exit(main())
