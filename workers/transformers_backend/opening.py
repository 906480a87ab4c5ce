"""A class of transformers and its config, opened from a checkpoint's directory."""

from pathlib import Path
from typing import Any

from oarlock.workers.transformers_backend.class_description import ClassDescription
from oarlock.workers.transformers_backend.inspection import model_class
from oarlock.workers.transformers_backend.private_parts import AutoConfig, PretrainedConfig, PreTrainedModel


def open_class(directory: Path, description: ClassDescription) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """Return the class that `description` names, and its config: the part of config.json that it takes."""
    config: Any = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if description.config_part is not None:
        config = getattr(config, description.config_part)
    return model_class(description.architecture), config
