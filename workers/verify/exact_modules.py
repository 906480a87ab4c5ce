"""transformers' modules in float64, on their own weights: the truth of a verification.

Most modules have a form of their own here; others run their own code with float64 in place of float32.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from oarlock.workers.model_files.tensor_names import NO_NAMES, TensorNames
from oarlock.workers.verify.dequantised_reference import (
    apply_gate,
    has_gate,
    is_conv1d,
    is_experts,
    is_router,
    weighs_inputs,
)

# Modules that convert their inputs to float32, whatever their dtype is.
_COMPUTE_IN_FLOAT32 = ("DeepseekV2Attention", "Llama4TextAttention")
# Modules that convert the input of a module inside to the dtype of its weight.
_CONVERT_INPUTS = {"Mamba2Block": "norm", "NemotronHBlock": "norm", "Mamba2ForCausalLM": "lm_head"}
# Ends of the names of modules with a recurrent state.
_RECURRENT = (
    "GatedDeltaNet", "BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "Mamba2Mixer", "ShortConv",
    "DeltaAttention", "ForgetGate",
)  # fmt: skip
# Ends of the names of ignored modules that choose all tokens of the contexts that are served, whatever they compute.
_CHOOSING = ("Indexer",)
_WIDENED_ELSEWHERE = {"sinks", "expert_bias"}  # parameters that `exact_attention` and routers widen
_ROWS = 8192  # rows of a weight that are widened to float64 at once


@contextmanager
def in_float64(model: nn.Module, names: TensorNames = NO_NAMES) -> Generator[None]:
    """Make `model` compute in float64 on its own weights, within the context. Attention needs `exact_attention` too.

    `names`: its modules by name; ignored modules, such as a tower for images, stay as they are.

    Each module widens its weight while it computes, a block of rows at a time, so that no second copy of the model has
    to fit. Norms, which transformers computes in float32 for any dtype of the model, are written out. Only cos and sin
    stay in float32: they are part of the model's definition.
    """
    changed = []
    for name, module in model.named_modules():
        if names.rename(name) is not None:
            forward = _exact_forward(module)
        else:
            forward = partial(_in_own_dtype, module) if type(module).__name__.endswith(_CHOOSING) else None
        if forward is not None:
            module.forward = forward
            changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


class Widened(TorchFunctionMode):
    """Torch function mode that replaces float32 by float64 in all calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func: Any = Tensor.double if func is Tensor.float else func
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **named)


class _WithoutHooks(nn.Module):
    """A module's own forward, without its hooks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **named: Any) -> Any:
        return type(self.inner).forward(self.inner, *args, **named)


def _own_forward(module: nn.Module, *args: Any, **named: Any) -> Any:
    """Call the module's own forward, on its weights in float64."""
    plain = _WithoutHooks(module)
    with Widened():
        return functional_call(plain, {name: each.double() for name, each in plain.named_parameters()}, args, named)


def _recurrent_forward(module: nn.Module, *args: Any, **named: Any) -> Any:
    """Call the own forward of a recurrent module on its own weights and its convolution's in float64. The modules
    inside, such as linear layers, have their own float64 forms."""
    plain = _WithoutHooks(module)
    own = {name: each.double() for name, each in plain.inner.named_parameters(recurse=False)}
    own |= {
        f"{name}.{kind}": each.double()
        for name, inside in plain.inner.named_children()
        if isinstance(inside, nn.Conv1d)
        for kind, each in inside.named_parameters()
    }
    with Widened():
        return functional_call(plain, {f"inner.{name}": each for name, each in own.items()}, args, named)


def _widened(module: nn.Module, *args: Any, **named: Any) -> Any:
    """Call the module's own forward with float64 in place of float32."""
    with Widened():
        return type(module).forward(module, *args, **named)


def _in_own_dtype(module: nn.Module, *args: Any, **named: Any) -> Any:
    """Call the module's own forward with its inputs in the dtype of its weights."""
    dtype = next(module.parameters()).dtype

    def narrowed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(narrowed(one) for one in value)
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    given = {name: narrowed(value) for name, value in named.items()}
    return type(module).forward(module, *narrowed(args), **given)


def _unconverted(module: nn.Module, inside: str, *args: Any, **named: Any) -> Any:
    """Call the module's own forward with the weight of the module `inside` in float64, to whose dtype it converts."""
    plain = _WithoutHooks(module)
    weight = plain.inner.get_parameter(f"{inside}.weight").double()
    with Widened():
        return functional_call(plain, {f"inner.{inside}.weight": weight}, args, named)


def _exact_weighing_experts(module: Any, x: Tensor) -> Tensor:
    """Compute experts that each get all tokens: `x` [E * T, hidden], in the order of experts -> the same shape."""
    results = []
    for expert, rows in enumerate(x.view(len(module.gate_up_proj), -1, x.shape[-1])):
        gate, up = (rows @ module.gate_up_proj[expert].double()).chunk(2, dim=-1)
        results.append((module.act_fn(gate) * up) @ module.down_proj[expert].double())
    return torch.cat(results)


