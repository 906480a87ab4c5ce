"""What can be known of a model while its weights are still elsewhere: the server asks before it downloads them.

Torch-free. The engine checks the same again when it starts, with the weights at hand.
"""

from engine.config import EngineConfig
from workers.preflight import check_without_weights, weight_files

__all__ = ["check_model", "weight_files"]


def check_model(config: EngineConfig) -> None:
    """Whether the `config.json` in its `model_path` describes a model that can be served like this: `StartupError`."""
    check_without_weights(config.worker)
