"""Recurrent operations by the fastest kernel of a device: the functions of `reference.py`, which judges them."""

from types import ModuleType

from torch import Tensor

from oarlock.workers.kernels.triton import availability
from oarlock.workers.recurrent import reference
from oarlock.workers.recurrent.states import StateStep

__all__ = ["causal_convolution", "gated_delta_rule", "gated_norm", "mamba2"]


def _kernels(x: Tensor) -> ModuleType:
    """Return the module whose functions serve the device of `x`."""
    if availability.can_serve(x.device):
        from oarlock.workers.recurrent import triton_operations  # Triton is only installed on some machines

        return triton_operations
    return reference


def causal_convolution(
    x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None, step: StateStep, *, silu: bool
) -> Tensor:
    """Return the convolution of `x` [T, channels], and write its states."""
    return _kernels(x).causal_convolution(x, states, weight, bias, step, silu=silu)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, step: StateStep
) -> Tensor:
    """Return the results of the gated delta rule [T, Hv, value width], and write its states."""
    return _kernels(v).gated_delta_rule(q, k, v, log_decay, beta, states, step)


def mamba2(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, states: Tensor, step: StateStep
) -> Tensor:
    """Return the results of Mamba 2's recurrence [T, heads, head width], and write its states."""
    return _kernels(x).mamba2(x, dt, a, b, c, d, states, step)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gates_first: bool) -> Tensor:
    """Return the gated norm of `x` [T, groups, width]."""
    return _kernels(x).gated_norm(x, gate, weight, eps, gates_first=gates_first)
