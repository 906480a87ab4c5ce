"""Recurrent operations in torch, one token after the other: the reference implementation of every kernel.

All of them compute in the dtype of `states` or wider, and keep one order of operations for each token, so that results
do not depend on how a prompt is divided into steps. Exponential functions are computed in float64 and rounded: torch
computes the last few elements of an array with another function, whose last bits would depend on the number of ranks.

T  tokens      S  sequences      C  slots      Hk  key heads      Hv  value heads      G  groups of Mamba heads
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.recurrent.states import StateStep

KEY_EPSILON = 1e-6  # of the normalisation of queries and keys


def run_rule(states: Tensor, step: StateStep, rule: Callable[[Tensor, int], tuple[Tensor, Tensor]]) -> Tensor:
    """Apply `rule(state, token)`, which returns the next state and the token's result, to all tokens of a step.

    `states` [C + 1, ...] gets the states of the step's slots. Returns the results, [T, ...].
    """
    starts, reads, writes = step.starts.tolist(), step.reads.tolist(), step.writes.tolist()
    first_saves, lens, slots = step.save_starts.tolist(), step.save_lens.tolist(), step.save_slots.tolist()
    results, written = [], []
    for s, (first, last) in enumerate(pairwise(starts)):
        saves = dict(
            zip(lens[first_saves[s] : first_saves[s + 1]], slots[first_saves[s] : first_saves[s + 1]], strict=True)
        )
        state = states[reads[s]]
        for token in range(first, last):
            state, result = rule(state, token)
            results.append(result)
            if (slot := saves.get(token + 1 - first)) is not None:
                written.append((slot, state))
        written.append((writes[s], state))
    for slot, state in written:
        states[slot] = state
    return torch.stack(results)


def _sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of `x` in its dtype. It is computed in float64, because torch computes the last few elements
    of an array with another exponential function."""
    return torch.sigmoid(x.double()).to(x.dtype)


