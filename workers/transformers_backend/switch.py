"""A class's forward in two parts: hidden states of a step first, and logits of some of their rows later.

A class of transformers runs its base model and its output head in one forward. The base model is wrapped by a switch:
in the first part the head gets no rows, and in the second the base model does not run and the head gets the chosen
rows. So the class's own code makes the inputs of the base model and turns its result into logits, with every scale,
bias and softcap between them.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from oarlock.workers.transformers_backend.private_parts import PreTrainedModel

MEMORY_NAMES = ("past_key_values", "cache_params")  # names of the memory among a class's arguments


class Switch(nn.Module):
    """The base model inside of its class: it runs, or hands over rows of an earlier run for the output head."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.rows: Tensor | None = None  # [1, L, hidden] that the head reads; None: the base model runs
        self.hidden: Tensor | None = None  # [1, T, hidden] of the most recent run
        self.output: Callable[..., Any] | None = None  # class of the base model's result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base model and return its result without rows, or return a result with `rows`."""
        if self.rows is not None:
            assert self.output is not None, "the base model runs before the head"
            return self.output(last_hidden_state=self.rows)
        result = self.base(*args, **kwargs)
        self.hidden, self.output = result.last_hidden_state, type(result)
        return self.output(last_hidden_state=self.hidden[:, :0])

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the base model, which the class may read."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


def base_name(model: PreTrainedModel) -> str | None:
    """Return the name of the base model in `model`; None if it has none apart from its head.

    A class that was cut out of a multimodal one may have the prefix of that one: then its only submodel is taken.
    """
    named = getattr(model, model.base_model_prefix or " ", None)
    if isinstance(named, PreTrainedModel) and named is not model:
        return model.base_model_prefix
    found = [name for name, child in model.named_children() if isinstance(child, PreTrainedModel)]
    return found[0] if len(found) == 1 else None


class ClassSwitch:
    """A model of transformers whose forward runs in two parts."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Put a switch into `model` in place of its base model."""
        self._model = model
        name = base_name(model)
        assert name is not None, "the look before the start has found a base model"
        self._switch = Switch(getattr(model, name))
        setattr(model, name, self._switch)
        takes = inspect.signature(model.forward).parameters
        self._memory = next((name for name in MEMORY_NAMES if name in takes), None)

    def hidden_of(self, token_ids: Tensor, positions: Tensor, memory: Any) -> Tensor:
        """Return the hidden states [T, hidden] of a row with ids and positions int64 [T], with `memory` of earlier
        tokens."""
        switch = self._switch
        given = {} if self._memory is None else {self._memory: memory}
        self._model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **given)
        hidden, switch.hidden = switch.hidden, None
        assert hidden is not None, "the class runs its base model"
        return hidden[0]

    def logits_of(self, rows: Tensor) -> Tensor:
        """Return the logits of `rows` [L, hidden] in this rank's part of the vocabulary: [L, ids]."""
        switch = self._switch
        switch.rows = rows[None]
        try:
            return self._model(
                input_ids=torch.zeros((1, len(rows)), dtype=torch.int64, device=rows.device), use_cache=False
            ).logits[0]
        finally:
            switch.rows = None
