"""The judge of a first start: the class's own uncached forward of its first layers, with the checkpoint's weights.

The class runs as transformers would run it, alone, with its own attention, its own positions and without our parts:
once in float32, which counts as right, and once in the model's dtype, which shows how far rounding alone leads. It is
built as a whole, but only the first layers get weights, and the run ends behind them.
"""

import copy
import logging
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oarlock.base.host_memory import free_host_bytes, human_bytes
from oarlock.base.process_memory import trim
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.model_files.tensor_names import AS_STORED
from oarlock.workers.models.class_reference import Expected, errors, largest
from oarlock.workers.transformers_backend.building import (
    StoredTensor,
    compute_buffers,
    float32_names,
    stored_tensors,
    without_weights,
)
from oarlock.workers.transformers_backend.class_description import ClassDescription
from oarlock.workers.transformers_backend.opening import OpenClass
from oarlock.workers.transformers_backend.private_parts import PreTrainedModel
from oarlock.workers.transformers_backend.remembered import Successes
from oarlock.workers.transformers_backend.weights import ClassWeights
from oarlock.workers.weights.gguf_reader import weight_source
from oarlock.workers.weights.source import WeightSource

MOST_BYTES = 2 << 30  # float32 weights of the layers that are compared, unless a single layer has more
MOST_OF_MEMORY = 0.25  # of the host's free memory, which one layer must not exceed
TOKENS = 67  # of the prompt: odd, and more than two blocks of keys
ROUTED_SHARE = 0.75  # of the tokens are compared if a router chooses experts: see `largest`
_STRIDE = 7919  # difference between the ids of consecutive tokens: a prime, which spreads them over the vocabulary
_OWN = "eager"  # transformers' plain code of attention and of experts
_FIRST_NUMBER = re.compile(r"^(.*?)\.(\d+)(?:\.|$)")

logger = logging.getLogger("oarlock.runner")


@dataclass(frozen=True, slots=True)
class FirstLayers:
    """The layers that are compared."""

    container: str  # name of the list of layers
    count: int

    @property
    def last(self) -> str:
        """Name of the last of them, whose result is compared."""
        return f"{self.container}.{self.count - 1}"

    def has_part(self, name: str) -> bool:
        """Return whether the tensor `name` is of these layers, or of no layer."""
        number = self.number_of(name)
        return number is None or number < self.count

    def number_of(self, name: str) -> int | None:
        match = _FIRST_NUMBER.match(name)
        return int(match.group(2)) if match is not None and match.group(1) == self.container else None


class NotCompared(Exception):
    """The class's own forward cannot run here, for the reason in its text."""


class OwnForward:
    """See `ClassReference`."""

    def __init__(
        self,
        opened: OpenClass,
        description: ClassDescription,
        served: nn.Module,
        dtype: torch.dtype,
        directory: Path,
        by_class_names: Callable[[WeightSource], ClassWeights],
        successes: Successes | None,
    ) -> None:
        """Describe the run. `served`: the model that steps run. `by_class_names`: see `ConvertedWeights`. `successes`:
        the starts that were right; None on every rank but the first."""
        self._opened, self._description, self._served, self._dtype = opened, description, served, dtype
        self._directory, self._by_class_names, self._successes = directory, by_class_names, successes
        self._layers: FirstLayers | None = None
        self.prompt = trial_prompt(description.vocab_size)
        self.share = ROUTED_SHARE if is_routed(description) else 1.0
        self.expected: Expected | None = None
        self.is_wanted = False

    def prepare(self, on_progress: Callable[[], None]) -> None:
        """See `ClassReference.prepare`."""
        if self._successes is None:
            return
        name = self._description.architecture
        if self._successes.has():
            logger.info("event=class_self_test_remembered class=%s file=%r", name, str(self._successes.path))
            return
        self.is_wanted, started = True, time.monotonic()
        on_progress()
        try:
            self._layers = layers_that_fit(self._description, round(MOST_OF_MEMORY * free_host_bytes()))
            self.expected = self._run_twice(self._layers, on_progress)
        except Exception as error:  # the class's code may raise anything
            reason = str(error) if isinstance(error, NotCompared) else f"{type(error).__name__}: {error}"
            line = " ".join(reason.split())[:300]
            logger.warning("event=class_reference_skipped class=%s reason=%r", name, line)
        else:
            logger.info(
                "event=class_reference class=%s layers=%d of=%d rounding=%.2g seconds=%.1f",
                *(name, self._layers.count, self._description.layers),
                *(largest(self.expected.rounding, self.share), time.monotonic() - started),
            )
        trim()  # before memory for keys and values is measured

    @contextmanager
    def recorded(self) -> Generator[list[Tensor]]:
        """See `ClassReference.recorded`."""
        found: list[Tensor] = []
        if self.expected is None or self._layers is None:
            yield found
            return
        layer = self._served.get_submodule(self._layers.last)
        handle = layer.register_forward_hook(lambda _module, _given, result: found.append(_rows(result).clone()))
        try:
            yield found
        finally:
            handle.remove()

    def remember(self, facts: dict[str, float]) -> None:
        """See `ClassReference.remember`."""
        if self._successes is not None:
            self._successes.add(facts)

    @torch.inference_mode()
    def _run_twice(self, layers: FirstLayers, on_progress: Callable[[], None]) -> Expected:
        """Return the result in float32, and how far rounding leads from it."""
        checkpoint = Checkpoint.open(self._directory, AS_STORED)
        with weight_source(checkpoint, check_finite=False, on_read=on_progress) as source:
            weights = self._by_class_names(source)
            right = self._run(layers, torch.float32, weights)
            on_progress()
            rounded = right if self._dtype == torch.float32 else self._run(layers, self._dtype, weights)
        return Expected(layers.count, right, errors(rounded, right))

    def _run(self, layers: FirstLayers, dtype: torch.dtype, weights: ClassWeights) -> Tensor:
        """Return the result [T, width] of the first layers for the prompt, of the class in `dtype`, on the CPU."""
        config = copy.deepcopy(self._opened.config)  # the served model reads its attention's name from its own
        model = without_weights(self._opened.kind, config, _OWN, dtype, experts=_OWN)
        compute_buffers(model, torch.device("cpu"))
        is_float32 = float32_names(model, dtype)
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        looked_up = {one.name for one in self._description.tensors if one.role == "embedding"}
        for stored in stored_tensors(model):
            if not layers.has_part(stored.name) or (stored.tensor is head.weight is not embedding.weight):
                continue
            kept = torch.float32 if is_float32(stored.name) else stored.tensor.dtype
            rows = sorted(set(self.prompt)) if stored.name in looked_up else None
            _load(stored, kept, weights, rows)
        return _first_result(model, layers.last, self.prompt)


