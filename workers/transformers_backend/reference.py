"""The judge of a first start: the class's own uncached forward of its first layers, with the checkpoint's weights.

The class runs as transformers would run it, alone, with its own attention and without our parts: once in float32, which
counts as right, and once in the model's dtype, which shows how far rounding alone leads. Ranks must be as close to the
first as a few times the second.
"""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oarlock.workers.transformers_backend.building import compute_buffers, float32_names, stored_tensors
from oarlock.workers.transformers_backend.class_description import ClassDescription
from oarlock.workers.transformers_backend.private_parts import PretrainedConfig, PreTrainedModel
from oarlock.workers.transformers_backend.weights import ConvertedWeights
from oarlock.workers.weights.source import WeightSource

MOST_BYTES = 2 << 30  # float32 weights of the layers that are compared, unless a single layer has more
TOKENS = 67  # of the prompt: odd, and more than two blocks of keys
_STRIDE = 7919  # difference between the ids of consecutive tokens: a prime, which spreads them over the vocabulary
# Settings that hold the number of layers, under one name or another.
_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_FIRST_NUMBER = re.compile(r"^(.*?)\.(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class Reference:
    """What the class's own forward gives for a prompt, after its first layers."""

    prompt: list[int]
    layer: str  # name of the module of the last of these layers
    layers: int  # number of layers up to it, of `all_layers`
    all_layers: int
    expected: Tensor  # float32 [T, hidden]: that module's result in float32
    rounding: float  # distance of its result in the model's dtype, as `distance` defines it


def distance(found: Tensor, expected: Tensor) -> float:
    """Return how far `found` is from `expected`, both [T, hidden]: the upper quartile of the tokens' relative errors.

    A quarter of the tokens may be farther: where a router chooses between equally good experts, rounding changes a
    token's result for a good reason.
    """
    expected, found = expected.float(), found.float()
    each = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
    return float(each.nan_to_num(nan=float("inf")).quantile(0.75))


def trial_prompt(vocab_size: int, tokens: int = TOKENS) -> list[int]:
    """Return ids that differ as far as the vocabulary has them."""
    return [(1 + number) * _STRIDE % vocab_size for number in range(tokens)]


def make_reference(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    description: ClassDescription,
    dtype: torch.dtype,
    weights: WeightSource,
    tokens: int = TOKENS,
) -> Reference:
    """Run the first layers of the class with its weights, and return their result for a prompt.

    It has as many layers as fit in `MOST_BYTES`, and at least one. Raise `ValueError` with a reason if the class cannot
    be cut after some of its layers.
    """
    container, all_layers = _layers_of(description)
    layers = _layers_that_fit(description, container, all_layers)
    cut = config if layers == all_layers else _with_layers(config, layers, all_layers)
    prompt, layer = trial_prompt(description.vocab_size, tokens), f"{container}.{layers - 1}"
    expected = _run(kind, cut, torch.float32, weights, prompt, layer)
    rounded = expected if dtype == torch.float32 else _run(kind, cut, dtype, weights, prompt, layer)
    return Reference(prompt, layer, layers, all_layers, expected, distance(rounded, expected))


@contextmanager
def recorded(model: nn.Module, layer: str) -> Iterator[list[Tensor]]:
    """Yield a list to which every run of the module `layer` of `model` adds its result [T, hidden]."""
    found: list[Tensor] = []

    def record(_module: nn.Module, _given: Any, result: Any) -> None:
        hidden = result[0] if isinstance(result, tuple) else result
        found.append(hidden.reshape(-1, hidden.shape[-1]).clone())

    handle = model.get_submodule(layer).register_forward_hook(record)
    try:
        yield found
    finally:
        handle.remove()


def _layers_of(description: ClassDescription) -> tuple[str, int]:
    """Return the name of the list of layers, and their number."""
    names = [call.module for call in (*description.attention, *description.states)]
    matches = [match for match in map(_FIRST_NUMBER.match, names) if match is not None]
    containers = {match.group(1) for match in matches}
    if len(containers) != 1 or len(matches) != len(names):
        raise ValueError("its layers are not in one list")
    (container,) = containers
    of_layers = [_FIRST_NUMBER.match(tensor.name) for tensor in description.tensors]
    numbers = {int(match.group(2)) for match in of_layers if match is not None and match.group(1) == container}
    return container, 1 + max(numbers | {int(match.group(2)) for match in matches})


def _layers_that_fit(description: ClassDescription, container: str, all_layers: int) -> int:
    """Return the number of first layers whose float32 weights, with the embedding, take at most `MOST_BYTES`."""
    of_layer = [0] * all_layers
    for tensor in description.tensors:
        match = _FIRST_NUMBER.match(tensor.name)
        if match is not None and match.group(1) == container:
            of_layer[int(match.group(2))] += 4 * torch.Size(tensor.shape).numel()
    total, layers = of_layer[0], 1
    while layers < all_layers and total + of_layer[layers] <= MOST_BYTES:
        total, layers = total + of_layer[layers], layers + 1
    return layers


def _with_layers(config: PretrainedConfig, layers: int, all_layers: int) -> PretrainedConfig:
    """Return `config` with only its first layers: the count and every list with an entry for each layer are cut."""
    fields = copy.deepcopy(config).to_dict()
    counts = [name for name in _COUNTS if fields.get(name) == all_layers]
    if not counts:
        raise ValueError("its config has no number of layers that can be lowered")
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == all_layers:
            fields[name] = value[:layers]
    return type(config).from_dict({**fields, **dict.fromkeys(counts, layers)})


@torch.inference_mode()
def _run(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    dtype: torch.dtype,
    weights: WeightSource,
    prompt: list[int],
    layer: str,
) -> Tensor:
    """Return the result [T, hidden] of the module `layer` for `prompt`, of the class in `dtype`, on the CPU."""
    with torch.device("meta"):
        model = kind._from_config(copy.deepcopy(config), attn_implementation="eager", dtype=dtype).eval()
    names, in_float32 = ConvertedWeights(model, weights), float32_names(model, dtype)
    head = model.get_output_embeddings()
    for stored in stored_tensors(model):
        tensor = stored.tensor
        if tensor is head.weight and tensor is not model.get_input_embeddings().weight:
            continue  # no logits are compared
        into = torch.empty(tensor.shape, dtype=torch.float32 if in_float32(stored.name) else tensor.dtype)
        names.take(stored.name, into, shape=tuple(tensor.shape))
        stored.put(into)
    compute_buffers(model, torch.device("cpu"))
    base = getattr(model, model.base_model_prefix)
    ids = torch.tensor([prompt])
    with recorded(model, layer) as found:
        base(input_ids=ids, position_ids=torch.arange(len(prompt))[None], use_cache=False)
    return found[0].float()