def causal_convolution(
    x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None, step: StateStep, *, silu: bool
) -> Tensor:
    """Return the depthwise convolution of `x` [T, channels] over a token and the tokens before it, in the dtype of `x`.

    `weight` float32 [channels, taps], whose last tap is the token's own; `bias` float32 [channels]; `states` [C + 1,
    channels, taps - 1] in the dtype of `x`: inputs of the latest tokens, oldest first. `silu`: results pass through
    SiLU.
    """

    def rule(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        window = torch.cat([state, x[token, :, None]], 1)  # [channels, taps]
        total = window[:, 0].to(weight.dtype) * weight[:, 0]
        for tap in range(1, weight.shape[1]):
            total = total + window[:, tap].to(weight.dtype) * weight[:, tap]
        total = total if bias is None else total + bias
        return window[:, 1:], (total * _sigmoid(total) if silu else total).to(x.dtype)

    return run_rule(states, step, rule)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, step: StateStep
) -> Tensor:
    """Return the results of the gated delta rule [T, Hv, value width], in the dtype of `v`.

    `q`, `k` [T, Hk, key width], each key head for Hv // Hk consecutive value heads; they are divided by their length,
    and queries by the square root of the width. `v` [T, Hv, value width]. `log_decay`, `beta` float32 [T, Hv]; the
    decay may be [T, Hv, key width], as in Kimi delta attention. `states` float32 [C + 1, Hv, key width, value width].
    See Yang et al., "Gated Delta Networks" (2024), equation 10, and Kimi Team, "Kimi Linear" (2025), equation 1.
    """
    each, wide = v.shape[1] // k.shape[1], states.dtype

    def unit(rows: Tensor) -> Tensor:
        rows = rows.to(wide)
        return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + KEY_EPSILON)

    queries = (unit(q) * k.shape[2] ** -0.5).repeat_interleave(each, 1)  # [T, Hv, key width]
    keys = unit(k).repeat_interleave(each, 1)

    def rule(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        decay = torch.exp(log_decay[token].double()).to(wide)
        decay = decay.reshape(len(decay), -1, 1)  # [Hv, 1 or key width, 1]
        key = keys[token][:, :, None]
        decayed = state * decay
        found = (decayed * key).sum(1)  # [Hv, value width]
        delta = (v[token].to(wide) - found) * beta[token].to(wide)[:, None]
        state = decayed + key * delta[:, None, :]
        return state, (state * queries[token][:, :, None]).sum(1).to(v.dtype)

    return run_rule(states, step, rule)


def mamba2(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, states: Tensor, step: StateStep
) -> Tensor:
    """Return the results of Mamba 2's recurrence [T, heads, head width], in the dtype of `x`.

    `x` [T, heads, head width]; `dt` float32 [T, heads], after softplus and limits; `a` float32 [heads], negative; `b`,
    `c` [T, G, state width], each group for heads // G consecutive heads; `d` float32 [heads], or None. `states` float32
    [C + 1, heads, head width, state width]. See Dao and Gu, "Transformers are SSMs" (2024), equation 1.
    """
    each, wide = x.shape[1] // b.shape[1], states.dtype
    inputs, outputs = (rows.to(wide).repeat_interleave(each, 1) for rows in (b, c))  # [T, heads, state width]

    def rule(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        now = dt[token].to(wide)
        decay = torch.exp((now * a.to(wide)).double()).to(wide)[:, None, None]
        added = (x[token].to(wide) * now[:, None])[:, :, None] * inputs[token][:, None, :]
        state = state * decay + added
        result = (state * outputs[token][:, None, :]).sum(2)
        if d is not None:
            result = result + x[token].to(wide) * d.to(wide)[:, None]
        return state, result.to(x.dtype)

    return run_rule(states, step, rule)


def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, beta_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the decay and beta of the gated delta rule: [T, Hv] twice, in the dtype of `a_log`.

    `a`, `b` [T, Hv]: projections of the layer's input. `a_log`, `dt_bias` float32 [Hv].
    """
    wide = a_log.dtype
    log_decay = -torch.exp(a_log.double()) * F.softplus(a.double() + dt_bias.double())
    return log_decay.to(wide), (torch.sigmoid(b.double()) * beta_scale).to(wide)


def kimi_gates(
    f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """Return the logarithm of each channel's decay [T, Hv, key width], and beta [T, Hv], in the dtype of `a_log`.

    `f` [T, Hv, key width], `b` [T, Hv]: projections of the layer's input. `a_log` float32 [Hv], `dt_bias` float32 [Hv,
    key width]. `lower_bound`: of the logarithms, negative; None: they have none, and are computed by another function.
    """
    wide = a_log.dtype
    rate, x = torch.exp(a_log.double())[:, None], f.double() + dt_bias.double()
    log_decay = -rate * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)
    return log_decay.to(wide), torch.sigmoid(b.double()).to(wide)


def mamba_steps(dt: Tensor, bias: Tensor | None, least: float, most: float) -> Tensor:
    """Return the step sizes of Mamba 2: the softplus of `dt` [T, heads] plus `bias`, limited to a range.

    `bias` float32 [heads], or None. The result has the dtype of `bias`, or float32.
    """
    wide = torch.float32 if bias is None else bias.dtype
    return F.softplus(dt.double() if bias is None else dt.double() + bias).to(wide).clamp(least, most)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gates_first: bool, sigmoid: bool = False
) -> Tensor:
    """Return the RMS norm of `x` [T, groups, width] over each group, times the SiLU of `gate`, in the dtype of `x`.

    `gate` as `x`; `weight` float32 [groups, width]. `gates_first`: the gate is applied before the norm, as in Mamba 2;
    else after it, as in the gated delta net. `sigmoid`: rows are multiplied by the sigmoid of the gate instead; only
    after the norm.
    """
    assert not (sigmoid and gates_first)
    wide = weight.dtype
    factor = _sigmoid(gate.to(wide)) if sigmoid else gate.to(wide) * _sigmoid(gate.to(wide))
    rows = x.to(wide) * factor if gates_first else x.to(wide)
    normed = rows * torch.rsqrt((rows * rows).mean(-1, keepdim=True) + eps) * weight
    return (normed if gates_first else normed * factor).to(x.dtype)


def gated_squares(x: Tensor, gate: Tensor, *, gates_first: bool) -> Tensor:
    """Return the sum of squares of each head that a gated norm over several heads needs: [T, heads].

    `x`, `gate` and `gates_first` as in `gated_norm`, with a head for each group. The result is float32 or wider.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(wide)
    if gates_first:
        rows = rows * (gate.to(wide) * _sigmoid(gate.to(wide)))
    return (rows * rows).sum(-1)


def gated_norm_of_heads(
    x: Tensor, gate: Tensor, squares: Tensor, weight: Tensor, eps: float, *, gates_first: bool
) -> Tensor:
    """Return the gated norm of `x` [T, heads, width] over groups of several heads, in the dtype of `x`.

    `gate` as `x`; `weight` float32 [heads, width]. `squares` [T, groups, heads of a group]: `gated_squares` of all
    heads of the groups, also of heads that other ranks hold. A group here has `heads // groups` consecutive heads.
    """
    wide, width = weight.dtype, x.shape[2]
    means = squares.double().sum(2) / (squares.shape[2] * width)
    factors = (means + eps).rsqrt().to(wide).repeat_interleave(x.shape[1] // squares.shape[1], 1)  # [T, heads]
    silu = gate.to(wide) * _sigmoid(gate.to(wide))
    rows = x.to(wide) * silu if gates_first else x.to(wide)
    normed = rows * factors.unsqueeze(2) * weight
    return (normed if gates_first else normed * silu).to(x.dtype)


def silu_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return `x` times the SiLU of `gate`, both of one shape, in the dtype of `x`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * (gate.to(wide) * _sigmoid(gate.to(wide)))).to(x.dtype)
