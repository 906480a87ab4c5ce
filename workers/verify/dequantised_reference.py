"""transformers' side of a quantised model: weights dequantised without our readers, and matmuls that compute as ours.

Weights are whole, unlike on any rank, so that a rank which cuts a scale wrongly differs. A format is stored in
checkpoints, or applied to weights at load, or the dtype of the checkpoint.
"""

import json
from collections.abc import Callable, Container, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oarlock.workers.gguf_config import open_checkpoint
from oarlock.workers.layers.decoder_spec import FUSED_MODULES, DecoderSpec, tensors_of
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.layers.tensor_spec import NOT_QUANTIZED, Sharding
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.model_files.gguf_model import gguf_file
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_fields import read_config
from oarlock.workers.models.hf_quantization import stored_quantization, weight_formats
from oarlock.workers.models.registry import read_spec
from oarlock.workers.quantization import block_float8, int4, int8, scaled_float8
from oarlock.workers.quantization.formats.checkpoint_formats import CheckpointFormats
from oarlock.workers.quantization.formats.weight_format import Arithmetic
from oarlock.workers.quantization.matmul import ACTIVATIONS, PLAIN_ACTIVATIONS
from oarlock.workers.quantization.registry import QUANTIZATIONS
from oarlock.workers.verify.dequantise import StoredTensors, dequantised, dequantised_gguf
from oarlock.workers.weights.reader import WeightReader

_ROWS = 8192  # rows of a weight that are rounded at once
# Experts in the most common layout, but without transformers' switch between implementations and its attributes.
_WITHOUT_SWITCH = ("LongcatFlashExperts",)


class DequantisedWeights(Protocol):
    """Dequantised weights by our names of modules; `transformers_layout.py` has them by transformers' names."""

    def has(self, module: str) -> bool:
        """Return whether the module's weight is stored by itself, and not fused with others."""

    def weight(self, module: str) -> Tensor:
        """Return the weight of a linear module or an embedding: [N, K], in its stored dtype, float32 or float64."""

    def arithmetic(self, module: str) -> Arithmetic:
        """Return the arithmetic of the module's matmul. Weights that are looked up or not quantised are `DENSE`."""

    def other(self, name: str) -> Tensor:
        """Return a tensor of a norm, or a bias."""


def dequantised_weights(model: Path, quantization: str, dtype: torch.dtype | None = None) -> DequantisedWeights:
    """Open a model's weights. `quantization`: as resolved by preflight. `dtype`: to round from; None: the stored
    dtype."""
    spec = read_spec(str(model))
    if gguf_file(model) is not None:
        found: DequantisedWeights = _OfGGUF(model, quantization)
    elif quantization in QUANTIZATIONS:
        return _AtLoad(model, spec, quantization, dtype)
    else:
        found = _Stored(model, spec.names)
    return _WithLatents(found, spec) if any(isinstance(one, LatentAttentionSpec) for one in spec.sublayers) else found


class WrittenOut:
    """`DequantisedWeights` that are rounded to the model's dtype, with matmuls that do not round their inputs."""

    def __init__(self, dequantised: DequantisedWeights, dtype: torch.dtype) -> None:
        self._dequantised, self._dtype = dequantised, dtype

    def has(self, module: str) -> bool:
        return self._dequantised.has(module)

    def weight(self, module: str) -> Tensor:
        return self._dequantised.weight(module).to(self._dtype)

    def arithmetic(self, module: str) -> Arithmetic:
        of_stored = self._dequantised.arithmetic(module)
        return of_stored if of_stored is Arithmetic.DENSE else Arithmetic.EXACT_INPUTS

    def other(self, name: str) -> Tensor:
        return self._dequantised.other(name)


