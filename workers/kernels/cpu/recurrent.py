"""Recurrent operations with the C++ kernels (`csrc/recurrent/`): the functions of `workers/recurrent/reference.py`.

Every token has one order of operations, so results do not depend on the batch, on how a prompt is divided into steps,
or on the number of threads. States of the gated delta rule and of Mamba 2 are float32.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.gemm import ELEMENT_TYPES
from oarlock.workers.kernels.cpu.structures import (
    CConvolution,
    CDeltaHeads,
    CGatedNorm,
    CKimiGates,
    CMambaHeads,
    CStateStep,
)

TAPS = range(2, 9)  # of the convolution: the cases of `convolve` in csrc/recurrent/convolution.cpp


class StateStep(Protocol):
    """A `StateStep` of `workers/recurrent/states.py`."""

    @property
    def starts(self) -> Tensor: ...

    @property
    def reads(self) -> Tensor: ...

    @property
    def writes(self) -> Tensor: ...

    @property
    def save_starts(self) -> Tensor: ...

    @property
    def save_lens(self) -> Tensor: ...

    @property
    def save_slots(self) -> Tensor: ...


def can_serve(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernels support rows of `dtype` on `device`, and could be built here."""
    return dtype in ELEMENT_TYPES and device.type == "cpu" and library.provides("oarlock_mamba2", dtype)


def computes_gates(device: torch.device) -> bool:
    """Return whether `delta_gates` and `mamba_steps`, which do not depend on an element type, can be used."""
    return device.type == "cpu" and library.provides("oarlock_delta_gates")


def state_step(step: StateStep) -> CStateStep:
    """Return the structure that points to the arrays of `step`, which must stay alive."""
    arrays = (step.starts, step.reads, step.writes, step.save_starts, step.save_lens, step.save_slots)
    assert all(array.dtype == torch.int32 and array.is_contiguous() for array in arrays)
    return CStateStep(*map(Tensor.data_ptr, arrays), len(step.reads))


def causal_convolution(
    x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None, step: StateStep, *, silu: bool
) -> Tensor:
    """Convolve `x` [T, channels], as the reference describes."""
    channels, taps = weight.shape
    assert x.stride(1) == 1 and x.shape[1] == channels and taps in TAPS
    assert states.dtype == x.dtype and states.shape[1:] == (channels, taps - 1) and states.is_contiguous()
    slots = state_step(step)
    layer = CConvolution(_vector(weight), None if bias is None else _vector(bias), channels, taps, silu)
    y = torch.empty(x.shape, dtype=x.dtype)
    _function(library.library(x.dtype), "oarlock_convolve")(
        ctypes.addressof(layer), x.data_ptr(), x.stride(0), states.data_ptr(), y.data_ptr(),
        ctypes.addressof(slots), ELEMENT_TYPES[x.dtype],
    )  # fmt: skip
    return y


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, step: StateStep
) -> Tensor:
    """Apply the gated delta rule, as the reference describes."""
    (rows, key_heads, key_width), (value_heads, value_width) = k.shape, v.shape[1:]
    assert q.shape == k.shape and q.dtype == k.dtype == v.dtype
    decays_channels = log_decay.dim() == 3
    channels = (key_width,) if decays_channels else ()
    assert beta.shape == (rows, value_heads) and log_decay.shape == (rows, value_heads, *channels)
    assert states.shape[1:] == (value_heads, key_width, value_width)
    slots = state_step(step)
    layer = CDeltaHeads(key_heads, value_heads, key_width, value_width, decays_channels)
    y = torch.empty(v.shape, dtype=v.dtype)
    _function(library.library(v.dtype), "oarlock_gated_delta_rule")(
        ctypes.addressof(layer), *_heads(q), *_heads(k), *_heads(v), _vector(log_decay), _vector(beta),
        _vector(states), y.data_ptr(), ctypes.addressof(slots), ELEMENT_TYPES[v.dtype],
    )  # fmt: skip
    return y


def mamba2(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, states: Tensor, step: StateStep
) -> Tensor:
    """Apply Mamba 2's recurrence, as the reference describes."""
    (rows, heads, head_width), (groups, state_width) = x.shape, b.shape[1:]
    assert b.shape == c.shape and x.dtype == b.dtype == c.dtype and dt.shape == (rows, heads)
    assert states.shape[1:] == (heads, head_width, state_width)
    slots = state_step(step)
    layer = CMambaHeads(_vector(a), None if d is None else _vector(d), heads, groups, head_width, state_width)
    y = torch.empty(x.shape, dtype=x.dtype)
    _function(library.library(x.dtype), "oarlock_mamba2")(
        ctypes.addressof(layer), *_heads(x), *_heads(b), *_heads(c), _vector(dt), _vector(states), y.data_ptr(),
        ctypes.addressof(slots), ELEMENT_TYPES[x.dtype],
    )  # fmt: skip
    return y


