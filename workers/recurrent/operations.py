"""Recurrent operations by the fastest kernel of a device: the functions of `reference.py`, which judges them."""

from oarlock.workers.recurrent.reference import (
    causal_convolution,
    gated_delta_rule,
    gated_norm,
    gated_norm_of_heads,
    gated_squares,
    mamba2,
    silu_gate,
    time_steps,
)

__all__ = [
    "causal_convolution",
    "gated_delta_rule",
    "gated_norm",
    "gated_norm_of_heads",
    "gated_squares",
    "mamba2",
    "silu_gate",
    "time_steps",
]
