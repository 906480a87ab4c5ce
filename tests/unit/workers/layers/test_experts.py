"""Experts: which are chosen, how ranks share them, and the memory that they take."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oarlock.workers.attention.backend import LayerStep
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import BranchSpec, DecoderSpec, LayerSpec
from oarlock.workers.layers.experts import Experts, route
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec, SharedSpec
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.sharding import shard_experts, shard_width
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.quantization.registry import QUANTIZATIONS
from oarlock.workers.runner.memory_needs import rank_weight_bytes
from oarlock.workers.weights.source import DummyWeights
from tests.golden.paged_run import on_ranks

CPU = torch.device("cpu")
HIDDEN = 32
# Neither experts nor widths that 8 ranks can share equally.
SPEC = ExpertsSpec(
    11, 36, RouterSpec(3, "sigmoid", normalised=True, correction="gate.correction"), shared=SharedSpec(52, gate="scale")
)
# Without shared experts, and with others that return their input.
IDENTITIES = replace(SPEC, shared=None, identities=5)


def test_lower_expert_ids_win_ties_and_ids_ascend() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0], [2.0] * 5, [0.0, 0.0, 0.0, 9.0, 5.0]])
    ids, weights = route(logits, RouterSpec(3, normalised=True), None)
    assert ids.tolist() == [[0, 1, 3], [0, 1, 2], [0, 3, 4]] and ids.dtype == torch.int32
    assert weights.dtype == torch.float32 and torch.allclose(weights.sum(1), torch.ones(3))
    assert weights[0, 1] == weights[0, 2] > weights[0, 0]


def test_a_correction_chooses_and_does_not_weigh_and_groups_come_first() -> None:
    logits = torch.tensor([[0.0, 0.1, 0.2, 0.3, 4.0, -9.0]])
    correction = torch.tensor([9.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    ids, weights = route(logits, RouterSpec(2, "sigmoid", scale=2.0), correction)
    assert ids.tolist() == [[0, 4]]
    assert torch.allclose(weights, 2 * torch.sigmoid(logits[:, [0, 4]]))
    grouped = RouterSpec(2, "sigmoid", groups=3, top_groups=1)  # 4 is the best, but 2 and 3 are the best pair
    assert route(logits, grouped, torch.zeros(6))[0].tolist() == [[2, 3]]
    best = replace(grouped, best_of_group=1)
    assert route(logits, best, torch.zeros(6))[0].tolist() == [[4, 5]]


@pytest.mark.parametrize("width", [1, 8, 36, 1408, 2880])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_widths_are_cut_whole_slice_by_slice_and_experts_group_by_group(width: int, size: int) -> None:
    for unit in (1, 32):
        parts = [shard_width(width, unit, rank, size, 8) for rank in range(size)]
        assert [part.first for part in parts] == [rank * parts[0].count for rank in range(size)]
        assert all(part.padded_width == size * part.count >= width for part in parts)
        assert all(part.count % (part.slices * unit) == 0 for part in parts)
    dealt = [shard_experts(width, rank, size, 8) for rank in range(size)]
    held = [expert for part in dealt for expert in range(part.first, part.first + part.count)]
    assert held == list(range(width)) and len({part.group for part in dealt}) == 1


def made(tp: TensorParallel, form: str, deals: bool, spec: ExpertsSpec, dtype: torch.dtype) -> Experts:
    placement = Placement(tp, dtype, CPU, QUANTIZATIONS[form], 8, distributes_experts=deals)
    experts = Experts("model.layers.0.mlp", spec, 0, HIDDEN, placement)
    for part in experts.parts:
        part.load(DummyWeights(3))
    return experts


def results(tp: TensorParallel, form: str, deals: bool, spec: ExpertsSpec, x: Tensor) -> Tensor:
    step = LayerStep(None, None, None, None, None)  # ty: ignore[invalid-argument-type]
    return made(tp, form, deals, spec, x.dtype)(x, x, step)


@pytest.mark.parametrize("spec", [SPEC, IDENTITIES], ids=["shared", "identities"])
@pytest.mark.parametrize("deals", [False, True], ids=["cut", "dealt"])
@pytest.mark.parametrize("form", ["none", "int8"])
@pytest.mark.slow
def test_every_number_of_ranks_has_the_same_bits(form: str, deals: bool, spec: ExpertsSpec) -> None:
    x = torch.randn((7, HIDDEN), generator=torch.Generator().manual_seed(0)).bfloat16() * 30
    (alone,) = on_ranks(1, lambda tp: results(tp, form, deals, spec, x))
    for size in (2, 4, 8):
        assert all(torch.equal(alone, one) for one in on_ranks(size, lambda tp: results(tp, form, deals, spec, x)))
    other = on_ranks(1, lambda tp: results(tp, form, not deals, spec, x))[0]
    assert (alone - x).norm() > 0 and (alone - other).norm() <= 3e-2 * (alone - x).norm()


def test_experts_without_matrices_add_their_weight_times_the_input() -> None:
    x = torch.randn((40, HIDDEN), generator=torch.Generator().manual_seed(0))
    experts = made(TensorParallel.solo(), "none", False, IDENTITIES, x.dtype)
    ids, weights = experts.router(x)
    of_input = torch.where(ids >= IDENTITIES.experts, weights, 0.0).sum(1)
    assert (of_input == 0).any() and (of_input == weights.sum(1)).any(), "tokens with no such expert, and with no other"
    expected = experts.routed(x, ids, weights) + of_input[:, None] * x
    torch.testing.assert_close(experts.sums(x)[0], expected)


@pytest.mark.parametrize("deals", [False, True], ids=["cut", "dealt"])
@pytest.mark.parametrize("form", ["none", "int8", "int4"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_memory_of_a_rank_is_known_before_it_loads(form: str, deals: bool, size: int) -> None:
    attention = SelfAttentionSpec(4, 4, 8, 0.3, None)
    layer = LayerSpec((BranchSpec(attention, "a"), BranchSpec(SPEC, "b")))
    spec = DecoderSpec("Made", 64, HIDDEN, (layer, layer), NormSpec(), 64, 64)
    formats = QUANTIZATIONS[form]
    decoder = Decoder(spec, TensorParallel(0, size), torch.bfloat16, CPU, formats, distributes_experts=deals)
    config = WorkerConfig("", dtype="bfloat16", device="cpu", tensor_parallel_size=size, enable_expert_parallel=deals)
    assert decoder.weight_bytes == rank_weight_bytes(config, spec, formats)
