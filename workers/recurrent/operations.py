"""Recurrent operations by the fastest kernels of a device. `reference.py` is the reference implementation."""

from types import ModuleType

import torch
from torch import Tensor

from oarlock.workers.kernels.cpu import recurrent as cpu
from oarlock.workers.kernels.triton import availability
from oarlock.workers.recurrent import reference
from oarlock.workers.recurrent.states import StateStep


def _kernels(x: Tensor, *, serves_cpu: bool) -> ModuleType:
    """Return the module whose functions serve the device of `x`. `serves_cpu`: whether the C++ kernels do."""
    if availability.can_serve(x.device):
        from oarlock.workers.recurrent import triton_operations  # Triton is only installed on some machines

        return triton_operations
    return cpu if serves_cpu else reference


def causal_convolution(
    x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None, step: StateStep, *, silu: bool
) -> Tensor:
    """Return the depthwise convolution of `x` [T, channels] over a token and the tokens before it."""
    kernels = _kernels(x, serves_cpu=cpu.can_serve(x.dtype, x.device) and weight.shape[1] in cpu.TAPS)
    return kernels.causal_convolution(x, states, weight, bias, step, silu=silu)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, step: StateStep
) -> Tensor:
    """Return the results of the gated delta rule [T, Hv, value width]. `log_decay` [T, Hv], or [T, Hv, key width]."""
    kernels = _kernels(v, serves_cpu=cpu.can_serve(v.dtype, v.device))
    return kernels.gated_delta_rule(q, k, v, log_decay, beta, states, step)


def mamba2(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, states: Tensor, step: StateStep
) -> Tensor:
    """Return the results of Mamba 2's recurrence [T, heads, head width]."""
    kernels = _kernels(x, serves_cpu=cpu.can_serve(x.dtype, x.device))
    return kernels.mamba2(x, dt, a, b, c, d, states, step)


def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, beta_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the decay and beta of the gated delta rule, float32 [T, Hv] twice."""
    kernels = _kernels(a, serves_cpu=cpu.computes_gates(a.device) and a.dtype != torch.float64)
    return kernels.delta_gates(a, b, a_log, dt_bias, beta_scale=beta_scale)


def kimi_gates(
    f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """Return the logarithm of each channel's decay, float32 [T, Hv, key width], and beta, float32 [T, Hv]."""
    kernels = _kernels(f, serves_cpu=cpu.computes_gates(f.device) and f.dtype != torch.float64)
    return kernels.kimi_gates(f, b, a_log, dt_bias, lower_bound=lower_bound)


def mamba_steps(dt: Tensor, bias: Tensor | None, least: float, most: float) -> Tensor:
    """Return the step sizes of Mamba 2, float32 [T, heads]."""
    kernels = _kernels(dt, serves_cpu=cpu.computes_gates(dt.device) and dt.dtype != torch.float64)
    return kernels.mamba_steps(dt, bias, least, most)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gates_first: bool, sigmoid: bool = False
) -> Tensor:
    """Return the RMS norm of `x` [T, groups, width] over each group, times the SiLU or the sigmoid of `gate`."""
    kernels = _kernels(x, serves_cpu=cpu.can_serve(x.dtype, x.device))
    return kernels.gated_norm(x, gate, weight, eps, gates_first=gates_first, sigmoid=sigmoid)


def gated_squares(x: Tensor, gate: Tensor, *, gates_first: bool) -> Tensor:
    """Return the sum of squares of each head for a gated norm over several heads: float32 [T, heads]."""
    kernels = _kernels(x, serves_cpu=cpu.can_serve(x.dtype, x.device))
    return kernels.gated_squares(x, gate, gates_first=gates_first)


def gated_norm_of_heads(
    x: Tensor, gate: Tensor, squares: Tensor, weight: Tensor, eps: float, *, gates_first: bool
) -> Tensor:
    """Return the gated norm of `x` [T, heads, width] over groups of heads whose `squares` are known."""
    kernels = _kernels(x, serves_cpu=cpu.can_serve(x.dtype, x.device))
    return kernels.gated_norm_of_heads(x, gate, squares, weight, eps, gates_first=gates_first)


def silu_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return `x` times the SiLU of `gate`, both of one shape."""
    kernels = _kernels(x, serves_cpu=cpu.can_serve(x.dtype, x.device))
    return kernels.silu_gate(x, gate)
