"""The text part of a multimodal class: its place in the class, and the class built only for names of tensors."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from oarlock.base.errors import StartupError
from oarlock.workers.transformers_backend.private_parts import AutoModel, PretrainedConfig, PreTrainedModel


def names_inside(model: PreTrainedModel, wrapper: PreTrainedModel) -> tuple[str, dict[str, str]]:
    """Return the beginning of the text part's names in `wrapper`, and the name there of each tensor of `model`.

    The wrapper holds either a whole `model` or its base model, and then a head of the same name.
    """
    modules = list(wrapper.named_modules())
    known, own = wrapper.state_dict(), list(model.state_dict())
    places = {type(module): name for name, module in reversed(modules) if name}  # the first module of each class
    if type(model) in places:
        whole = places[type(model)]
        return f"{whole}.", {one: f"{whole}.{one}" for one in own}
    parts = [(name, part) for name, part in model.named_children() if isinstance(part, PreTrainedModel)]
    child, base = next(((name, places[type(part)]) for name, part in parts if type(part) in places), ("", ""))
    if not base:
        raise StartupError(
            f"{type(wrapper).__name__} has no part that is the base of {type(model).__name__}.",
            "Serve a text model, or another multimodal model.",
        )
    prefix, steps, found = f"{child}.", base.split("."), {}
    for one in own:
        around = [".".join([*steps[:length], one]) for length in range(len(steps), -1, -1)]
        head = next((name for name in around if name in known), one)
        found[one] = f"{base}.{one.removeprefix(prefix)}" if one.startswith(prefix) else head
    for one, other in model.all_tied_weights_keys.items():
        if found.get(one) not in known and other in found:
            found[one] = found[other]  # the wrapper has no head of its own
    return f"{base}.", found


def wrapper_without_weights(kind: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Return the multimodal class `kind` on the meta device, to be asked for the names of its tensors.

    If its towers for images need a library that is not installed, it is built without towers, whose tensors are not
    read anyway.
    """
    with torch.device("meta"):
        try:
            return kind._from_config(config).eval()
        except ImportError:
            with _without_towers(kind, config):
                return kind._from_config(config).eval()


@contextmanager
def _without_towers(kind: type[PreTrainedModel], config: PretrainedConfig) -> Generator[None]:
    """Make the code of `kind` build nothing but its text part by the config alone."""
    text = config.get_text_config()
    module: Any = sys.modules[kind.__module__]

    class OnlyText:
        @staticmethod
        def from_config(config: PretrainedConfig, **arguments: Any) -> nn.Module:
            is_text = config.model_type == text.model_type
            return AutoModel.from_config(config, **arguments) if is_text else nn.Identity()

    its_own = module.AutoModel
    module.AutoModel = OnlyText
    try:
        yield
    finally:
        module.AutoModel = its_own