def trial_prompt(vocab_size: int, tokens: int = TOKENS) -> list[int]:
    """Return ids that differ as far as the vocabulary has them."""
    return [(1 + number) * _STRIDE % vocab_size for number in range(tokens)]


def is_routed(description: ClassDescription) -> bool:
    """Return whether the class chooses experts for each token."""
    return bool(description.experts) or any("expert" in tensor.name for tensor in description.tensors)


def layers_that_fit(description: ClassDescription, memory: int) -> FirstLayers:
    """Return the first layers whose float32 weights take at most `MOST_BYTES`, and at least one.

    Raise `NotCompared` if the layers are not in one list, or if one layer takes more than `memory` bytes.
    """
    names = [call.module for call in (*description.attention, *description.states)]
    containers = {None if match is None else match.group(1) for match in map(_FIRST_NUMBER.match, names)}
    container = containers.pop() if len(containers) == 1 else None
    if container is None:
        raise NotCompared("its layers are not in one list")
    every = FirstLayers(container, description.layers)
    of_layer, others = [0] * description.layers, 0
    for tensor in description.tensors:
        number, size = every.number_of(tensor.name), 4 * prod(tensor.shape)
        if number is not None and number < len(of_layer):
            of_layer[number] += size
        elif tensor.role not in ("embedding", "head"):  # few rows of the embedding are read, and no logits computed
            others += size
    if others + of_layer[0] > memory:
        raise NotCompared(f"one layer takes {human_bytes(others + of_layer[0])}, of {human_bytes(memory)} at most")
    total, count, most = of_layer[0], 1, min(MOST_BYTES, memory - others)
    while count < len(of_layer) and total + of_layer[count] <= most:
        total, count = total + of_layer[count], count + 1
    return FirstLayers(container, count)


def _load(stored: StoredTensor, dtype: torch.dtype, weights: ClassWeights, rows: list[int] | None) -> None:
    """Read a tensor; only `rows` of it, unless they are None. Memory of other rows is never touched."""
    shape = tuple(stored.tensor.shape)
    into = torch.empty(shape, dtype=dtype)
    if rows is None:
        weights.take(stored.name, into, shape=shape)
    else:
        for row in rows:
            weights.take(stored.name, into[row : row + 1], shape=shape, start=row)
    stored.put(into)


class _Done(Exception):
    """The layers that are compared have run."""


def _first_result(model: PreTrainedModel, layer: str, prompt: list[int]) -> Tensor:
    """Run `model` up to the module `layer`, and return its result: float32 [T, width]."""
    found: list[Tensor] = []

    def end(_module: nn.Module, _given: Any, result: Any) -> None:
        found.append(_rows(result).float())
        raise _Done

    model.get_submodule(layer).register_forward_hook(end)
    try:
        model(input_ids=torch.tensor([prompt]), use_cache=False)
    except _Done:
        return found[0]
    raise NotCompared(f"it does not call {layer}")


def _rows(result: Any) -> Tensor:
    """Return a layer's result, a tensor [1, T, ...] or [T, width] or a tuple that begins with it: [T, width]."""
    hidden = result if isinstance(result, Tensor) else result[0]
    return (hidden[0] if hidden.dim() > 2 else hidden).flatten(1)
