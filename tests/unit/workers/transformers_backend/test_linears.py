"""Parts in the place of `nn.Linear`: every division, on one rank and on two, against torch in float64."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oarlock.base.errors import StartupError
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.placement import Placement
from oarlock.workers.quantization.registry import QUANTIZATIONS
from oarlock.workers.transformers_backend.linears import LinearPart, UsesWeight, make_linear
from oarlock.workers.transformers_backend.placement_plan import Division
from tests.golden.paged_run import on_ranks
from tests.unit.workers.weights_in_memory import MemoryWeights, placement, random_weights

NAME, INPUTS, OUTPUTS, TOKENS = "model.layers.0.mlp.up", 128, 96, 5
# Divisions whose result every rank has whole.
WHOLE_RESULTS = {Division.WHOLE, Division.GATHERED_COLUMN, Division.ROW, Division.SPLIT_ROW}
DIVISIONS = [*sorted(WHOLE_RESULTS, key=lambda one: one.value), Division.COLUMN, Division.PACKED_COLUMN]
CPU = torch.device("cpu")


def empty_linear(outputs: int = OUTPUTS, inputs: int = INPUTS, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, device="meta")


def run(division: Division, size: int, dtype: torch.dtype, x: Tensor, quantization: str = "none") -> list[Tensor]:
    """The results of every rank for `x` [1, TOKENS, INPUTS], each checked against the shape on the meta device."""
    tensors = random_weights({f"{NAME}.weight": (OUTPUTS, INPUTS), f"{NAME}.bias": (OUTPUTS,)})

    def work(tp: TensorParallel) -> Tensor:
        place = Placement(tp, dtype, CPU, QUANTIZATIONS[quantization], slices=2)
        part = make_linear(NAME, empty_linear(), place, division)
        mine = x.chunk(size, -1)[tp.rank] if division is Division.ROW else x
        on_meta = part(mine.to("meta"))
        part.load(MemoryWeights(tensors))
        result = part(mine)
        assert (on_meta.shape, on_meta.dtype, on_meta.is_meta) == (result.shape, result.dtype, True)
        return result

    return on_ranks(size, work)


def joined(results: list[Tensor], division: Division) -> Tensor:
    """The result over all ranks, in the order of the stored rows."""
    if division in WHOLE_RESULTS:
        assert all(torch.equal(result, results[0]) for result in results)
        return results[0]
    if division is Division.COLUMN:
        return torch.cat(results, -1)
    halves = zip(*(result.chunk(2, -1) for result in results), strict=True)
    return torch.cat([part for half in halves for part in half], -1)


def expected(x: Tensor, dtype: torch.dtype) -> Tensor:
    tensors = random_weights({f"{NAME}.weight": (OUTPUTS, INPUTS), f"{NAME}.bias": (OUTPUTS,)})
    weight, bias = (tensors[f"{NAME}.{kind}"].to(dtype).double() for kind in ("weight", "bias"))
    return F.linear(x.double(), weight, bias)


@pytest.mark.parametrize("division", DIVISIONS, ids=lambda one: one.name)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_results_equal_torch(division: Division, dtype: torch.dtype, error: float) -> None:
    x = torch.randn((1, TOKENS, INPUTS), generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = expected(x, dtype)
    one, two = (joined(run(division, size, dtype, x), division) for size in (1, 2))
    assert one.dtype is dtype and one.shape == (1, TOKENS, OUTPUTS)
    # A result is rounded once: it is off by half a unit in the last place, and by errors of sums near zero.
    assert ((one.double() - wanted).abs() <= error * wanted.abs() + 4e-5).all()
    assert ((two.double() - wanted).abs() <= error * wanted.abs() + 4e-5).all()
    assert torch.equal(one, two)


@pytest.mark.parametrize("division", DIVISIONS, ids=lambda one: one.name)
@pytest.mark.parametrize(("quantization", "error"), [("int8", 0.02), ("int4", 0.2)])
def test_quantized_weights(division: Division, quantization: str, error: float) -> None:
    x = torch.randn((1, TOKENS, INPUTS), generator=torch.Generator().manual_seed(1))
    wanted = expected(x, torch.float32)
    one, two = (joined(run(division, size, torch.float32, x, quantization), division) for size in (1, 2))
    for result in (one, two):
        assert (result - wanted).norm() <= error * wanted.norm()
    assert torch.equal(one, two)


@pytest.mark.parametrize("shape", [(INPUTS,), (0, INPUTS), (1, INPUTS), (2, 3, INPUTS), (1, 2, 2, INPUTS)])
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    part = loaded(placement())
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(part(x).double(), expected(x, torch.float32), atol=1e-4)


@pytest.mark.parametrize("change", [lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.flip(1)])
def test_any_strides(change: Callable[[Tensor], Tensor]) -> None:
    part = loaded(placement())
    x = torch.randn((1, TOKENS, INPUTS), generator=torch.Generator().manual_seed(1))
    assert torch.equal(part(change(x)), part(change(x).clone(memory_format=torch.contiguous_format)))
    wide = torch.cat((x, x), -1)
    assert torch.equal(part(wide[..., INPUTS:]), part(x))


def loaded(place: Placement, division: Division = Division.WHOLE) -> LinearPart:
    part = make_linear(NAME, empty_linear(), place, division)
    part.load(MemoryWeights(random_weights({f"{NAME}.weight": (OUTPUTS, INPUTS), f"{NAME}.bias": (OUTPUTS,)})))
    return part


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_inputs_of_another_dtype_or_width_are_refused(device: str) -> None:
    part = loaded(placement(dtype=torch.bfloat16))
    for x in (torch.zeros((1, 2, INPUTS)), torch.zeros((1, 4, INPUTS // 2), dtype=torch.bfloat16)):
        with pytest.raises(RuntimeError, match=f"{NAME} takes 128 inputs of torch.bfloat16, but got"):
            part(x.to(device))


def test_sizes_of_this_rank() -> None:
    def sizes(division: Division) -> tuple[int, int]:
        part = make_linear(NAME, empty_linear(), placement(1, 2), division)
        return part.in_features, part.out_features

    assert sizes(Division.WHOLE) == sizes(Division.GATHERED_COLUMN) == sizes(Division.SPLIT_ROW) == (INPUTS, OUTPUTS)
    assert sizes(Division.COLUMN) == sizes(Division.PACKED_COLUMN) == (INPUTS, OUTPUTS // 2)
    assert sizes(Division.ROW) == (INPUTS // 2, OUTPUTS)


@pytest.mark.parametrize(
    ("division", "outputs", "inputs", "message"),
    [
        (Division.COLUMN, 95, 128, "output size 95 cannot be divided into 2 equal parts"),
        (Division.GATHERED_COLUMN, 95, 128, "output size 95"),
        (Division.PACKED_COLUMN, 98, 128, "output size 98 cannot be divided into 4 equal parts"),
        (Division.ROW, 96, 127, "input size 127"),
        (Division.SPLIT_ROW, 96, 127, "input size 127"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(division: Division, outputs: int, inputs: int, message: str) -> None:
    with pytest.raises(StartupError, match=f"{NAME}: {message}") as error:
        make_linear(NAME, empty_linear(outputs, inputs), placement(0, 2), division)
    assert "tensor-parallel size" in str(error.value)


def test_only_dtype_and_device_of_a_weight_are_known() -> None:
    part = make_linear(NAME, empty_linear(), placement(dtype=torch.bfloat16), Division.WHOLE)
    bias, x = part.bias, torch.zeros((1, INPUTS))
    assert bias is not None
    assert (part.weight.dtype, part.weight.device) == (torch.bfloat16, CPU)
    assert make_linear(NAME, empty_linear(bias=False), placement(), Division.WHOLE).bias is None
    uses: list[tuple[str, Callable[[], object]]] = [
        ("weight itself .linear", lambda: F.linear(x, part.weight)),  # ty: ignore[invalid-argument-type]
        ("weight itself .__rmatmul__|weight itself .matmul", lambda: x @ part.weight),
        ("weight itself .t", lambda: part.weight.t()),
        ("bias itself .float", lambda: bias.float()),
        ("bias itself .sub", lambda: x - bias),
        ("bias itself .cat", lambda: torch.cat((x[0], bias))),
        ("weight itself .by index", lambda: part.weight[0]),
    ]
    for message, use in uses:
        with pytest.raises(UsesWeight, match=message.replace("itself .", r"itself \(")) as error:
            use()
        assert error.value.module == NAME


def test_bytes_of_a_rank() -> None:
    place = placement(0, 2, torch.bfloat16)
    whole, half = (2 * (OUTPUTS * INPUTS // parts) for parts in (1, 2))

    def size(division: Division, place: Placement = place) -> int:
        return make_linear(NAME, empty_linear(), place, division).weight_bytes

    assert size(Division.WHOLE) == whole + 2 * OUTPUTS
    assert size(Division.ROW) == size(Division.SPLIT_ROW) == half + 2 * OUTPUTS
    assert size(Division.COLUMN) == size(Division.GATHERED_COLUMN) == size(Division.PACKED_COLUMN) == half + OUTPUTS
    small = replace(place, quantization=QUANTIZATIONS["int8"])
    assert size(Division.COLUMN, small) == OUTPUTS // 2 * (INPUTS + 8) + OUTPUTS
