"""Recurrent operations as Triton kernels: the functions of `reference.py`, which judges them.

Needs Triton. Nothing is read back from the device, and the launches depend on shapes only, so graphs can hold them.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from oarlock.workers.kernels.triton.recurrent import convolution, delta_rule, mamba, norm
from oarlock.workers.recurrent.reference import KEY_EPSILON
from oarlock.workers.recurrent.states import StateStep

# Any, because calling a kernel compiles it: no annotation describes its arguments.
_convolve: Any = convolution.convolve
_apply_delta_rule: Any = delta_rule.apply_delta_rule
_apply_mamba: Any = mamba.apply_mamba
_norm_group: Any = norm.norm_group


def causal_convolution(
    x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None, step: StateStep, *, silu: bool
) -> Tensor:
    """Return the convolution of `x` [T, channels]. Arguments as in `reference.py`.

    Sequences without tokens leave their slots as they are.
    """
    (tokens, channels), taps = x.shape, weight.shape[1]
    assert states.is_contiguous() and states.dtype == x.dtype and states.shape[1:] == (channels, taps - 1)
    assert weight.is_contiguous() and weight.dtype == torch.float32
    x = _rows(x)
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    constants = convolution.convolution_constants(channels, taps)
    _convolve[(tokens, triton.cdiv(channels, constants["BLOCK"]))](
        x, states, weight, weight if bias is None else bias, out, *_slots(step), len(step.reads), x.stride(0),
        **constants, BIAS=bias is not None, SILU=silu,
    )  # fmt: skip
    return out


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, step: StateStep
) -> Tensor:
    """Return the results of the gated delta rule, [T, Hv, value width]. Arguments as in `reference.py`."""
    (tokens, heads, value), (_, key_heads, key) = v.shape, k.shape
    assert states.is_contiguous() and states.dtype == torch.float32 and heads % key_heads == 0
    assert log_decay.dtype == beta.dtype == torch.float32
    q, k, v, log_decay, beta = (_rows(x) for x in (q, k, v, log_decay, beta))
    out = torch.empty((tokens, heads, value), dtype=v.dtype, device=v.device)
    constants = delta_rule.delta_constants(heads, key_heads, key, value)
    strides = (x.stride(0) for x in (q, k, v, log_decay, beta))
    _apply_delta_rule[(triton.cdiv(value, constants["BLOCK_V"]), heads, len(step.reads))](
        q, k, v, log_decay, beta, states, out, *_slots(step), *strides, KEY_EPSILON, key**-0.5, **constants
    )
    return out


def mamba2(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, states: Tensor, step: StateStep
) -> Tensor:
    """Return the results of Mamba 2's recurrence, [T, heads, head width]. Arguments as in `reference.py`."""
    (tokens, heads, width), (_, groups, state) = x.shape, b.shape
    assert states.is_contiguous() and states.dtype == torch.float32 and heads % groups == 0
    assert dt.dtype == a.dtype == torch.float32 and a.is_contiguous()
    x, dt, b, c = (_rows(each) for each in (x, dt, b, c))
    out = torch.empty((tokens, heads, width), dtype=x.dtype, device=x.device)
    constants = mamba.mamba_constants(heads, groups, width, state)
    strides = (each.stride(0) for each in (x, dt, b, c))
    _apply_mamba[(triton.cdiv(width, constants["BLOCK_W"]), heads, len(step.reads))](
        x, dt, a, b, c, a if d is None else d, states, out, *_slots(step), *strides, **constants,
        SKIP=d is not None,
    )  # fmt: skip
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gates_first: bool) -> Tensor:
    """Return the gated norm of `x` [T, groups, width]. Arguments as in `reference.py`."""
    tokens, groups, width = x.shape
    assert weight.is_contiguous() and weight.dtype == torch.float32 and gate.shape == x.shape
    x, gate = _rows(x), _rows(gate)
    out = torch.empty((tokens, groups, width), dtype=x.dtype, device=x.device)
    constants = norm.norm_constants(groups, width)
    _norm_group[(tokens, groups)](
        x, gate, weight, out, eps, x.stride(0), gate.stride(0), **constants, GATES_FIRST=gates_first
    )
    return out


def _slots(step: StateStep) -> tuple[Tensor, ...]:
    """Return the tensors of `step` in the order of the kernels' arguments."""
    return step.starts, step.reads, step.writes, step.save_starts, step.save_lens, step.save_slots


def _rows(x: Tensor) -> Tensor:
    """Return `x` [T, ...], copied if a row's elements are not next to each other. Rows may be any distance apart."""
    stride = 1
    for size, found in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size > 1 and found != stride:
            return x.contiguous()
        stride *= size
    return x