class _WithLatents:
    """`DequantisedWeights` of a model with latent attention, whose ranks write out the matrices of heads in the model's
    dtype."""

    def __init__(self, dequantised: DequantisedWeights, spec: DecoderSpec) -> None:
        self._dequantised = dequantised
        self._written_out: dict[str, LatentAttentionSpec] = {}
        for index, layer in enumerate(spec.layers):
            for sublayer in (branch.sublayer for branch in layer.branches):
                if isinstance(sublayer, LatentAttentionSpec):
                    self._written_out[f"model.layers.{index}.{sublayer.module}.kv_b_proj"] = sublayer

    def has(self, module: str) -> bool:
        return module in self._written_out or self._dequantised.has(module)

    def weight(self, module: str) -> Tensor:
        latent = self._written_out.get(module)
        if latent is None or not latent.splits_kv_b:
            return self._dequantised.weight(module)
        before = module.removesuffix("kv_b_proj")
        parts = [self._dequantised.weight(f"{before}{part}_b_proj") for part in ("k", "v")]
        keys, values = (part.unflatten(0, (latent.num_heads, -1)) for part in parts)
        return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)

    def arithmetic(self, module: str) -> Arithmetic:
        return Arithmetic.DENSE if module in self._written_out else self._dequantised.arithmetic(module)

    def other(self, name: str) -> Tensor:
        return self._dequantised.other(name)


