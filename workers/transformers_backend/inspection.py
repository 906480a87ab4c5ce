"""One look at a model class before weights load: it is built without weights and runs once, under observation.

    python -m oarlock.workers.transformers_backend.inspection DIRECTORY

writes the `ClassDescription` of the checkpoint in DIRECTORY as JSON. Importing transformers and torch takes seconds and
a few hundred MiB, so this runs in a process of its own (see `class_facts.py`).
"""

import inspect
import sys
from pathlib import Path

import torch
import transformers

from oarlock.workers.transformers_backend.building import class_tensors, without_weights
from oarlock.workers.transformers_backend.class_description import ClassDescription
from oarlock.workers.transformers_backend.experts import experts_of
from oarlock.workers.transformers_backend.observers import (
    IMPLEMENTATION,
    ObservedMemory,
    Observer,
    Refused,
    register,
)
from oarlock.workers.transformers_backend.private_parts import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
)

_TOKENS = 12  # of the row that runs
_MEMORY_NAMES = ("past_key_values", "cache_params")  # names of the memory among a class's arguments


def describe_class(config: PretrainedConfig) -> ClassDescription:
    """Return the description of the class that `config` names first, or one with a refusal."""
    names = config.architectures or [""]
    try:
        return _describe(names[0], config)
    except Refused as refusal:
        return ClassDescription(names[0], config.model_type, str(refusal))


def model_class(architecture: str) -> type[PreTrainedModel]:
    """Return transformers' class of this name. Raise `Refused` if it is none that completes text."""
    if architecture not in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        raise Refused("transformers has no such class that completes text")
    return getattr(transformers, architecture)


def _describe(architecture: str, config: PretrainedConfig) -> ClassDescription:
    kind = model_class(architecture)
    text = _text_config(kind, config)
    try:
        model = without_weights(kind, text, IMPLEMENTATION, torch.bfloat16)
    except (ValueError, KeyError) as error:  # transformers' own check of implementations
        raise Refused(f"its attention cannot be replaced ({_line(error)})") from error
    observer = _observe(model)
    if not observer.attention and not observer.states:
        raise Refused("it computes attention by itself")
    limit = getattr(text, "max_position_embeddings", None)
    return ClassDescription(
        architecture,
        text.model_type,
        layers=1 + max(call.layer for call in (*observer.attention, *observer.states)),
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        longest_length=limit if isinstance(limit, int) else 0,
        is_tied=bool(text.tie_word_embeddings),
        has_plan=bool(model._tp_plan),
        attention=tuple(observer.attention),
        states=tuple(observer.states),
        experts=tuple(experts_of(model).values()),
        tensors=tuple(class_tensors(model)),
    )


def _text_config(kind: type[PreTrainedModel], config: PretrainedConfig) -> PretrainedConfig:
    """Return the part of `config` that `kind` takes: all of it, or its text part."""
    expected = kind.config_class
    if expected is None or isinstance(config, expected):
        return config
    parts = (getattr(config, name, None) for name in type(config).sub_configs)
    found = next((part for part in parts if isinstance(part, expected)), None)
    if found is None:
        raise Refused(f"its config has no {expected.__name__}")
    return found


def _observe(model: PreTrainedModel) -> Observer:
    """Run `model` once for a row of one sequence, and return what it asked for."""
    takes = inspect.signature(model.forward).parameters
    if "position_ids" not in takes:
        raise Refused("it counts positions by itself")
    positions = torch.arange(_TOKENS, device="meta")[None]
    arguments = {"position_ids": positions, "use_cache": False}
    memory = next((name for name in _MEMORY_NAMES if name in takes), None)
    if memory is not None:
        arguments[memory] = ObservedMemory()
    try:
        with torch.inference_mode(), Observer(model) as observer:
            model(input_ids=torch.zeros_like(positions), **arguments)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise Refused(f"it does not run without values ({_line(error)})") from error
    return observer


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def main() -> None:
    """Write the description of the checkpoint in the directory that is the only argument."""
    register()
    config = AutoConfig.from_pretrained(Path(sys.argv[1]), local_files_only=True, trust_remote_code=False)
    sys.stdout.write(describe_class(config).encoded())


if __name__ == "__main__":
    main()
