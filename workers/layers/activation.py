"""Activation functions by the names `DecoderSpec` uses, each in two spellings: torch's, and oneDNN's as a post-op."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Activation:
    """`function` for tensors; `attribute` and `algorithm` for a matmul that applies it before it rounds."""

    function: Callable[[Tensor], Tensor]
    attribute: str
    algorithm: str = ""


ACTIVATIONS = {
    "silu": Activation(F.silu, "swish"),
    "gelu_tanh": Activation(partial(F.gelu, approximate="tanh"), "gelu", "tanh"),
}
