"""The kernel of experts on a device is the fastest for each number of tokens, by planted times."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from oarlock.workers.distributed.all_reduce import AllReduce
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.experts import Experts
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec, SharedSpec
from oarlock.workers.layers.placement import Placement
from oarlock.workers.quantization.expert_weights import ExpertsShape, ExpertWeights
from oarlock.workers.quantization.fixed_order import FixedOrderWeight
from oarlock.workers.quantization.method import DenseWeight
from oarlock.workers.quantization.triton_experts import GROUPED, TILES, TritonExpertMatmul
from oarlock.workers.runner import expert_kernel_selection
from oarlock.workers.runner.expert_kernel_selection import fastest_kernels, select_expert_kernels
from tests.interpreted_products import multiply_row_by_row

SMALL, MIDDLE, LARGE = TILES
HOPPER = (9, 0)


def product_of(
    dtype: torch.dtype = torch.bfloat16, *, width: int = 16, form: Callable[[Tensor], Any] = DenseWeight
) -> TritonExpertMatmul:
    draw = torch.Generator().manual_seed(1)

    def weight(rows: int, inputs: int) -> Any:
        return form(torch.randn((rows, inputs), generator=draw).div_(inputs**0.5).to(dtype))

    experts = [ExpertWeights(weight(2 * width, 32), weight(32, width)) for _ in range(4)]
    return TritonExpertMatmul(ExpertsShape(0, 4, 32, width, dtype), experts)


def times_of(product: TritonExpertMatmul, fastest: dict[int, str]) -> Callable[[AllReduce, Tensor], float]:
    """Planted times, and no launch. `fastest`: by number of tokens."""

    def seconds(work: AllReduce, x: Tensor) -> float:
        ((tokens, kernel),) = product.chosen
        assert tokens == len(x)
        return 1e-6 if fastest[tokens] == kernel else 3e-6

    return seconds


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    multiply_row_by_row(monkeypatch)


@pytest.mark.slow
def test_every_number_of_tokens_uses_the_kernel_of_the_next_larger_one() -> None:
    product = product_of()
    fastest = {1: SMALL, 16: LARGE, 64: SMALL, 256: MIDDLE, 1024: GROUPED, 2048: LARGE}
    product.chosen, line = fastest_kernels(product, 2, 2048, times_of(product, fastest))
    assert product.chosen == list(fastest.items())
    taken = {tokens: product.kernel_for(tokens, 2 * tokens) for tokens in (1, 2, 16, 17, 200, 300, 1024, 1025, 5000)}
    assert taken == {
        1: SMALL, 2: LARGE, 16: LARGE, 17: SMALL, 200: MIDDLE, 300: GROUPED, 1024: GROUPED, 1025: LARGE, 5000: LARGE,
    }  # fmt: skip
    assert line.startswith(
        "1 tokens by tiles of 16 (tiles of 16 1, tiles of 64 3, tiles of 128 3, grouped_mm 3 us); 16"
    )


@pytest.mark.parametrize(
    ("product", "reason"),
    [
        (lambda: product_of(torch.float16), "weights are not bfloat16"),
        (lambda: product_of(width=12), "32 or 12 inputs are not multiples of 8"),
    ],
)
def test_the_line_has_the_reason_against_torchs_kernel(product: Callable[[], TritonExpertMatmul], reason: str) -> None:
    made = product()
    chosen, line = fastest_kernels(made, 2, 16, times_of(made, {1: GROUPED, 16: MIDDLE}))
    assert chosen == [(1, SMALL), (16, MIDDLE)] and line.endswith(f"; no grouped_mm: {reason}")


def test_torch_has_no_kernel_for_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert product_of().why_not_grouped() == "torch has no kernel for devices of 8.6"


@pytest.mark.parametrize(
    ("planted", "reason"),
    [
        (lambda real, *inputs: real(*inputs) * 1.1, "its results are wrong"),
        (lambda real, *inputs: torch.zeros(2).view(3), "it fails: shape '[3]' is invalid for input of size 2"),
    ],
)
def test_a_kernel_of_torch_that_fails_or_is_wrong_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, planted: Callable[..., Tensor], reason: str
) -> None:
    product, real = product_of(), TritonExpertMatmul._grouped
    monkeypatch.setattr(TritonExpertMatmul, "_grouped", lambda *inputs: planted(real, *inputs))
    chosen, line = fastest_kernels(product, 2, 16, times_of(product, {1: GROUPED, 16: GROUPED}))
    assert chosen == [(1, SMALL), (16, SMALL)] and line.endswith(f"; no grouped_mm: {reason}")


def test_there_is_one_kernel_if_bits_must_not_depend_on_the_tokens() -> None:
    for product in (product_of(form=FixedOrderWeight), product_of(torch.float32)):
        assert product.kernels() == [SMALL] and {product.kernel_for(n, 2 * n) for n in (1, 999)} == {SMALL}


def test_each_kind_of_experts_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers with routed experts and a shared one of another width."""
    place = Placement(TensorParallel.solo(), torch.bfloat16, torch.device("cpu"))
    spec = ExpertsSpec(4, 16, RouterSpec(2), shared=SharedSpec(24))
    layers = [Experts(f"{number}", spec, number, 32, place) for number in range(2)]
    for experts in layers:
        experts.routed.matmul = product_of()
        assert experts.shared is not None
        experts.shared.matmul = product_of(width=24)
    measured = []

    def planted(matmul: TritonExpertMatmul, per_token: int, max_tokens: int) -> tuple[list[tuple[int, str]], str]:
        measured.append((matmul.shape.width, per_token, max_tokens))
        return [(max_tokens, LARGE if matmul.shape.width == 16 else MIDDLE)], ""

    monkeypatch.setattr(expert_kernel_selection, "fastest_kernels", planted)
    select_expert_kernels(SimpleNamespace(mixtures=lambda: layers), 64)  # ty: ignore[invalid-argument-type]
    assert measured == [(16, 2, 64), (24, 1, 64)]
    for experts in layers:
        assert experts.routed.matmul.chosen == [(64, LARGE)] and experts.shared.matmul.chosen == [(64, MIDDLE)]