class _AtLoad:
    """`DequantisedWeights` that are rounded at load, or not quantised."""

    def __init__(self, model: Path, spec: DecoderSpec, quantization: str, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._checkpoint = Checkpoint.open(model, spec.names)
        self._stored = StoredTensors(model, spec.names)
        tensors = {tensor.name.removesuffix(".weight"): tensor for tensor in tensors_of(spec)}
        self._unquantized = {name for name, one in tensors.items() if one.rank_dtype in NOT_QUANTIZED}
        self._of_vocabulary = {"lm_head"} | {
            name for name, one in tensors.items() if one.sharding is Sharding.VOCABULARY
        }
        weight_format = QUANTIZATIONS[quantization]
        head = next(name for name, other in QUANTIZATIONS.items() if other is weight_format.of_head)
        self._of_layers, self._of_head = quantization, head

    def has(self, module: str) -> bool:
        return self._checkpoint.find(f"{module}.weight") is not None

    def weight(self, module: str) -> Tensor:
        return rounded(self.other(f"{module}.weight").to(self._dtype), self._format_of(module))

    def arithmetic(self, module: str) -> Arithmetic:
        return QUANTIZATIONS[self._format_of(module)].arithmetic

    def other(self, name: str) -> Tensor:
        if self._stored.has(name):
            return self._stored.get(name)
        found = self._checkpoint.find(name)
        assert found is not None, f"{name}: the ranks have loaded it"
        with WeightReader(self._checkpoint) as weights:  # part of a tensor of all experts
            into = torch.empty(found.entry.shape)
            weights.take(name, into, shape=found.entry.shape)
            return into

    def _format_of(self, module: str) -> str:
        if module == "model.embed_positions" or module in self._unquantized:
            return "none"
        return self._of_head if module in self._of_vocabulary else self._of_layers


class _Stored:
    """`DequantisedWeights` of a quantised checkpoint in safetensors files."""

    def __init__(self, model: Path, names: TensorNames) -> None:
        stored = stored_quantization(model, read_config(model))
        assert stored is not None, "preflight has resolved a stored format"
        self._stored = StoredTensors(model, names)
        self._formats = CheckpointFormats(stored.scheme, Checkpoint.open(model, names), FUSED_MODULES)

    def has(self, module: str) -> bool:
        return self._formats.has(module)

    def weight(self, module: str) -> Tensor:
        return dequantised(self._stored, module)

    def arithmetic(self, module: str) -> Arithmetic:
        return self._formats.format_of(module).arithmetic

    def other(self, name: str) -> Tensor:
        return self._stored.get(name)


class _OfGGUF:
    """`DequantisedWeights` of the GGUF file that a described model links to."""

    def __init__(self, model: Path, quantization: str) -> None:
        self._model = model
        self._checkpoint = open_checkpoint(model)
        self._formats = weight_formats(quantization, None, self._checkpoint)

    def has(self, module: str) -> bool:
        return self._checkpoint.find(f"{module}.weight") is not None

    def weight(self, module: str) -> Tensor:
        return dequantised_gguf(self._model, f"{module}.weight")

    def arithmetic(self, module: str) -> Arithmetic:
        return self._formats.format_of(module).arithmetic

    def other(self, name: str) -> Tensor:
        return dequantised_gguf(self._model, name)


def rounded(weight: Tensor, weight_format: str) -> Tensor:
    """Round `weight` [N, K] to `weight_format`, a name in `QUANTIZATIONS`, and dequantise it: float32 [N, K]."""
    if weight_format == "none":
        return weight
    rows = weight.split(_ROWS)
    if weight_format == "int8":
        values_and_scales = map(int8.round_rows, rows)
        return torch.cat([values.float() * scales.unsqueeze(1) for values, scales in values_and_scales])
    return torch.cat([int4.dequantised(*int4.round_groups(some)) for some in rows])


RoundRows = Callable[[Tensor], tuple[Tensor, Tensor]]  # [T, K] -> values [T, K], and scales [T] or [T, groups]
_ROUNDED: dict[tuple[str, Arithmetic], RoundRows] = {
    ("cpu", Arithmetic.ROUNDED_INPUTS): int8.round_rows,
    ("cuda", Arithmetic.FLOAT8_INPUTS): scaled_float8.round_rows,
    ("cuda", Arithmetic.FLOAT8_BLOCKS): block_float8.round_blocks,
}


@dataclass(frozen=True, slots=True)
class LayerLoss:
    """Distance of one layer from the model before its weights were rounded: root mean squares, relative."""

    layer: int
    weights: float  # all matmul weights of the layer
    hidden: float  # residual stream after the layer, in float64


@dataclass(frozen=True, slots=True)
class RoundingLoss:
    """Error that rounding the weights adds to each layer, and to the logits at the end."""

    layers: list[LayerLoss]
    logits: float

    def write(self, folder: Path) -> None:
        (folder / "rounding.json").write_text(json.dumps(asdict(self)), "utf-8")

    @staticmethod
    def read(folder: Path) -> "RoundingLoss | None":
        """Read the loss; None if no weight was rounded at load."""
        path = folder / "rounding.json"
        if not path.is_file():
            return None
        read = json.loads(path.read_text("utf-8"))
        return RoundingLoss([LayerLoss(**layer) for layer in read["layers"]], read["logits"])


class DequantisedModel:
    """A transformers model whose quantised weights are replaced, in float32, by their dequantised values."""

    def __init__(
        self,
        model: nn.Module,
        dequantised: DequantisedWeights,
        dtype: torch.dtype,
        *,
        was_dense: bool,
        device: str,
        unread: Container[str] = (),
    ) -> None:
        """Replace the weights of `model`. `dtype`: of the model's computations. `was_dense`: the model has the weights
        that it was stored with, in that dtype.

        `device`: of the ranks, on which the rounding of matmul inputs depends. `unread`: names of modules that ranks do
        not have, such as modules for images.
        """
        self.was_dense = was_dense
        self._model = model
        self._dtype = dtype
        self._was: dict[Tensor, Tensor] = {}
        self._dequantised: dict[Tensor, Tensor] = {}
        self._rounds: dict[Tensor, RoundRows | None] = {}  # rounding of the matmul's inputs
        seen: set[Tensor] = set()
        # Ranks keep the weights of routers in float32.
        of_routers = {part for module in model.modules() if is_router(module) for part in module.modules()}
        for name, module in model.named_modules():
            if not is_product(module) or module.weight in seen or name in unread:
                continue
            seen.add(module.weight)  # a head may be the embedding, and not be stored by itself
            weight = module.weight
            arithmetic = Arithmetic.DENSE if module in of_routers else dequantised.arithmetic(name)
            if arithmetic is Arithmetic.DENSE:
                if not was_dense:
                    weight.data = _stored_as(module, dequantised.weight(name)).to(weight.device, dtype)
                continue
            if was_dense:
                self._was[weight] = weight.data
            found = _stored_as(module, dequantised.weight(name)).to(weight.device, torch.float32)
            self._dequantised[weight] = weight.data = found
            self._rounds[weight] = _ROUNDED.get((device, arithmetic))
        for name, module in model.named_modules():
            if is_experts(module):
                self._take_experts(name, module, dequantised, device)
        for module in model.modules():
            if isinstance(module, nn.Embedding) and hasattr(module, "embed_scale"):
                # part of the model's definition: rounded as the model's own weights were
                module.embed_scale = torch.as_tensor(module.embed_scale).to(dtype)

    def _take_experts(self, name: str, module: Any, dequantised: DequantisedWeights, device: str) -> None:
        """Take the weights of all experts, for which transformers has two tensors."""
        arithmetic = dequantised.arithmetic(f"{name}.0.up_proj")
        inner = ("gate", "up") if has_gate(module) else ("up",)
        for parameter, parts in ((inner_weight(module), inner), (module.down_proj, ("down",))):
            if arithmetic is Arithmetic.DENSE and self.was_dense:
                continue
            experts = range(len(module.down_proj))  # matrices of others are not read, and stay as they are
            of_parts = [
                torch.stack([dequantised.weight(f"{name}.{expert}.{part}_proj").float() for expert in experts])
                for part in parts
            ]  # each [E, N, K]
            is_plain = weighs_inputs(module) or getattr(module, "is_concatenated", True)
            rows = torch.cat(of_parts, 1) if is_plain else torch.stack(of_parts, 2).flatten(1, 2)
            is_transposed = weighs_inputs(module) or getattr(module, "is_transposed", False)
            data = (rows.transpose(1, 2) if is_transposed else rows).contiguous().to(parameter.device)
            data = torch.cat((data, parameter.data[len(data) :].to(data.dtype)))
            if arithmetic is Arithmetic.DENSE:
                parameter.data = data.to(self._dtype)
                continue
            if self.was_dense:
                self._was[parameter] = parameter.data
            self._dequantised[parameter] = parameter.data = data
            # On other devices the experts' kernel does not round its inputs in any format.
            self._rounds[parameter] = _ROUNDED.get((device, arithmetic)) if device == "cpu" else None

    @contextmanager
    def as_it_was(self) -> Generator[None]:
        """Use the weights that the model was stored with, within the context."""
        self._use(self._was)
        try:
            yield
        finally:
            self._use(self._dequantised)

    def _use(self, weights: dict[Tensor, Tensor]) -> None:
        for parameter, data in weights.items():
            parameter.data = data

    def errors(self, layers: Iterable[Iterable[Tensor]]) -> Iterator[float]:
        """Yield the distance by which rounding moved the parameters of each layer, relative to their size."""
        for parameters in layers:
            moved = size = 0.0
            for parameter in parameters:
                if parameter in self._dequantised:
                    was = self._was[parameter].double()
                    moved += (self._dequantised[parameter].double() - was).square().sum().item()
                    size += was.square().sum().item()
            yield (moved / size) ** 0.5

    @contextmanager
    def as_served(self) -> Generator[None]:
        """Make matmuls of quantised weights compute in float32 and round their inputs as ours do, within the
        context."""
        changed = []
        for module in self._model.modules():
            if is_product(module) and module.weight in self._dequantised:
                module.forward = self._forward(module)
                changed.append(module)
            elif is_experts(module) and (inner := inner_weight(module)) in self._dequantised:
                rounds = self._rounds[inner]
                module.forward = partial(_weighing_experts if weighs_inputs(module) else _experts, module, rounds)
                changed.append(module)
        try:
            yield
        finally:
            for module in changed:
                del module.forward

    def _forward(self, module: Any) -> Callable[[Tensor], Tensor]:
        if isinstance(module, nn.Embedding):
            scale = getattr(module, "embed_scale", 1.0)
            return lambda ids: F.embedding(ids, module.weight).to(self._dtype) * scale
        rounds = self._rounds[module.weight]
        return lambda x: _matmul(module, x, rounds)


def is_product(module: Any) -> bool:
    """Return whether `module` multiplies by a weight, or looks up its rows. A router's weight is never rounded."""
    return (isinstance(module, nn.Linear | nn.Embedding) and not is_router(module)) or is_conv1d(module)


def is_router(module: nn.Module) -> bool:
    """Return whether `module` chooses experts; some routers are linear layers with a forward of their own."""
    return type(module).__name__.endswith(("Router", "Gate"))


def is_conv1d(module: nn.Module) -> bool:
    """Return whether `module` is GPT-2's linear layer, whose weight is [inputs, outputs]."""
    return type(module).__name__ == "Conv1D"


def _stored_as(module: nn.Module, weight: Tensor) -> Tensor:
    """Return `weight` [N, K] as `module` has it."""
    return weight.T.contiguous() if is_conv1d(module) else weight


def is_experts(module: nn.Module) -> bool:
    """Return whether `module` has the experts of a MoE layer, whose weights transformers stores in one tensor for
    all."""
    return type(module).__name__.endswith("Experts")


def weighs_inputs(experts: nn.Module) -> bool:
    """Return whether these experts get every token times its weight, as Llama 4's. Nearly all others have transformers'
    switch between implementations."""
    return not hasattr(experts, "is_transposed") and type(experts).__name__ not in _WITHOUT_SWITCH


def has_gate(experts: Any) -> bool:
    """Return whether the experts have a gate; Nemotron-H's have none."""
    return getattr(experts, "has_gate", True)


def apply_gate(experts: Any, both: Tensor) -> Tensor:
    """Return the activation of the gate times up, for the results of the experts' first matmul."""
    if type(experts).__name__ not in _WITHOUT_SWITCH:
        return experts._apply_gate(both)
    gate, up = both.chunk(2, dim=-1)
    return experts.act_fn(gate) * up


def inner_weight(experts: Any) -> Tensor:
    """Return the weights of the experts' first matmul."""
    return experts.gate_up_proj if has_gate(experts) else experts.up_proj


def _weighing_experts(module: Any, rounds: RoundRows | None, x: Tensor) -> Tensor:
    """Compute experts that each get all tokens: `x` [E * T, hidden], in the order of experts -> the same shape."""
    results = []
    for expert, rows in enumerate(x.view(len(module.gate_up_proj), -1, x.shape[-1])):
        gate, up = (_rounded_rows(rows, rounds) @ module.gate_up_proj[expert]).chunk(2, dim=-1)
        inner = (module.act_fn(gate) * up).to(x.dtype)
        results.append(_rounded_rows(inner, rounds) @ module.down_proj[expert])
    return torch.cat(results).to(x.dtype)


def _experts(module: Any, rounds: RoundRows | None, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute the experts one after the other. `x` [T, hidden], `ids` and `weights` [T, k]."""
    total = torch.zeros(x.shape, device=x.device)
    for expert in ids.unique().tolist():
        rows, choices = (ids == expert).nonzero(as_tuple=True)
        if expert >= len(module.down_proj):  # its result is its input
            total.index_add_(0, rows, weights[rows, choices, None].float() * x[rows].float())
            continue
        inner, down = inner_weight(module)[expert], module.down_proj[expert]
        has_bias = getattr(module, "has_bias", False)
        if not getattr(module, "is_transposed", False):
            inner, down = inner.T, down.T
        both = _rounded_rows(x[rows], rounds) @ inner
        both = both + module.gate_up_proj_bias[expert].float() if has_bias else both
        activated = apply_gate(module, both) if has_gate(module) else module.act_fn(both)
        result = _rounded_rows(activated.to(x.dtype), rounds) @ down
        result = result + module.down_proj_bias[expert].float() if has_bias else result
        total.index_add_(0, rows, weights[rows, choices, None].float() * result)
    return total.to(x.dtype)


def expert_result(weights: DequantisedWeights, module: str, spec: ExpertsSpec, x: Tensor) -> Tensor:
    """Compute the expert `module` without biases, by our names and in float64: `x` [T, hidden] -> the same shape."""
    up = x @ weights.weight(f"{module}.up_proj").double().T
    if spec.is_gated:
        gate = x @ weights.weight(f"{module}.gate_proj").double().T
        inner = ACTIVATIONS[spec.activation].function(gate) * up
    else:
        inner = PLAIN_ACTIVATIONS[spec.activation](up)
    return inner @ weights.weight(f"{module}.down_proj").double().T


def _rounded_rows(rows: Tensor, rounds: RoundRows | None) -> Tensor:
    """Return the inputs of a matmul, rounded if `rounds` is set: float32 [T, K]."""
    if rounds is None:
        return rows.float()
    values, scales = rounds(rows.float())
    if scales.dim() == 2:
        scales = scales.repeat_interleave(block_float8.BLOCK, 1)[:, : rows.shape[1]]
    return values.float() * scales.view(len(rows), -1)


def _matmul(module: Any, x: Tensor, rounds: RoundRows | None) -> Tensor:
    rows = _rounded_rows(x.flatten(0, -2), rounds)
    y = rows @ (module.weight if is_conv1d(module) else module.weight.T)
    if module.bias is not None:
        y = y + module.bias.float()
    return y.unflatten(0, x.shape[:-1]).to(x.dtype)
