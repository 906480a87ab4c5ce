"""Recurrent operations as Triton kernels. `reference.py` is the reference implementation.

Needs Triton. Nothing is read back from the device, and the launches depend on shapes only, so graphs can hold them.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from oarlock.workers.kernels.triton.recurrent import convolution, delta_rule, gates, mamba, norm
from oarlock.workers.recurrent.reference import KEY_EPSILON
from oarlock.workers.recurrent.states import StateStep

# Any, because calling a kernel compiles it: no annotation describes its arguments.
_convolve: Any = convolution.convolve
_apply_delta_rule: Any = delta_rule.apply_delta_rule
_apply_mamba: Any = mamba.apply_mamba
_compute_delta_gates: Any = gates.compute_delta_gates
_compute_kimi_gates: Any = gates.compute_kimi_gates
_compute_mamba_steps: Any = gates.compute_mamba_steps
_apply_silu_gate: Any = gates.apply_silu_gate
_norm_group: Any = norm.norm_group
_sum_squares: Any = norm.sum_squares
_norm_head: Any = norm.norm_head


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
    constants = delta_rule.delta_constants(heads, key_heads, key, value, decays_channels=log_decay.dim() == 3)
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


def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, beta_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the decay and the rate of writes, float32 [T, Hv] twice, for projections [T, Hv]."""
    a, b = _rows(a), _rows(b)
    log_decay, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    assert a_log.is_contiguous() and dt_bias.is_contiguous() and a.shape == b.shape
    _compute_delta_gates[(triton.cdiv(a.numel(), gates.BLOCK),)](
        a, b, a_log, dt_bias, log_decay, beta, a.numel(), a.stride(0), b.stride(0), beta_scale, HEADS=a.shape[1],
        BLOCK=gates.BLOCK,
    )  # fmt: skip
    return log_decay, beta


def kimi_gates(
    f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """Return the logarithms of channels' decays, float32 [T, Hv, key width], and the rates of writes, float32 [T, Hv],
    for projections of these shapes."""
    f, b = _rows(f), _rows(b)
    (tokens, heads, width), block = f.shape, gates.BLOCK
    log_decay, beta = (torch.empty(each.shape, dtype=torch.float32, device=f.device) for each in (f, b))
    assert a_log.is_contiguous() and dt_bias.is_contiguous() and dt_bias.shape == (heads, width)
    _compute_kimi_gates[(tokens, triton.cdiv(heads * width, block))](
        f, b, a_log, dt_bias, log_decay, beta, f.stride(0), b.stride(0),
        0.0 if lower_bound is None else lower_bound, HEADS=heads, WIDTH=width, BLOCK=block,
        BOUNDED=lower_bound is not None,
    )  # fmt: skip
    return log_decay, beta


def mamba_steps(dt: Tensor, bias: Tensor | None, least: float, most: float) -> Tensor:
    """Return the step sizes of Mamba 2, float32 [T, heads], for `dt` [T, heads]."""
    dt = _rows(dt)
    steps = torch.empty(dt.shape, dtype=torch.float32, device=dt.device)
    _compute_mamba_steps[(triton.cdiv(dt.numel(), gates.BLOCK),)](
        dt, steps if bias is None else bias, steps, dt.numel(), dt.stride(0), least, most, HEADS=dt.shape[1],
        BLOCK=gates.BLOCK, BIAS=bias is not None,
    )  # fmt: skip
    return steps


def silu_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return `x` [T, ...] times the SiLU of `gate`, both of one shape."""
    x, gate = _rows(x), _rows(gate)
    width = math.prod(x.shape[1:])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _apply_silu_gate[(len(x), triton.cdiv(width, gates.BLOCK))](
        x, gate, out, x.stride(0), gate.stride(0), WIDTH=width, BLOCK=gates.BLOCK
    )
    return out


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gates_first: bool, sigmoid: bool = False
) -> Tensor:
    """Return the gated norm of `x` [T, groups, width]. Arguments as in `reference.py`."""
    tokens, groups, width = x.shape
    assert weight.is_contiguous() and weight.dtype == torch.float32 and gate.shape == x.shape
    x, gate = _rows(x), _rows(gate)
    out = torch.empty((tokens, groups, width), dtype=x.dtype, device=x.device)
    constants = norm.norm_constants(groups, width)
    _norm_group[(tokens, groups)](
        x, gate, weight, out, eps, x.stride(0), gate.stride(0), **constants, GATES_FIRST=gates_first,
        SIGMOID=sigmoid,
    )  # fmt: skip
    return out


def gated_squares(x: Tensor, gate: Tensor, *, gates_first: bool) -> Tensor:
    """Return the sum of squares of each head of `x` [T, heads, width], for a gated norm over several heads."""
    tokens, heads, width = x.shape
    x, gate = _rows(x), _rows(gate)
    squares = torch.empty((tokens, heads), dtype=torch.float32, device=x.device)
    _sum_squares[(tokens, heads)](
        x, gate, squares, x.stride(0), gate.stride(0), **norm.norm_constants(heads, width), GATES_FIRST=gates_first
    )
    return squares


def gated_norm_of_heads(
    x: Tensor, gate: Tensor, squares: Tensor, weight: Tensor, eps: float, *, gates_first: bool
) -> Tensor:
    """Return the gated norm of `x` [T, heads, width] over groups of several heads, whose `squares` are known.

    `squares` float32 [T, groups, heads of a group]: also of heads that other ranks hold.
    """
    tokens, heads, width = x.shape
    (_, groups, members), squares = squares.shape, squares.contiguous()
    assert weight.is_contiguous() and weight.dtype == squares.dtype == torch.float32 and heads % groups == 0
    x, gate = _rows(x), _rows(gate)
    out = torch.empty((tokens, heads, width), dtype=x.dtype, device=x.device)
    constants = norm.norm_constants(heads, width) | {"NORMS": groups, "MEMBERS": members}
    _norm_head[(tokens, heads)](
        x, gate, squares, weight, out, eps, x.stride(0), gate.stride(0), **constants,
        BLOCK_M=triton.next_power_of_2(members), GATES_FIRST=gates_first,
    )  # fmt: skip
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
