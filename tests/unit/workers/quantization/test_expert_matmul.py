"""Every product with experts against a loop in float64, in every form of weights, and what a token's bits depend on."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from oarlock.workers.distributed.all_reduce import tree_sum
from oarlock.workers.kernels.cpu.build import ISALevel
from oarlock.workers.kernels.cpu.experts import CppExpertMatmul
from oarlock.workers.kernels.triton import availability
from oarlock.workers.quantization.expert_matmul import TorchExpertMatmul, cpp_expert_matmul, expert_matmul
from oarlock.workers.quantization.expert_weights import ExpertMatmul, ExpertsShape, ExpertWeights, gate_of
from oarlock.workers.quantization.fp8 import Fp8Weight
from oarlock.workers.quantization.grouped import GroupedWeight
from oarlock.workers.quantization.int4 import round_groups, rounded
from oarlock.workers.quantization.int8 import Int8Weight, round_rows
from oarlock.workers.quantization.matmul import GatedMatmul
from oarlock.workers.quantization.method import DenseWeight, LinearWeight, StackedWeight, StoredRows, WeightShard
from oarlock.workers.quantization.registry import QUANTIZATIONS
from oarlock.workers.quantization.triton_experts import GROUPED, TritonExpertMatmul, why_not
from oarlock.workers.quantization.weight_only import WeightOnly, of_mxfp4
from tests.unit.workers.kernel_levels import NO_KERNELS, PARAMETERS, threads, using

HIDDEN, WIDTH, EXPERTS = 72, 128, 5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # of products in Triton, else interpreted


def in_triton(shape: ExpertsShape, experts: Iterable[ExpertWeights], way: str | None = None) -> ExpertMatmul:
    """The product on a device; inputs and results are on the host. `way`: for all numbers of tokens."""

    def placed(one: ExpertWeights) -> ExpertWeights:
        biases = (None if bias is None else bias.to(DEVICE) for bias in (one.gate_up_bias, one.down_bias))
        return ExpertWeights(one.gate_up.on(DEVICE), one.down.on(DEVICE), *biases)

    product = TritonExpertMatmul(shape, map(placed, experts))
    product.chosen = [] if way is None else [(1, way)]
    return lambda *inputs: product(*(part.to(DEVICE) for part in inputs)).cpu()


MAKERS: dict[str, Callable[..., ExpertMatmul]] = {
    "torch": TorchExpertMatmul,
    "cpp": cpp_expert_matmul,
    "triton": in_triton,
    "grouped": partial(in_triton, way=GROUPED),
}
MISSING = {"cpp": NO_KERNELS is not None, "triton": find_spec("triton") is None}
PRODUCTS = [kind for kind in MAKERS if not MISSING.get(kind) and kind != "grouped"]
# Form of weights and type of x -> how far results may be from float64, as a share of their size. int8 and int4 round
# inputs to 8 bits, and weights are compared as they were before they were rounded.
FORMS = {
    ("none", torch.float32): 1e-6,
    ("none", torch.bfloat16): 1e-2,
    ("none", torch.float16): 2e-3,
    ("int8", torch.bfloat16): 5e-2,
    ("int8", torch.float16): 5e-2,
    ("int4", torch.bfloat16): 0.25,
    ("int4", torch.float16): 0.25,
}


def skip_what_is_not_interpreted(kind: str, dtype: torch.dtype) -> None:
    if kind == "triton" and dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter multiplies bfloat16 otherwise than devices do")


class Source:
    """`WeightSource` of tensors in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.tensors[name].shape)

    def take(self, name: str, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        assert tuple(shape) == self.shape_of(name)
        into.copy_(self.tensors[name].narrow(dim, start, into.shape[dim]))

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        raise AssertionError


class Experts:
    """Random experts of one form, of which ranks hold parts."""

    def __init__(self, form: str, dtype: torch.dtype, *, bias: bool = False, **shape: object) -> None:
        draw = torch.Generator().manual_seed(5)

        def random(*lengths: int) -> Tensor:
            return torch.randn(lengths, generator=draw).div_(lengths[-1] ** 0.5).to(dtype)

        self.tensors: dict[str, Tensor] = {}
        for expert in range(EXPERTS):
            for part, lengths in (("gate", (WIDTH, HIDDEN)), ("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH))):
                self.tensors[f"{expert}.{part}.weight"] = random(*lengths)
                self.tensors[f"{expert}.{part}.bias"] = random(1, lengths[0])[0] if bias else torch.zeros(0)
        self.form, self.dtype, self.bias, self.shape = form, dtype, bias, shape

    @property
    def first_parts(self) -> tuple[str, ...]:
        """The matrices of the first matmul."""
        return ("gate", "up") if self.shape.get("is_gated", True) else ("up",)

    def rank(self, kind: str, rank: int = 0, size: int = 1, slices: int = 1) -> ExpertMatmul:
        """The part of `rank` of `size`, with `slices` over all ranks."""
        count = WIDTH // size
        shape = ExpertsShape(0, EXPERTS, HIDDEN, count, self.dtype, slices // size, **self.shape)  # ty: ignore[invalid-argument-type]
        return MAKERS[kind](shape, (self._weights(expert, rank, count, slices // size) for expert in range(EXPERTS)))

    def dealt(self, kind: str, first: int, count: int, groups: int, group: int) -> ExpertMatmul:
        shape = ExpertsShape(first, count, HIDDEN, WIDTH, self.dtype, 1, groups, group)
        return MAKERS[kind](shape, (self._weights(expert, 0, WIDTH, 1) for expert in range(first, first + count)))

    def _weights(self, expert: int, rank: int, count: int, slices: int) -> ExpertWeights:
        source, method = Source(self.tensors), QUANTIZATIONS[self.form].method()

        def empty(*lengths: int) -> Tensor:
            return torch.empty(lengths, dtype=self.dtype)

        rows = tuple(StoredRows(f"{expert}.{part}", WIDTH, rank * count, count) for part in self.first_parts)
        gate_up = WeightShard(rows, HIDDEN, 0, HIDDEN)
        down = WeightShard(
            (StoredRows(f"{expert}.down", HIDDEN, 0, HIDDEN),), WIDTH, rank * count, count, slices=slices
        )
        biases = (gate_up.take_bias(source, empty), down.take_bias(source, empty)) if self.bias else (None, None)
        return ExpertWeights(
            method.load(gate_up, source, empty),
            method.load(down, source, empty),
            biases[0],
            biases[1] if rank == 0 else None,
        )

    def exact(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The loop in float64, one token and expert after the other."""
        shape = ExpertsShape(0, EXPERTS, HIDDEN, WIDTH, self.dtype, **self.shape)  # ty: ignore[invalid-argument-type]
        out = torch.zeros((len(x), HIDDEN), dtype=torch.float64)
        for token in range(len(x)):
            for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
                *first, down = (
                    self.tensors[f"{expert}.{part}.weight"].double() for part in (*self.first_parts, "down")
                )
                row = x[token : token + 1].double() * (weight if shape.weighs_inputs else 1.0)
                both = torch.cat([row @ matrix.T for matrix in first], 1)
                if self.bias:
                    both += torch.cat([self.tensors[f"{expert}.{part}.bias"].double() for part in self.first_parts])
                result = gate_of(both, shape).double() @ down.T
                if self.bias:
                    result += self.tensors[f"{expert}.down.bias"].double()
                out[token] += result[0] * (1.0 if shape.weighs_inputs else weight)
        return out


def routed(tokens: int, top_k: int = 2, *, only: int | None = None) -> tuple[Tensor, Tensor]:
    """Ids and weights of random choices; `only`: every token's first is that one, and nothing else."""
    draw = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(EXPERTS - 1, generator=draw)[:top_k] for _ in range(tokens)]).sort(1).values
    if only is not None:
        ids = torch.full((tokens, 1), only)
    return ids.int(), torch.rand(ids.shape, generator=draw) + 0.1


def inputs(tokens: int, dtype: torch.dtype) -> Tensor:
    return torch.randn((tokens, HIDDEN), generator=torch.Generator().manual_seed(tokens)).to(dtype)


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("tokens", [1, 3, 17, 130])
@pytest.mark.parametrize(("form", "dtype"), FORMS)
@pytest.mark.slow
def test_results_match_a_loop_in_float64(kind: str, tokens: int, form: str, dtype: torch.dtype) -> None:
    skip_what_is_not_interpreted(kind, dtype)
    experts, x = Experts(form, dtype), inputs(tokens, dtype)
    product = experts.rank(kind)
    for chosen in (routed(tokens), routed(tokens, 4), routed(tokens, only=EXPERTS - 1)):
        exact, found = experts.exact(x, *chosen), product(x, *chosen)
        assert found.dtype == torch.float32 and found.shape == exact.shape
        assert (found - exact).norm() <= FORMS[form, dtype] * exact.norm()


@pytest.mark.skipif("triton" not in PRODUCTS, reason="Triton is not installed")
@pytest.mark.parametrize("shape", [{}, {"activation": "gelu_tanh"}, {"activation": "clamped_swiglu"}], ids=str)
@pytest.mark.slow
def test_torchs_grouped_products_are_near_too(shape: dict[str, object]) -> None:
    """The sums of all experts, and of two ranks with some each; between products numbers are rounded to bfloat16."""
    experts, x, chosen = Experts("none", torch.bfloat16, **shape), inputs(130, torch.bfloat16), routed(130, 4)
    exact = experts.exact(x, *chosen)
    assert (experts.rank("grouped")(x, *chosen) - exact).norm() <= 1e-2 * exact.norm()
    if not shape:
        parts = [experts.dealt("grouped", *part, 1, 0)(x, *chosen) for part in ((0, 3), (3, 2))]
        assert (parts[0] + parts[1] - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize(
    "shape", [{"activation": "gelu_tanh"}, {"activation": "clamped_swiglu", "limit": 0.5}], ids=str
)
def test_activations_and_biases(kind: str, shape: dict[str, object]) -> None:
    experts, x, chosen = Experts("none", torch.float32, bias=True, **shape), inputs(9, torch.float32), routed(9)
    exact = experts.exact(x, *chosen)
    assert (experts.rank(kind)(x, *chosen) - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("kind", [kind for kind in PRODUCTS if kind != "triton"])
@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_experts_without_a_gate(kind: str, form: str, dtype: torch.dtype) -> None:
    shape = {"activation": "relu2" if dtype == torch.bfloat16 else "gelu", "is_gated": False}
    experts, x, chosen = Experts(form, dtype, bias=form == "none", **shape), inputs(9, dtype), routed(9, 3)
    exact, found = experts.exact(x, *chosen), experts.rank(kind)(x, *chosen)
    assert (found - exact).norm() <= FORMS[form, dtype] * exact.norm()
    alone = experts.rank(kind, slices=4)(x, *chosen)
    assert torch.equal(alone, tree_sum([experts.rank(kind, rank, 2, 4)(x, *chosen) for rank in range(2)]))


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_weights_that_multiply_inputs(kind: str, form: str, dtype: torch.dtype) -> None:
    skip_what_is_not_interpreted(kind, dtype)
    experts, x, chosen = Experts(form, dtype, weighs_inputs=True), inputs(9, dtype), routed(9, 3)
    exact, found = experts.exact(x, *chosen), experts.rank(kind)(x, *chosen)
    assert (found - exact).norm() <= FORMS[form, dtype] * exact.norm()
    alone = experts.rank(kind, slices=4)(x, *chosen)
    assert torch.equal(alone, tree_sum([experts.rank(kind, rank, 2, 4)(x, *chosen) for rank in range(2)]))


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize(
    ("form", "dtype"), [("none", torch.float32), ("none", torch.bfloat16), ("int8", torch.bfloat16)]
)
def test_ranks_of_every_number_add_up_to_the_same_bits(kind: str, form: str, dtype: torch.dtype) -> None:
    skip_what_is_not_interpreted(kind, dtype)
    experts, x, chosen = Experts(form, dtype, bias=True), inputs(5, dtype), routed(5)
    alone = experts.rank(kind, slices=4)(x, *chosen)
    for size in (2, 4):
        parts = [experts.rank(kind, rank, size, 4)(x, *chosen) for rank in range(size)]
        assert torch.equal(alone, tree_sum(parts)), f"{size} ranks"


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.slow
def test_whole_experts_dealt_to_ranks_add_up_to_the_same_bits(kind: str) -> None:
    """In groups of two, of which the third has one and the last none: every number of ranks has the same four."""
    dtype = torch.float16 if kind == "triton" else torch.bfloat16
    experts, x, chosen = Experts("none", dtype), inputs(5, dtype), routed(5, 4)
    alone = experts.dealt(kind, 0, EXPERTS, 4, 2)(x, *chosen)
    halves = [experts.dealt(kind, first, count, 2, 2)(x, *chosen) for first, count in ((0, 4), (4, 1))]
    quarters = [experts.dealt(kind, *part, 1, 2)(x, *chosen) for part in ((0, 2), (2, 2), (4, 1), (5, 0))]
    assert torch.equal(alone, tree_sum(halves)) and torch.equal(alone, tree_sum(quarters))
    assert (alone - experts.exact(x, *chosen)).norm() <= 1e-2 * alone.norm()


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_bits_of_a_token_depend_only_on_that_token(kind: str, form: str, dtype: torch.dtype) -> None:
    skip_what_is_not_interpreted(kind, dtype)
    if kind == "triton" and dtype != torch.float32:
        pytest.skip("blocks of pairs, which differ with their number, add up in another order on devices")
    product = Experts(form, dtype).rank(kind, slices=2)
    x, (ids, weights) = inputs(40, dtype), routed(40)
    together = product(x, ids, weights)
    for token in (0, 21, 39):
        one = slice(token, token + 1)
        assert torch.equal(product(x[one], ids[one], weights[one])[0], together[token])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(product(x[order], ids[order], weights[order]), together[order])
    assert product(x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)


def grouped(weight: Tensor) -> GroupedWeight:
    """`weight` [N, K] in groups of 32, each with an offset, its inputs in another order."""
    inputs = weight.shape[1]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    values, scales = round_groups(weight[:, order])
    scales = scales.float()
    return GroupedWeight(values, scales, 32, weight.dtype, offsets=scales * 3, bits=4, order=order)


def float8(weight: Tensor) -> Fp8Weight:
    scales = torch.rand((len(weight), -(-weight.shape[1] // 128)), generator=torch.Generator().manual_seed(0)) + 0.5
    return Fp8Weight(weight.to(torch.float8_e4m3fn), scales, 128, weight.dtype)


# Weights [N, K] as each kind of packed weight holds them.
STORED: dict[str, Callable[[Tensor], LinearWeight]] = {
    "dense": DenseWeight,
    "dense, float32": DenseWeight,
    "int8": lambda weight: Int8Weight(*round_rows(weight), weight.dtype),
    "int4": rounded,
    "offsets, another order": grouped,
    "fp8": float8,
}


@pytest.mark.parametrize("level", PARAMETERS)
@pytest.mark.parametrize(
    ("stored", "slices"),
    [*((stored, 1) for stored in STORED), *((stored, 2) for stored in ("dense", "dense, float32", "int8", "fp8"))],
)
def test_the_kernel_has_the_bits_of_separate_products(level: ISALevel, stored: str, slices: int) -> None:
    """With any number of threads and tokens; the first expert is stored in another form than the rest."""
    draw = torch.Generator().manual_seed(1)
    hidden, width = 136, 160
    dtype = {"dense": torch.float16, "dense, float32": torch.float32}.get(stored, torch.bfloat16)
    shape = ExpertsShape(0, EXPERTS, hidden, width, dtype, slices)
    products = []
    with using(level):
        for expert in range(EXPERTS):
            form = DenseWeight if expert == 0 else STORED[stored]
            up, down = (
                form(torch.randn(size, generator=draw).div_(12).to(dtype))
                for size in ((2 * width, hidden), (hidden, width))
            )
            products.append((up.gated_matmul(None, "silu"), down.matmul(float32_output=True, slices=slices), None))
        kernel = CppExpertMatmul(shape, products)
    for tokens, count in ((700, 2), (9, 2), (1, 1)):
        x = torch.randn((tokens, hidden), generator=draw).to(dtype)
        ids, weights = routed(tokens, 3)
        sums = torch.zeros((slices, tokens, hidden))
        for expert, (up, down, _) in enumerate(products):
            rows, places = (ids == expert).nonzero(as_tuple=True)
            for number, part in enumerate(up(x[rows]).chunk(slices, 1)):
                alone = torch.zeros((len(rows), width), dtype=dtype)
                alone[:, number * part.shape[1] : (number + 1) * part.shape[1]] = part
                sums[number, rows] += weights[rows, places, None] * down(alone)
        with threads(count):
            assert torch.equal(kernel(x, ids, weights), tree_sum(list(sums)))


@pytest.mark.skipif("triton" not in PRODUCTS, reason="Triton is not installed")
@pytest.mark.slow
def test_numbers_of_mxfp4_are_multiplied_as_they_are_stored() -> None:
    """Every number of e2m1, with scales of 2 ** -3 to 2 ** 2, beside the same experts written out."""
    draw = torch.Generator().manual_seed(2)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    hidden, width, dtype = 64, 32, torch.float32
    stored, dense = [], []
    for _ in range(3):
        parts = []
        for outputs, length in ((2 * width, hidden), (hidden, width)):
            codes = torch.randint(0, 16, (outputs, length), generator=draw)
            exponents = torch.randint(124, 130, (outputs, length // 32), generator=draw).to(torch.uint8)
            packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
            numbers = table[codes] * (2.0 ** (exponents.float() - 127)).repeat_interleave(32, 1)
            parts.append((WeightOnly(of_mxfp4(packed, exponents), dtype), DenseWeight(numbers)))
        stored.append(ExpertWeights(parts[0][0], parts[1][0]))
        dense.append(ExpertWeights(parts[0][1], parts[1][1]))
    shape = ExpertsShape(0, 3, hidden, width, dtype, activation="clamped_swiglu")
    x = torch.randn((20, hidden), generator=draw)
    ids, weights = torch.tensor([[0, 2]] * 20, dtype=torch.int32), torch.rand((20, 2), generator=draw)
    found, wanted = TritonExpertMatmul(shape, stored)(x, ids, weights), TorchExpertMatmul(shape, dense)(x, ids, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.skipif("triton" not in PRODUCTS, reason="Triton is not installed")
def test_experts_on_a_device_are_multiplied_by_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ExpertsShape(0, 1, 4, 2, torch.float32)
    weights = [DenseWeight(torch.zeros(4, 4)), DenseWeight(torch.zeros(4, 2))]
    assert not isinstance(expert_matmul(shape, [ExpertWeights(*weights)]), TritonExpertMatmul)
    monkeypatch.setattr(availability, "can_serve", lambda _: True)
    assert isinstance(expert_matmul(shape, [ExpertWeights(*weights)]), TritonExpertMatmul)
    assert why_not(ExpertWeights(StackedWeight(weights, [4, 4]), weights[1])) == "no kernel reads a StackedWeight"


@pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")
def test_no_expert_is_packed_twice() -> None:
    packed = []

    class Counted(DenseWeight):
        def gated_matmul(self, bias: Tensor | None, activation: str) -> GatedMatmul:
            packed.append(self)
            return super().gated_matmul(bias, activation)

    experts = [ExpertWeights(Counted(torch.zeros(64, 32)), DenseWeight(torch.zeros(32, 32))) for _ in range(3)]
    product = expert_matmul(ExpertsShape(0, 3, 32, 32, torch.float32), experts)
    assert isinstance(product, CppExpertMatmul) and packed == [one.gate_up for one in experts]
