"""transformers' own model in float64, on the very weights it was loaded with, without a second copy of them.

Each leaf widens its weight while it computes, a block of rows at a time, so that a model whose float64 form would not
fit is no obstacle. Norms and attention, which transformers computes in float32 whatever the model's dtype, are written
out here. Only cos and sin keep float32: they are part of what the model means.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROWS = 8192  # of a weight that are widened at once


@contextmanager
def in_float64(model: nn.Module) -> Generator[None]:
    """While this lasts, `model` computes in float64. Attention needs `exact_attention` as well."""
    changed = []
    for module in model.modules():
        forward = _exact_forward(module)
        if forward is not None:
            module.forward = forward
            changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _exact_forward(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The float64 form of a leaf; None for modules that own no weights and compute in the dtype they are given."""
    if isinstance(module, nn.Linear):
        return lambda x: _linear(module, x)
    if isinstance(module, nn.Embedding):
        scale = 1.0
        if hasattr(module, "embed_scale"):  # Gemma's, which it rounds to the dtype: that is part of what it means
            scale = torch.as_tensor(module.embed_scale).to(module.weight.dtype).item()
        return lambda ids: F.embedding(ids, module.weight).double() * scale
    if type(module).__name__.endswith("RMSNorm"):
        return lambda x: _norm(module, x)
    if any(True for _ in module.parameters(recurse=False)):
        raise NotImplementedError(f"no float64 form of {type(module).__name__} is known")
    return None


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    bias = None if module.bias is None else module.bias.double().split(_ROWS)
    blocks = module.weight.split(_ROWS)
    parts = [F.linear(x, block.double(), None if bias is None else bias[i]) for i, block in enumerate(blocks)]
    return torch.cat(parts, dim=-1)


def _norm(module: Any, x: Tensor) -> Tensor:
    eps: float = module.eps if hasattr(module, "eps") else module.variance_epsilon
    weight: Tensor = module.weight.double()
    if type(module).__name__.startswith("Gemma"):
        weight = 1.0 + weight
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def exact_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """`query` [1, H, T, D] over `key`, `value` [1, K, N, D] -> [1, T, H, D]. No mask means causal: the queries are the
    last T of N tokens."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = query @ key.transpose(2, 3) * scale  # [1, H, T, T]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        rows, columns = scores.shape[-2:]
        mask = torch.ones((rows, columns), dtype=torch.bool, device=scores.device).tril(columns - rows)
    is_bool = mask.dtype == torch.bool
    scores = scores.masked_fill(~mask, float("-inf")) if is_bool else scores + mask
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)
