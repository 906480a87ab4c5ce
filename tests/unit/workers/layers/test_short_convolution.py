"""The gated short convolution: transformers' module is the reference, and its bits depend on neither cuts, batches nor
ranks."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.short_convolution import ShortConvolution
from oarlock.workers.layers.short_convolution_spec import ShortConvolutionSpec
from oarlock.workers.recurrent.states import LayerStates
from tests.golden.paged_run import on_ranks
from tests.unit.workers.state_steps import layer_step_of
from tests.unit.workers.weights_in_memory import MemoryWeights

CPU = torch.device("cpu")
HIDDEN, TOKENS, SLOTS = 16, 23, 9


def reference(kernel_size: int, bias: bool) -> Lfm2ShortConv:
    torch.manual_seed(0)
    config = Lfm2Config(
        hidden_size=HIDDEN, num_hidden_layers=1, conv_L_cache=kernel_size, conv_bias=bias, layer_types=["conv"]
    )
    return Lfm2ShortConv(config, 0)


def ours(
    tp: TensorParallel, theirs: Lfm2ShortConv, kernel_size: int, bias: bool, dtype: torch.dtype
) -> ShortConvolution:
    """Return the module of a rank, with the reference module's weights."""
    spec = ShortConvolutionSpec(HIDDEN, kernel_size, bias)
    module = ShortConvolution("conv", spec, 0, HIDDEN, Placement(tp, dtype, CPU, slices=4))
    weights = MemoryWeights({f"conv.{name}": tensor.detach() for name, tensor in theirs.named_parameters()})
    for part in module.parts:
        part.load(weights)
    return module


def fed(module: ShortConvolution, x: Tensor, cuts: list[int]) -> Tensor:
    """Return the results of one sequence that is fed in pieces, by turns from slots 1 and 2."""
    states = torch.zeros((SLOTS + 1, module.local, module.spec.kernel_size - 1), dtype=x.dtype)
    rows = []
    for number, (start, end) in enumerate(pairwise([0, *cuts])):
        slots = (0 if number == 0 else 1 + number % 2, 2 - number % 2)
        rows.append(
            module(x[start:end], x[start:end], layer_step_of(LayerStates((states,)), [0, end - start], [slots], []))
        )
    assert not states[0].any(), "the state before the first token was written"
    return torch.cat(rows)


@pytest.mark.parametrize(("kernel_size", "bias"), [(3, False), (7, True), (2, True)])
def test_it_is_within_twice_transformers_own_error(kernel_size: int, bias: bool) -> None:
    theirs = reference(kernel_size, bias)
    x = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found = fed(ours(TensorParallel.solo(), theirs, kernel_size, bias, x.dtype), x, [TOKENS]).double()
        own = (theirs(x[None])[0] + x).double()
        truth = theirs.double()(x[None].double())[0] + x.double()
    assert (found - truth).abs().max() <= 2 * (own - truth).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_on_neither_cuts_nor_ranks_nor_the_batch(dtype: torch.dtype) -> None:
    theirs = reference(3, True).to(dtype)
    x = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(1)).to(dtype)
    module = ours(TensorParallel.solo(), theirs, 3, True, dtype)
    with torch.inference_mode():
        whole = fed(module, x, [TOKENS])
        for cuts in ([*range(1, TOKENS + 1)], [1, 2, 9, TOKENS]):
            assert torch.equal(fed(module, x, cuts), whole)
        states = torch.zeros((SLOTS + 1, HIDDEN, 2), dtype=dtype)
        step = layer_step_of(LayerStates((states,)), [0, TOKENS, TOKENS + 5], [(0, 1), (0, 2)], [(5, 3), (8, 4)])
        both = torch.cat((x, x[:5]))
        assert torch.equal(module(both, both, step), torch.cat((whole, whole[:5])))
        assert torch.equal(states[3], states[2]), "the state after 5 tokens, saved and left"
        states[9] = states[4]  # which a sequence with the same first 8 tokens continues
        rest = module(x[8:], x[8:], layer_step_of(LayerStates((states,)), [0, TOKENS - 8], [(9, 5)], []))
    assert torch.equal(rest, whole[8:])
    for size in (2, 4):
        for found in on_ranks(size, lambda tp: fed(ours(tp, theirs, 3, True, dtype), x, [9, TOKENS])):
            assert torch.equal(found, whole)
