"""Oarlock's public interface: `oarlock.LLM`, `oarlock.SamplingParams`, `oarlock.__version__`, `python -m oarlock`.

Heavy parts are imported at first use.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from server.version import VERSION as __version__

if TYPE_CHECKING:
    from engine.sampling_params import SamplingParams
    from server.llm.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from server.llm.llm import LLM

        return LLM
    if name == "SamplingParams":
        from engine.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'oarlock' has no attribute {name!r}")


if __name__ == "__main__":
    from server.entrypoints.cli import main

    sys.exit(main())
