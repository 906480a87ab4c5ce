"""A class of transformers and its config, opened by its name or from a checkpoint's directory."""

from pathlib import Path
from typing import Any, NamedTuple

import transformers

from oarlock.workers.transformers_backend.class_description import ClassDescription
from oarlock.workers.transformers_backend.observers import Refused
from oarlock.workers.transformers_backend.private_parts import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
    get_class_from_dynamic_module,
)
from oarlock.workers.transformers_backend.tested import tested_classes
from oarlock.workers.transformers_backend.text_parts import wrapper_without_weights

_REMOTE = "AutoModelForCausalLM"  # key of `auto_map` for a class that completes text


class OpenClass(NamedTuple):
    """A class and the config that it takes."""

    architecture: str  # name in config.json
    kind: type[PreTrainedModel]
    config: PretrainedConfig
    config_part: str | None = None  # part of config.json that is `config`; None: all of it
    is_remote: bool = False  # the class is code of the checkpoint
    # The multimodal class whose checkpoint it is, and its config, if the class is only its text part.
    wrapper: tuple[type[PreTrainedModel], PretrainedConfig] | None = None

    def wrapper_without_weights(self) -> PreTrainedModel | None:
        """Return the multimodal model on the meta device, for the names of its tensors; None if there is none."""
        if self.wrapper is None:
            return None
        return wrapper_without_weights(*self.wrapper)


def open_class(directory: Path, description: ClassDescription) -> OpenClass:
    """Return the class that `description` names."""
    return open_directory(directory, trusts_code=description.is_remote)


def open_directory(directory: Path, *, trusts_code: bool) -> OpenClass:
    """Return the class of the checkpoint in `directory`. Raise `Refused` if there is none that completes text.

    `trusts_code`: the checkpoint's own code may run, and is preferred as in transformers.
    """
    try:
        config: Any = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trusts_code)
    except (ValueError, KeyError, OSError, ImportError, TypeError, AttributeError) as error:
        line = " ".join(str(error).split())[:160]
        raise Refused(f"transformers cannot read its config.json ({type(error).__name__}: {line})") from error
    name = (config.architectures or [""])[0]
    reference = (getattr(config, "auto_map", None) or {}).get(_REMOTE)
    if not trusts_code or not isinstance(reference, str):
        return open_named(name, config)
    try:
        kind: Any = get_class_from_dynamic_module(reference, directory, local_files_only=True)
    except Exception as error:  # the file is code of the checkpoint, which may raise anything
        line = " ".join(str(error).split())[:160]
        raise Refused(f"its own code cannot be loaded ({type(error).__name__}: {line})") from error
    return OpenClass(name, kind, config, is_remote=True)


def open_named(architecture: str, config: PretrainedConfig) -> OpenClass:
    """Return transformers' class `architecture` with the part of `config` that it takes.

    Of a multimodal class, it is the class of its text part. Raise `Refused` if none completes text.
    """
    text = getattr(config, "text_config", None)
    wrapper = _any_class(architecture)
    if isinstance(text, PretrainedConfig) and wrapper is not None and isinstance(config, wrapper.config_class or ()):
        of_text = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
        if of_text is None:
            raise Refused("its text part is no class that completes text")
        tested = tested_classes().get(of_text)
        if tested is not None and tested.refused is not None:  # its own tiny model may lack the setting that is wrong
            raise Refused(f"its text part is {of_text}: {tested.refused}")
        return OpenClass(architecture, model_class(of_text), text, "text_config", wrapper=(wrapper, config))
    kind = model_class(architecture)
    part, found = _part_for(kind, config)
    return OpenClass(architecture, kind, found, part)


def model_class(architecture: str) -> type[PreTrainedModel]:
    """Return transformers' class of this name. Raise `Refused` if it is none that completes text."""
    kind = _any_class(architecture)
    listed = architecture in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if kind is None or not (listed or architecture.endswith("ForCausalLM")):  # the list lacks a few
        raise Refused("transformers has no such class that completes text")
    return kind


def _any_class(architecture: str) -> type[PreTrainedModel] | None:
    """Return transformers' class of this name, whatever it is for; None if there is none."""
    kind = getattr(transformers, architecture, None)
    return kind if isinstance(kind, type) and issubclass(kind, PreTrainedModel) else None


def _part_for(kind: type[PreTrainedModel], config: PretrainedConfig) -> tuple[str | None, PretrainedConfig]:
    """Return the part of `config` that `kind` takes, with its name: all of it (None), or its text part."""
    expected = kind.config_class
    if expected is None or isinstance(config, expected):
        return None, config
    for name in type(config).sub_configs:
        if isinstance(part := getattr(config, name, None), expected):
            return name, part
    raise Refused(f"its config has no {expected.__name__}")
