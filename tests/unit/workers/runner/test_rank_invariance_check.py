"""The check at start tells whether the number of ranks changes bits, and finds sums in another order."""

from pathlib import Path

import pytest
import torch

from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.all_reduce import tree_sum
from oarlock.workers.kernels.cpu.experts import CppExpertMatmul
from oarlock.workers.runner import experts_invariance, invariance
from tests.golden import paged_run
from tests.golden.tiny_models import make_tiny
from tests.parallel.rank_threads import ThreadExecutor
from tests.unit.workers.kernel_levels import NO_KERNELS

pytestmark = pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen2", head_dim=32, num_hidden_layers=1, attention_bias=True)


def found(path: Path, **changes: object) -> tuple[bool, str]:
    base = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "num_kv_blocks": 9, "block_size": 16}
    executor = ThreadExecutor(WorkerConfig(str(path), **base | {"num_threads": 1} | changes))
    executor.close()
    return executor.info.rank_invariant, executor.info.rank_invariant_reason


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_kernels_are_the_same_at_every_size(checkpoint: Path, size: int, quantization: str) -> None:
    is_invariant, reason = found(checkpoint, tensor_parallel_size=size, quantization=quantization)
    assert is_invariant and reason.startswith("the same bits with 1, 2, 4 and 8 ranks"), reason


def test_a_size_that_cuts_slices_is_named(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, "qwen2", head_dim=32, num_attention_heads=6, num_key_value_heads=6)
    is_invariant, reason = found(path, tensor_parallel_size=3)
    assert not is_invariant and reason == "3 ranks do not hold whole slices of the inputs; 1, 2 would"
    assert found(path, tensor_parallel_size=2)[0]


def test_torch_promises_nothing(checkpoint: Path) -> None:
    is_invariant, reason = found(checkpoint, attention_backend="torch")
    assert not is_invariant and "attention is computed by TorchBackend" in reason


def test_a_product_that_adds_in_another_order_is_found(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the whole row in one go, though the weight is in slices."""
    real = invariance.CppMatmul.as_share

    def as_share(product: invariance.CppMatmul) -> invariance.CppMatmul:
        share = real(product)
        share.slices = 1
        return share

    monkeypatch.setattr(invariance.CppMatmul, "as_share", as_share)
    is_invariant, reason = found(checkpoint)
    assert not is_invariant and reason.endswith("slices of the inputs do not add up to the product of all")


def test_ranks_that_add_in_another_order_are_found(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_run, "tree_sum", lambda parts: torch.stack(list(parts)).flip(0).sum(0))
    is_invariant, reason = found(checkpoint, tensor_parallel_size=4)
    assert not is_invariant and reason == "the all-reduce over 4 ranks is not added in the order of the tree"
    monkeypatch.setattr(paged_run, "tree_sum", tree_sum)
    assert found(checkpoint, tensor_parallel_size=4)[0]


@pytest.mark.parametrize("deals", [False, True], ids=["cut", "dealt"])
@pytest.mark.slow
def test_sums_of_experts_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deals: bool) -> None:
    """The planted faults: what one rank holds adds up otherwise than in parts, and a row's experts from the last on."""
    path = make_tiny(tmp_path, "qwen3_moe", head_dim=32, num_hidden_layers=1)
    for size in (1, 2, 8):  # of 8 ranks one has no expert
        assert found(path, tensor_parallel_size=size, enable_expert_parallel=deals)[0]
    real = CppExpertMatmul.__call__

    def other_order(
        product: CppExpertMatmul, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return real(product, x, ids, weights) * (1.001 if (ids >= 0).sum(1).max() > 1 else 1)

    with monkeypatch.context() as patch:
        patch.setattr(CppExpertMatmul, "__call__", other_order)
        is_invariant, reason = found(path, enable_expert_parallel=deals)
        said = ": the partial sums do not add up to the total" if deals else " are not added up by their ids"
        assert not is_invariant and reason == f"model.layers.0.mlp: experts{said}"  # dealt in groups of one
    monkeypatch.setattr(experts_invariance, "tree_sum", lambda parts: torch.stack(list(parts)).flip(0).sum(0) * 1.001)
    is_invariant, reason = found(path, enable_expert_parallel=deals)
    assert not is_invariant and reason.endswith("the partial sums do not add up to the total")
