"""Estimates of the memory of an encoder's weights and steps. Torch-free; allocates nothing."""

import math

from oarlock.workers.models.encoders.encoder_spec import EncoderSpec
from oarlock.workers.platform.dtypes import ITEM_BYTES

_FLOAT32 = 4


def weight_bytes(spec: EncoderSpec, dtype: str) -> int:
    """Bytes of all weights, on one rank or cut without copies; of a few small ones each rank holds a copy."""
    return sum(math.prod(shape) for shape in spec.tensor_shapes().values()) * ITEM_BYTES[dtype]


def step_bytes(spec: EncoderSpec, num_ranks: int, num_tokens: int) -> int:
    """Bytes of the tensors of a step that exist at the same time on one rank, most of them float32: hidden states and
    their sums, queries, keys and values with a copy, and the MLP's."""
    inner = (3 if spec.gated else 2) * spec.intermediate_size
    return num_tokens * _FLOAT32 * (4 * spec.hidden_size + (7 * spec.hidden_size + inner) // num_ranks)
