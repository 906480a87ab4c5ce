"""Reads the settings of GGUF files, and the `config.json` that they mean, for code above the workers.

Torch-free.
"""

from oarlock.workers.models.gguf_config import hf_config
from oarlock.workers.weights.gguf_model import GGUFModel, Settings, parts_of

__all__ = ["GGUFModel", "Settings", "hf_config", "parts_of"]
