"""GGUF files for the server: their settings, and the `config.json` that they mean. Torch-free."""

from workers.gguf import GGUFModel, Settings, hf_config, parts_of

__all__ = ["GGUFModel", "Settings", "hf_config", "parts_of"]
