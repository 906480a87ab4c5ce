"""Every tensor of every layer against transformers, for every family and shape.

q, k, v after projection and after rotation, attention, both half-blocks' results, the residual after each, logits: a
mistake is named where it is made, not where it comes out.
"""

from collections.abc import Callable

import pytest
import torch

from tests.golden.cases import CASES, FAMILY_CASES, RUNS, SHORT_LAYERS, run_id
from tests.golden.exact_reference import ExactReference
from tests.golden.layer_compare import findings


# At the most ranks of each shape; what is wrong at fewer alone shows in the logits (test_decoder_golden.py).
@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, id=run_id(name, size), marks=() if name in SHORT_LAYERS else pytest.mark.product)
        for name, size in RUNS
        if size == max(CASES[name].sizes)
    ],
)
@pytest.mark.slow
def test_every_tensor_is_within_twice_transformers_own_error(
    reference_of: Callable[..., ExactReference], name: str, size: int
) -> None:
    found = findings(reference_of(name), size)
    assert not found, f"first of {len(found)}: {found[0]}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", FAMILY_CASES)
def test_every_tensor_in_sixteen_bits(
    reference_of: Callable[..., ExactReference], name: str, size: int, dtype: torch.dtype
) -> None:
    found = findings(reference_of(name, dtype), size)
    assert not found, f"first of {len(found)}: {found[0]}"
