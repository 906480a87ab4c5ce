"""Recurrent operations as Triton kernels: the functions of `workers/recurrent/reference.py`, which judges them."""

from oarlock.workers.kernels.triton.recurrent.convolution import causal_convolution
from oarlock.workers.kernels.triton.recurrent.delta_rule import gated_delta_rule
from oarlock.workers.kernels.triton.recurrent.mamba import mamba2
from oarlock.workers.kernels.triton.recurrent.norm import gated_norm

__all__ = ["causal_convolution", "gated_delta_rule", "gated_norm", "mamba2"]
