"""Recurrent operations by the fastest kernel of a device: the functions of `reference.py`, which judges them."""

from oarlock.workers.recurrent.reference import causal_convolution, gated_delta_rule, gated_norm, mamba2

__all__ = ["causal_convolution", "gated_delta_rule", "gated_norm", "mamba2"]
