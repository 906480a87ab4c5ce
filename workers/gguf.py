"""Reads the settings of GGUF files, and the `config.json` that they mean, for code above the workers.

Torch-free.
"""

from oarlock.workers.models.gguf_config import hf_config
from oarlock.workers.weights.gguf.model import GGUFModel, parts_of
from oarlock.workers.weights.gguf.settings import Settings

__all__ = ["GGUFModel", "Settings", "hf_config", "parts_of"]
