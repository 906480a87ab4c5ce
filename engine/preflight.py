"""Checks of a model without its weights, which the server makes before it downloads them.

Torch-free. The engine checks the same again when it starts.
"""

from engine.config import EngineConfig
from workers.preflight import DESCRIPTIONS, check_without_weights, weight_files

__all__ = ["DESCRIPTIONS", "check_model", "weight_files"]


def check_model(config: EngineConfig) -> None:
    """Raise `StartupError` unless the `DESCRIPTIONS` in `model_path` are of a model that `config` can serve."""
    check_without_weights(config.worker)
