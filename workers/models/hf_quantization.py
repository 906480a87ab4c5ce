"""Quantization of a model directory, read from its settings, and the formats of its weights. Torch-free."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oarlock.base.errors import StartupError, shown
from oarlock.base.json_files import is_there, read_json
from oarlock.workers.layers.decoder_spec import FUSED_MODULES
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.model_files.gguf_model import GGUFCheckpoint
from oarlock.workers.quantization.formats.checkpoint_formats import CheckpointFormats, GGUFFormats
from oarlock.workers.quantization.formats.weight_format import USE_ANOTHER, QuantizationSettings, Scheme, WeightFormats
from oarlock.workers.quantization.registry import QUANTIZATIONS, STORED

GGUF = "gguf"  # method of GGUF models, whose settings do not name it
# Keys of config.json that hold the settings, and the method of settings that do not name it.
_KEYS = {"quantization_config": None, "compression_config": "compressed-tensors"}
# Older quantised checkpoints have their settings only in a separate file: its name -> the method.
QUANTISATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """Quantization of a checkpoint, as its settings describe it."""

    method: str  # a key of `quantization.registry.STORED`
    scheme: Scheme


def stored_quantization(directory: Path, hf_config: dict[str, Any]) -> StoredQuantization | None:
    """Read a model's quantization; return None if it has none. Raise `StartupError` if the quantization is not
    supported.

    Some multimodal models have the settings in `text_config`.
    """
    text = hf_config.get("text_config")
    for config in (hf_config, text if isinstance(text, dict) else {}):
        for key, usual in _KEYS.items():
            settings = config.get(key)
            if settings is not None:
                return _parsed(settings, key, usual)
    for name, usual in QUANTISATION_FILES.items():
        path = directory / name
        if is_there(path):
            return _parsed(read_json(path), name, usual)
    return None


def _parsed(settings: object, where: str, usual: str | None) -> StoredQuantization:
    if isinstance(settings, dict) and "load_in_4bit" in settings:
        usual = usual or "bitsandbytes"  # the first checkpoints of bitsandbytes do not name it
    method = settings.get("quant_method", usual) if isinstance(settings, dict) else None
    if not isinstance(settings, dict) or not isinstance(method, str) or method not in STORED:
        raise StartupError(
            f"the checkpoint is quantised ({shown(method or 'unknown')} in {where}), which is not supported.",
            f"Supported: {', '.join(STORED)}. {USE_ANOTHER}",
        )
    return StoredQuantization(method, STORED[method](QuantizationSettings(settings, where)))


def weight_formats(
    quantization: str, stored: StoredQuantization | None, checkpoint: Checkpoint | None
) -> WeightFormats:
    """Return the formats of a model's weights. `quantization`: resolved by preflight; `checkpoint`: None for dummy
    weights."""
    if quantization == GGUF:
        assert isinstance(checkpoint, GGUFCheckpoint)
        return GGUFFormats(checkpoint, FUSED_MODULES)
    if stored is None:
        return QUANTIZATIONS[quantization]
    assert checkpoint is not None, "preflight refuses dummy weights of a quantised checkpoint"
    return CheckpointFormats(stored.scheme, checkpoint, FUSED_MODULES)