def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, beta_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the decay and beta of the gated delta rule, as the reference describes."""
    a, b = a.float(), b.float()
    assert a.shape == b.shape and a.stride() == b.stride() and a.stride(1) == 1
    log_decay, beta = (torch.empty(a.shape, dtype=torch.float32) for _ in range(2))
    _function(library.library(), "oarlock_delta_gates")(
        a.data_ptr(), b.data_ptr(), a.stride(0), _vector(a_log), _vector(dt_bias), beta_scale,
        log_decay.data_ptr(), beta.data_ptr(), *a.shape,
    )  # fmt: skip
    return log_decay, beta


def kimi_gates(
    f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """Return the decays of channels and beta of Kimi delta attention, as the reference describes."""
    f, b = f.float().contiguous(), b.float()
    (rows, heads, width), bound = f.shape, 0.0 if lower_bound is None else lower_bound
    assert b.shape == (rows, heads) and b.stride(1) == 1 and a_log.shape == (heads,) and dt_bias.shape == (heads, width)
    gates = CKimiGates(_vector(a_log), _vector(dt_bias), heads, width, bound)
    log_decay, beta = (torch.empty(each.shape, dtype=torch.float32) for each in (f, b))
    _function(library.library(), "oarlock_kimi_gates")(
        ctypes.addressof(gates), f.data_ptr(), b.data_ptr(), b.stride(0), log_decay.data_ptr(), beta.data_ptr(), rows
    )
    return log_decay, beta


def mamba_steps(dt: Tensor, bias: Tensor | None, least: float, most: float) -> Tensor:
    """Return the step sizes of Mamba 2, as the reference describes."""
    dt = dt.float()
    assert dt.stride(1) == 1
    y = torch.empty(dt.shape, dtype=torch.float32)
    _function(library.library(), "oarlock_mamba_steps")(
        dt.data_ptr(), dt.stride(0), None if bias is None else _vector(bias), least, most, y.data_ptr(), *dt.shape
    )
    return y


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gates_first: bool, sigmoid: bool = False
) -> Tensor:
    """Norm and gate `x` [T, groups, width], as the reference describes."""
    norm = _norm(x, weight, eps, gates_first=gates_first)
    norm.sigmoid = sigmoid
    return _normed(norm, x, gate)


def silu_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return `x` [T, heads, width] times the SiLU of `gate`, as the reference describes."""
    return _normed(_norm(x, None, 0.0), x, gate)


def gated_squares(x: Tensor, gate: Tensor, *, gates_first: bool) -> Tensor:
    """Return the sums of squares of the heads of `x` [T, heads, width], as the reference describes."""
    assert x.is_contiguous() and gate.shape == x.shape and gate.dtype == x.dtype
    squares = torch.empty(x.shape[:2], dtype=torch.float32)
    norm = _norm(x, None, 0.0, gates_first=gates_first)
    _function(library.library(x.dtype), "oarlock_gated_squares")(
        ctypes.addressof(norm), x.data_ptr(), *_heads(gate), squares.data_ptr(), len(x), ELEMENT_TYPES[x.dtype]
    )
    return squares


def gated_norm_of_heads(
    x: Tensor, gate: Tensor, squares: Tensor, weight: Tensor, eps: float, *, gates_first: bool
) -> Tensor:
    """Norm and gate groups of heads of `x` [T, heads, width], as the reference describes."""
    assert squares.dtype == torch.float32 and len(squares) == len(x)
    norm = _norm(x, weight, eps, gates_first=gates_first, group_heads=squares.shape[2])
    return _normed(norm, x, gate, _heads(squares))


def _norm(
    x: Tensor, weight: Tensor | None, eps: float, *, gates_first: bool = False, group_heads: int = 1
) -> CGatedNorm:
    heads, width = x.shape[1:]
    at = None if weight is None else _vector(weight)
    return CGatedNorm(at, heads, width, eps, gates_first, group_heads, heads, 0)


def _normed(norm: CGatedNorm, x: Tensor, gate: Tensor, squares: tuple[int | None, int] = (None, 0)) -> Tensor:
    assert x.is_contiguous() and gate.shape == x.shape and gate.dtype == x.dtype
    y = torch.empty(x.shape, dtype=x.dtype)
    _function(library.library(x.dtype), "oarlock_gated_norm")(
        ctypes.addressof(norm), x.data_ptr(), *_heads(gate), *squares, y.data_ptr(), len(x), ELEMENT_TYPES[x.dtype]
    )
    return y


def _vector(values: Tensor) -> int:
    """Return the address of contiguous float32 values."""
    assert values.dtype == torch.float32 and values.is_contiguous()
    return values.data_ptr()


def _heads(rows: Tensor) -> tuple[int, int]:
    """Return the address of rows [T, heads, width], whose heads are contiguous, and their distance in elements."""
    assert rows.stride(2) == 1 and (rows.shape[1] == 1 or rows.stride(1) == rows.shape[2])
    return rows.data_ptr(), rows.stride(0)


@cache
def _function(kernels: ctypes.CDLL, name: str) -> Callable[..., None]:
    pointer, number, real, switch = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
    rows = [pointer, number]
    arguments = {
        "oarlock_convolve": [pointer, *rows, *[pointer] * 3, switch],
        "oarlock_gated_delta_rule": [pointer, *rows * 3, *[pointer] * 5, switch],
        "oarlock_mamba2": [pointer, *rows * 3, *[pointer] * 4, switch],
        "oarlock_delta_gates": [pointer, *rows, *[pointer] * 2, real, *[pointer] * 2, *[number] * 2],
        "oarlock_kimi_gates": [pointer, pointer, *rows, *[pointer] * 2, number],
        "oarlock_mamba_steps": [*rows, pointer, real, real, pointer, *[number] * 2],
        "oarlock_gated_norm": [pointer, pointer, *rows, *rows, pointer, number, switch],
        "oarlock_gated_squares": [pointer, pointer, *rows, pointer, number, switch],
    }
    function = getattr(kernels, name)
    function.argtypes, function.restype = arguments[name], None
    return function
