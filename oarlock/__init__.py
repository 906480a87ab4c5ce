"""Oarlock's public interface: `oarlock.LLM` and what it takes and returns, `oarlock.__version__`, `python -m oarlock`.

Heavy parts are imported at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from oarlock.server.version import VERSION as __version__

if TYPE_CHECKING:
    from oarlock.base.errors import StartupError
    from oarlock.engine.errors import RequestError
    from oarlock.server.offline.inputs import LoRARequest, SamplingParams
    from oarlock.server.offline.llm import LLM
    from oarlock.server.offline.outputs import (
        CompletionOutput,
        EmbeddingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StartupError",
    "__version__",
]

_LAZY_IMPORTS = {
    "LLM": "oarlock.server.offline.llm",
    "CompletionOutput": "oarlock.server.offline.outputs",
    "RequestOutput": "oarlock.server.offline.outputs",
    "EmbeddingRequestOutput": "oarlock.server.offline.outputs",
    "ScoringRequestOutput": "oarlock.server.offline.outputs",
    "SamplingParams": "oarlock.server.offline.inputs",
    "LoRARequest": "oarlock.server.offline.inputs",
    "RequestError": "oarlock.engine.errors",
    "StartupError": "oarlock.base.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module 'oarlock' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY_IMPORTS[name]), name)
