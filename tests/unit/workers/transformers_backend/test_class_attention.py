"""Keys and values as classes of transformers hand them over, in the layout that attention backends write."""

import pytest
import torch

from oarlock.workers.transformers_backend.attention import _rows


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("is_by_head", [False, True])
def test_heads_of_a_token_are_adjacent(heads: int, is_by_head: bool) -> None:
    """A dimension of one element may have any stride, which the C++ kernel would follow."""
    states = torch.randn(1, 5, heads, 16).transpose(1, 2)
    if is_by_head:  # as after rotations
        states = states.contiguous()
    rows = _rows(states, torch.float32)
    assert rows.stride()[1:] == (16, 1) and torch.equal(rows, states[0].transpose(0, 1))