def _exact_experts(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute the experts one after the other, each widened by itself. `x` [T, hidden], `ids` and `weights` [T, k]."""
    total = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        rows, choices = (ids == expert).nonzero(as_tuple=True)
        if expert >= len(module.down_proj):  # its result is its input
            total.index_add_(0, rows, weights[rows, choices, None] * x[rows])
            continue
        if not has_gate(module):
            up, down = (weight[expert].double() for weight in (module.up_proj, module.down_proj))
            result = module.act_fn(x[rows] @ up.T) @ down.T
            total.index_add_(0, rows, weights[rows, choices, None] * result)
            continue
        gate_up, down = (weight[expert].double() for weight in (module.gate_up_proj, module.down_proj))
        has_bias = getattr(module, "has_bias", False)
        if not getattr(module, "is_transposed", False):
            gate_up, down = gate_up.T, down.T
        both = x[rows] @ gate_up
        if has_bias:
            both = both + module.gate_up_proj_bias[expert].double()
        result = apply_gate(module, both) @ down
        if has_bias:
            result = result + module.down_proj_bias[expert].double()
        total.index_add_(0, rows, weights[rows, choices, None] * result)
    return total


def _exact_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the float64 version of a module with weights; None for a module without weights, which computes in the
    dtype of its inputs."""
    if is_router(module):  # some are linear layers with a forward of their own
        return partial(_own_forward, module)
    if type(module).__name__ in _COMPUTE_IN_FLOAT32 or hasattr(module, "enable_moe_fp32_combine"):
        return partial(_widened, module)
    if type(module).__name__ in _CONVERT_INPUTS:
        return partial(_unconverted, module, _CONVERT_INPUTS[type(module).__name__])
    if type(module).__name__.endswith(_RECURRENT):
        return partial(_recurrent_forward, module)
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return lambda x: _linear(module, x)
    if isinstance(module, nn.Embedding) and type(module).__name__.endswith("PositionalEmbedding"):
        return lambda *args, **named: type(module).forward(module, *args, **named).double()
    if isinstance(module, nn.Embedding):
        scale = 1.0
        if hasattr(module, "embed_scale"):  # Gemma rounds its scale to the dtype, as part of the model's definition
            scale = torch.as_tensor(module.embed_scale).to(module.weight.dtype).item()
        return lambda ids: F.embedding(ids, module.weight).double() * scale
    if is_experts(module):
        return partial(_exact_weighing_experts if weighs_inputs(module) else _exact_experts, module)
    if "LayerNorm" in type(module).__name__ or type(module).__name__.endswith("RMSNormGated"):
        return partial(_own_forward, module)
    if type(module).__name__.endswith("RMSNorm") and not getattr(module, "with_scale", True):
        return lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.eps)
    if type(module).__name__.endswith("RMSNorm"):
        weight: Any = module.weight
        scaled = module(
            torch.ones_like(weight)
        )  # shows whether it scales by the weight, or by 1 + weight as Gemma's norms do
        offset = round((scaled - weight).double().mean().item())
        return lambda x: _norm(module, x, offset)
    if type(module).__name__.endswith("MoeStatics"):  # part of a router, which widens it
        return None
    if isinstance(module, nn.Conv1d):  # part of a recurrent module, which widens it
        return None
    if {name for name, _ in module.named_parameters(recurse=False)} - _WIDENED_ELSEWHERE:
        raise NotImplementedError(f"no float64 form of {type(module).__name__} is known")
    return None


def _linear(module: Any, x: Tensor) -> Tensor:
    bias = None if module.bias is None else module.bias.double().split(_ROWS)
    blocks = (module.weight.T if is_conv1d(module) else module.weight).split(_ROWS)
    parts = [F.linear(x, block.double(), None if bias is None else bias[i]) for i, block in enumerate(blocks)]
    return torch.cat(parts, dim=-1)


def _norm(module: Any, x: Tensor, offset: float) -> Tensor:
    """Divide the rows of `x` by their root mean square, scale them by `offset` + weight, and add the bias if there is
    one."""
    eps: float = module.eps if hasattr(module, "eps") else module.variance_epsilon
    normed = (offset + module.weight.double()) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return normed if getattr(module, "bias", None) is None else normed + module.bias.double()


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with `query` [1, H, T, D] to `key`, `value` [1, K, N, D] -> [1, T, H, D]. No mask means causal: the
    queries are the last T of N tokens. `sinks` [H]: a score of each head that has no value."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = query @ key.transpose(2, 3) * scale  # [1, H, T, N]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        rows, columns = scores.shape[-2:]
        mask = torch.ones((rows, columns), dtype=torch.bool, device=scores.device).tril(columns - rows)
    is_bool = mask.dtype == torch.bool
    scores = scores.masked_fill(~mask, float("-inf")) if is_bool else scores + mask
    if sinks is not None:
        of_heads = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, of_heads), dim=-1)  # [1, H, T, N + 1]
    return (scores.softmax(dim=-1)[..., : value.shape[2]] @ value).transpose(1, 2).contiguous()
