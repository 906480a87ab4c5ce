"""Gates of recurrent layers: decays and rates of writes of the gated delta rule, step sizes of Mamba 2, a SiLU gate.

The exponential functions of decays and steps are computed in float64, because a state keeps their errors for as long as
it keeps a token. These are few values, except the decays of channels, which are computed in float32, with a series in
place of a logarithm whose result would lose its last bits. `recurrent/reference.py` does the same in torch.
"""

import triton
import triton.language as tl

BLOCK = 256  # values of a program


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)), float64."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit(do_not_specialize=["count"])
def compute_delta_gates(
    a,  # [T, HEADS], tokens `a_stride` elements apart
    b,  # [T, HEADS], tokens `b_stride` elements apart
    a_log,  # float32 [HEADS]
    dt_bias,  # float32 [HEADS]
    log_decay,  # float32 [T, HEADS]
    beta,  # float32 [T, HEADS]
    count,  # T * HEADS
    a_stride,
    b_stride,
    beta_scale,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute both gates of some heads of some tokens."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, token, head = at < count, at // HEADS, at % HEADS
    x = tl.load(a + token * a_stride + head, mask=inside, other=0.0).to(tl.float64)
    rate = tl.exp(tl.load(a_log + head, mask=inside, other=0.0).to(tl.float64))
    decay = -rate * _softplus(x + tl.load(dt_bias + head, mask=inside, other=0.0).to(tl.float64))
    write = tl.load(b + token * b_stride + head, mask=inside, other=0.0).to(tl.float64)
    tl.store(log_decay + at, decay.to(tl.float32), mask=inside)
    tl.store(beta + at, (beta_scale / (1.0 + tl.exp(-write))).to(tl.float32), mask=inside)


@triton.jit
def _exact_softplus(x):
    """Return log(1 + exp(x)), float32, to the last bits also if it is small: with s = u / (2 + u) <= 1/3, log(1 + u) is
    2 (s + s^3 / 3 + s^5 / 5 + ...)."""
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    square = s * s
    series = square * 0.0 + 1.0 / 13.0
    for divisor in tl.static_range(11, 0, -2):
        series = series * square + 1.0 / divisor
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def compute_kimi_gates(
    f,  # [T, HEADS, WIDTH], tokens `f_stride` elements apart
    b,  # [T, HEADS], tokens `b_stride` elements apart
    a_log,  # float32 [HEADS]
    dt_bias,  # float32 [HEADS, WIDTH]
    log_decay,  # float32 [T, HEADS, WIDTH]
    beta,  # float32 [T, HEADS]
    f_stride,
    b_stride,
    lower_bound,  # of `log_decay`
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr,  # whether there is a lower bound
):
    """Compute the decays of some channels of one token, and the rates of writes of the heads that begin there."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, head = column < HEADS * WIDTH, column // WIDTH
    x = tl.load(f + row * f_stride + column, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + column, mask=inside, other=0.0)
    rate = tl.exp(tl.load(a_log + head, mask=inside, other=0.0))
    decay = lower_bound * tl.sigmoid(rate * x) if BOUNDED else -rate * _exact_softplus(x)
    tl.store(log_decay + row * (HEADS * WIDTH) + column, decay, mask=inside)
    begins = inside & (column % WIDTH == 0)
    write = tl.load(b + row * b_stride + head, mask=begins, other=0.0).to(tl.float32)
    tl.store(beta + row * HEADS + head, tl.sigmoid(write), mask=begins)


@triton.jit(do_not_specialize=["count"])
def compute_mamba_steps(
    dt,  # [T, HEADS], tokens `dt_stride` elements apart
    bias,  # float32 [HEADS]; unused without BIAS
    steps,  # float32 [T, HEADS]
    count,  # T * HEADS
    dt_stride,
    least,
    most,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Compute the step sizes of some heads of some tokens."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, token, head = at < count, at // HEADS, at % HEADS
    x = tl.load(dt + token * dt_stride + head, mask=inside, other=0.0).to(tl.float64)
    if BIAS:
        x += tl.load(bias + head, mask=inside, other=0.0).to(tl.float64)
    step = tl.maximum(_softplus(x).to(tl.float32), least, propagate_nan=tl.PropagateNan.ALL)
    tl.store(steps + at, tl.minimum(step, most, propagate_nan=tl.PropagateNan.ALL), mask=inside)


@triton.jit
def apply_silu_gate(
    x,  # [T, WIDTH], tokens `x_stride` elements apart
    gate,  # [T, WIDTH], tokens `gate_stride` elements apart
    out,  # [T, WIDTH]
    x_stride,
    gate_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply some columns of one token by the SiLU of their gate."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    factor = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    result = value * (factor * tl.sigmoid(factor))
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)
