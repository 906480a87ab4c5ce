"""A class of transformers as one rank holds it: built without weights, with its large modules replaced by our parts.

Every plain linear layer, the token embedding, the output head and the experts that our kernels know are replaced; the
rest stays the class's own code with the class's own parameters. The same function builds the model that serves and the
model that a look before the start observes, so the look sees the shapes of one rank.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from oarlock.base.errors import StartupError
from oarlock.workers.layers.placement import Placement
from oarlock.workers.quantization.registry import NONE
from oarlock.workers.transformers_backend.class_description import ClassTensor, Role
from oarlock.workers.transformers_backend.experts import ExpertsPart, experts_of
from oarlock.workers.transformers_backend.experts_loop import EXPERTS_IMPLEMENTATION, register_experts
from oarlock.workers.transformers_backend.experts_source import stacked_names
from oarlock.workers.transformers_backend.linears import LinearPart, make_linear
from oarlock.workers.transformers_backend.placement_plan import Division, division_on
from oarlock.workers.transformers_backend.private_parts import (
    PretrainedConfig,
    PreTrainedModel,
    build_glob_alternation,
)
from oarlock.workers.transformers_backend.vocabulary import EmbeddingPart, HeadPart, can_replace
from oarlock.workers.transformers_backend.weights import ClassWeights


class Part(Protocol):
    """A module that owns weights in our formats."""

    @property
    def weight_bytes(self) -> int: ...

    def load(self, weights: ClassWeights) -> None: ...


@dataclass(slots=True)
class StoredTensor:
    """A parameter or stored buffer of a model, and all places where it is."""

    name: str
    tensor: Tensor
    is_buffer: bool
    places: list[tuple[nn.Module, str]]

    def put(self, tensor: Tensor) -> None:
        """Make the class read `tensor` in its place."""
        for module, name in self.places:
            if self.is_buffer:
                module._buffers[name] = tensor
            else:
                module._parameters[name] = nn.Parameter(tensor, requires_grad=False)


@dataclass(slots=True)
class OwnTensor:
    """A tensor that the class's own code reads on a rank."""

    stored: StoredTensor
    dtype: torch.dtype
    division: Division

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape over all ranks."""
        return tuple(self.stored.tensor.shape)

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape on each of `size` ranks."""
        return (self.shape[0] // size, *self.shape[1:]) if self.division is Division.OUTPUTS else self.shape

    def bytes_of_rank(self, size: int) -> int:
        """Return the bytes on each of `size` ranks."""
        return math.prod(self.local_shape(size)) * self.dtype.itemsize


@dataclass(slots=True)
class BuiltClass:
    """The model of one rank, before its weights are loaded."""

    model: PreTrainedModel
    head: HeadPart
    embedding: EmbeddingPart | None  # None: it stays the class's own module
    is_tied: bool  # the head reads the embedding's weight
    parts: Sequence[Part] = ()  # without the head
    own: list[OwnTensor] = field(default_factory=list)


def without_weights(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    implementation: str,
    dtype: torch.dtype,
    *,
    experts: str = EXPERTS_IMPLEMENTATION,
) -> PreTrainedModel:
    """Return the model on the meta device, with `implementation` of attention and of `experts`.

    By default, experts that our kernels do not know are run one by one (`experts_loop.py`).
    """
    register_experts()
    ways = {"attn_implementation": implementation, "experts_implementation": experts}
    with torch.device("meta"):
        return kind._from_config(config, dtype=dtype, **ways).eval()


def build(model: PreTrainedModel, placement: Placement, own_linears: Collection[str] = ()) -> BuiltClass:
    """Replace the large modules of `model`, which has no weights yet (`without_weights`), by parts of this rank."""
    tensors = class_tensors(model, own_linears)
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    first = {id(tensor): name for name, tensor in model.named_parameters()}  # a shared tensor has its first name
    by_name = {tensor.name: tensor for tensor in tensors}
    keeps_float32 = float32_names(model, model.dtype)
    in_float32 = replace(placement, dtype=torch.float32, quantization=NONE)
    mixtures = experts_of(model)
    own = _own_tensors(model, tensors, placement.tp.size)

    def stored_as(module: nn.Module) -> str:
        return first[id(module.weight)].removesuffix(".weight")

    is_tied = head.weight is embedding.weight
    of_vocabulary = replace(placement, quantization=placement.quantization.of_head)
    embedding_part = None
    if isinstance(embedding, nn.Embedding) and can_replace(embedding):
        embedding_part = EmbeddingPart(stored_as(embedding), embedding, of_vocabulary)
    head_part = HeadPart(names[id(head)], head, of_vocabulary, stored_as(head))
    built = BuiltClass(model, head_part, embedding_part, is_tied)
    parts: dict[int, EmbeddingPart | ExpertsPart | LinearPart] = {}
    if embedding_part is not None:
        parts[id(embedding)] = embedding_part
    for module in model.modules():
        if id(module) in parts or module is head:
            continue
        if names[id(module)] in mixtures:
            name = names[id(module)]
            parts[id(module)] = ExpertsPart(name, module, mixtures[name], placement)
        elif type(module) is nn.Linear and stored_as(module) not in own_linears:
            name = stored_as(module)
            division = division_on(placement.tp.size, by_name[f"{name}.weight"])
            where = in_float32 if keeps_float32(f"{name}.weight") else placement
            parts[id(module)] = make_linear(name, module, where, division)
    _replace(model, {**parts, id(head): head_part})
    built.parts = list(parts.values())
    built.own = own
    if placement.device.type != "meta":
        compute_buffers(model, placement.device)
    return built


def class_tensors(model: PreTrainedModel, own_linears: Collection[str] = ()) -> list[ClassTensor]:
    """Return the parameters of `model`, which has no weights yet, and the buffers that are stored.

    `own_linears`: linear layers whose weights the class reads itself.
    """
    plan, roles = model._tp_plan or {}, _roles(model)
    roles = {name: role for name, role in roles.items() if role != "linear" or name not in own_linears}
    keeps_float32 = float32_names(model, torch.bfloat16)
    stored = {**dict(model.named_parameters()), **_stored_buffers(model)}
    found = []
    for name, tensor in stored.items():
        role = roles.get(name.rpartition(".")[0], "own")
        is_float32 = keeps_float32(name) or tensor.dtype != model.dtype
        found.append(ClassTensor(name, tuple(tensor.shape), role, _style(plan, name), is_float32))
    head = model.get_output_embeddings()
    # A head that is tied to an embedding which the class computes itself keeps a copy of it.
    if head.weight is model.get_input_embeddings().weight and not can_replace(model.get_input_embeddings()):
        shared = next(one for one in found if one.shape == tuple(head.weight.shape) and stored[one.name] is head.weight)
        found.append(replace(shared, role="head"))
    return found


def _roles(model: PreTrainedModel) -> dict[str, Role]:
    """Return what reads the tensors of each module, for the modules that are replaced."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    found: dict[str, Role] = {}
    for one in experts_of(model).values():
        found |= dict.fromkeys((name.rpartition(".")[0] for name in stacked_names(one)), "experts")
    for name, module in model.named_modules():
        if module is head:
            found[name] = "head"
        elif module is embedding and can_replace(embedding):
            found[name] = "embedding"
        elif type(module) is nn.Linear:
            found[name] = "linear"
    return found


def _style(plan: dict[str, str], name: str) -> str | None:
    """Return the style of the tensor `name`, which the plan has for itself or for its module."""
    generic = ".".join("*" if part.isdecimal() else part for part in name.split("."))
    return plan.get(generic) or plan.get(generic.rpartition(".")[0])


def float32_names(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return the question whether the class keeps a tensor in float32 if the model's dtype is `dtype`."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return lambda _: False
    pattern, _, _ = build_glob_alternation(list(plan))
    return lambda name: pattern.search(name) is not None


def _stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def stored_tensors(model: PreTrainedModel) -> list["StoredTensor"]:
    """Return the parameters and stored buffers of `model`; a tensor that modules share once, by its first name."""
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    names |= {id(tensor): name for name, tensor in _stored_buffers(model).items()}
    found: dict[int, StoredTensor] = {}
    for module in model.modules():
        for is_buffer, tensors in ((False, module._parameters), (True, module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) in names:
                    one = StoredTensor(names[id(tensor)], tensor, is_buffer, [])
                    found.setdefault(id(tensor), one).places.append((module, name))
    return list(found.values())


def _own_tensors(model: PreTrainedModel, tensors: list[ClassTensor], size: int) -> list[OwnTensor]:
    """Return the tensors that stay with the class's own code on each of `size` ranks."""
    keeps_float32 = float32_names(model, model.dtype)
    own = {tensor.name: tensor for tensor in tensors if tensor.role == "own"}
    found = []
    for stored in stored_tensors(model):
        if stored.name in own:
            division = division_on(size, own[stored.name])
            dtype = torch.float32 if keeps_float32(stored.name) else stored.tensor.dtype
            found.append(OwnTensor(stored, dtype, division))
    return found


def _replace(model: nn.Module, parts: dict[int, nn.Module]) -> None:
    """Put the part of each module, by its id, wherever `model` has the module."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and id(child) in parts:
                parent._modules[name] = parts[id(child)]


def compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that no checkpoint stores, such as rotary frequencies, as transformers does when it loads.

    Raise `StartupError` if the class leaves one as it is: its values would be whatever the memory had.
    """
    owners: dict[int, str] = {}
    for prefix, module in model.named_modules():
        names = module._non_persistent_buffers_set
        for name, buffer in module._buffers.items():
            if name in names and buffer is not None:
                owners[id(module)] = prefix
                missing = torch.empty_like(buffer, device=device)
                module._buffers[name] = missing.fill_(math.nan) if buffer.is_floating_point() else missing
    for module in model.modules():  # a module may fill the buffers of modules inside of it; others are left alone
        vars(module)["_is_hf_initialized"] = not any(id(inner) in owners for inner in module.modules())
    model.initialize_weights()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and buffer.device.type != "meta" and bool(buffer.isnan().any()):
            raise StartupError(f"{name}: the class does not compute this buffer.", "Use another model.")
