"""The recurrent kernels in Triton against the reference, alone and in batches, and for any division of a prompt.

On a CUDA device, or else on the CPU in Triton's interpreter.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime.interpreter import InterpretedFunction

from oarlock.workers.recurrent import operations, reference, triton_operations
from oarlock.workers.recurrent.states import StateStep
from tests.unit.workers.kernels.triton.test_triton_attention import DEVICE, SOAK, TYPES
from tests.unit.workers.kernels.triton.test_triton_variants import variant
from tests.unit.workers.kernels.triton.triton_resources import of_program

ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SLOTS, SINK = 10, 9  # the null slot is the first

# Three sequences, two of them with saves, then padding sequences, the last of them without a token.
LENS, READS, WRITES = [3, 1, 2, 1, 0], [1, 0, 6, 0, 0], [2, 5, 7, SINK, SINK]
SAVES = [[(1, 3), (2, 4)], [], [(2, 8)], [], []]
TOKENS = sum(LENS)

Rule = Callable[[Tensor, StateStep, slice], Tensor]  # states, step, tokens of the inputs -> results
each_dtype = pytest.mark.parametrize("dtype", TYPES, ids=str)


def step_of(
    lens: Sequence[int], reads: Sequence[int], writes: Sequence[int], saves: Sequence[Sequence[tuple[int, int]]] = ()
) -> StateStep:
    """Return a step of sequences of `lens` tokens. `saves`: lengths and slots of each sequence."""
    saves = saves or [[] for _ in lens]
    flat = [save for of_sequence in saves for save in of_sequence]
    starts, save_starts = ([0, *accumulate(counts)] for counts in (lens, map(len, saves)))
    columns = (starts, reads, writes, save_starts, [length for length, _ in flat], [slot for _, slot in flat])
    return StateStep(*(torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in columns))


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def states_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return slots of other values each, except the null slot."""
    states = noise(SLOTS, *shape, seed=9, dtype=dtype) / 4
    states[0] = 0.0
    return states


def delta_rule(
    kernels: Any, heads: int, key_heads: int, key: int, value: int, dtype: torch.dtype, *, decays_channels: bool = False
) -> tuple[Rule, Tensor]:
    """Return the rule over fixed inputs, parts of wider rows, and slots of states."""
    mixed = noise(TOKENS, 2 * key_heads * key + heads * value + 8, seed=1, dtype=dtype)
    q, k, v, _ = mixed.split([key_heads * key, key_heads * key, heads * value, 8], 1)
    q, k, v = q.view(TOKENS, key_heads, key), k.view(TOKENS, key_heads, key), v.view(TOKENS, heads, value)
    channels = (key,) if decays_channels else ()
    decay, beta = -noise(TOKENS, heads, *channels, seed=2).abs(), torch.sigmoid(noise(TOKENS, heads, seed=3))

    def rule(states: Tensor, step: StateStep, at: slice) -> Tensor:
        return kernels.gated_delta_rule(q[at], k[at], v[at], decay[at], beta[at], states, step)

    return rule, states_of(heads, key, value)


def mamba(
    kernels: Any, heads: int, groups: int, width: int, state: int, dtype: torch.dtype, *, skip: bool = True
) -> tuple[Rule, Tensor]:
    mixed = noise(TOKENS, heads * width + 2 * groups * state, seed=1, dtype=dtype)
    x, b, c = mixed.split([heads * width, groups * state, groups * state], 1)
    x, b, c = x.view(TOKENS, heads, width), b.view(TOKENS, groups, state), c.view(TOKENS, groups, state)
    dt, a = noise(TOKENS, heads, seed=2).abs(), -noise(heads, seed=3).abs()
    d = noise(heads, seed=4) if skip else None

    def rule(states: Tensor, step: StateStep, at: slice) -> Tensor:
        return kernels.mamba2(x[at], dt[at], a, b[at], c[at], d, states, step)

    return rule, states_of(heads, width, state)


def convolution(
    kernels: Any, channels: int, taps: int, dtype: torch.dtype, *, plain: bool = False
) -> tuple[Rule, Tensor]:
    x, weight = noise(TOKENS, channels + 16, seed=1, dtype=dtype)[:, :channels], noise(channels, taps, seed=2)
    bias = None if plain else noise(channels, seed=3)

    def rule(states: Tensor, step: StateStep, at: slice) -> Tensor:
        return kernels.causal_convolution(x[at], states, weight, bias, step, silu=not plain)

    return rule, states_of(channels, taps - 1, dtype=dtype)


# Name -> maker of a rule, and its shape. Widths that are no powers of two have masked elements.
CASES: dict[str, tuple[Callable[..., tuple[Rule, Tensor]], tuple[int, ...], dict[str, bool]]] = {
    "delta, a key head each": (delta_rule, (2, 2, 128, 20), {}),
    "delta, keys of 96 for two": (delta_rule, (4, 2, 96, 24), {}),
    "delta, keys of 256 for four": (delta_rule, (4, 1, 256, 8), {}),
    "delta, decays of channels": (delta_rule, (3, 3, 96, 20), {"decays_channels": True}),
    "mamba, a group": (mamba, (2, 1, 24, 128), {}),
    "mamba, two groups, no skip": (mamba, (4, 2, 8, 80), {"skip": False}),
    "convolution, 4 taps": (convolution, (300, 4), {}),
    "convolution, 3 taps, plain": (convolution, (40, 3), {"plain": True}),
}
each_case = pytest.mark.parametrize("case", CASES)


def made(case: str, kernels: Any, dtype: torch.dtype) -> tuple[Rule, Tensor]:
    maker, shape, options = CASES[case]
    return maker(kernels, *shape, dtype, **options)


@each_dtype
@each_case
def test_results_and_states_are_those_of_the_reference(case: str, dtype: torch.dtype, as_on_cuda: None) -> None:
    step = step_of(LENS, READS, WRITES, SAVES)
    (judge, wanted_states), (rule, states) = (made(case, kernels, dtype) for kernels in (reference, operations))
    before = states.clone()
    wanted, found = judge(wanted_states, step, slice(TOKENS)), rule(states, step, slice(TOKENS))
    assert found.dtype == wanted.dtype
    size = wanted.float().abs().max().item()
    torch.testing.assert_close(found, wanted, atol=ROUNDING[dtype] * size, rtol=ROUNDING[dtype])
    torch.testing.assert_close(states[:SINK], wanted_states[:SINK], atol=2e-6, rtol=2e-5)
    for slot in range(SLOTS):
        assert torch.equal(states[slot], before[slot]) == (slot in (0, 1, 6))


@each_case
def test_bits_do_not_depend_on_the_batch_or_on_cuts(case: str) -> None:
    """Each sequence token by token, from one slot to the other, against all of them at once."""
    rule, states = made(case, triton_operations, torch.float32)
    wanted = rule(states, step_of(LENS, READS, WRITES, SAVES), slice(TOKENS))
    start = 0
    for length, read, write, saves in zip(LENS, READS, WRITES, SAVES, strict=True):
        slots, kept = made(case, triton_operations, torch.float32)[1], dict(saves)
        for n in range(1, length + 1):
            token = slice(start + n - 1, start + n)
            found = rule(slots, step_of([1], [read], [next_read := 3 + n % 2]), token)
            assert torch.equal(found, wanted[token])
            for slot in [kept.get(n), write if n == length else None]:
                assert slot is None or write == SINK or torch.equal(slots[next_read], states[slot])
            read = next_read
        start += length


@pytest.mark.parametrize("kind", ["gates first", "norm first", "sigmoid"])
@pytest.mark.parametrize(("groups", "width"), [(3, 96), (1, 1100)])
@each_dtype
def test_gated_norm(groups: int, width: int, kind: str, dtype: torch.dtype, as_on_cuda: None) -> None:
    how: dict[str, Any] = {"gates_first": kind == "gates first", "sigmoid": kind == "sigmoid"}
    x, gate = (
        noise(4, groups, width + 8, seed=1, dtype=dtype)[..., :width],
        noise(4, groups, width, seed=2, dtype=dtype),
    )
    weight = noise(groups, width, seed=3)
    found, wanted = (each.gated_norm(x, gate, weight, 1e-5, **how) for each in (operations, reference))
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, atol=4e-6, rtol=ROUNDING[dtype])
    alone = triton_operations.gated_norm(x[2:3], gate[2:3], weight, 1e-5, **how)
    assert torch.equal(alone, found[2:3])


@pytest.mark.parametrize("gates_first", [True, False])
@each_dtype
def test_a_norm_over_heads_is_that_of_their_groups(gates_first: bool, dtype: torch.dtype) -> None:
    """Six heads of 40 values in two norms of three heads each."""
    x, gate = (noise(3, 6 * 40 + 8, seed=seed, dtype=dtype)[:, :240].view(3, 6, 40) for seed in (1, 2))
    weight = noise(6, 40, seed=3)
    squares = triton_operations.gated_squares(x, gate, gates_first=gates_first)
    parts = squares.view(3, 2, 3)
    found = triton_operations.gated_norm_of_heads(x, gate, parts, weight, 1e-5, gates_first=gates_first)
    grouped = (rows.reshape(3, 2, 120) for rows in (x, gate))
    wanted = reference.gated_norm(*grouped, weight.view(2, 120), 1e-5, gates_first=gates_first)
    assert squares.dtype == torch.float32 and found.dtype == dtype
    torch.testing.assert_close(found, wanted.view_as(found), atol=4e-6, rtol=ROUNDING[dtype])
    # A rank with the last norm's heads needs the squares of no others.
    own = x[:, 3:], gate[:, 3:], parts[:, 1:], weight[3:]
    assert torch.equal(triton_operations.gated_norm_of_heads(*own, 1e-5, gates_first=gates_first), found[:, 3:])


@each_dtype
def test_gates_have_the_values_of_float64(dtype: torch.dtype) -> None:
    """Decays near 1, whose logarithm is small, keep their digits."""
    both = noise(70, 10, seed=1, dtype=dtype) * 8
    b, a = both.chunk(2, 1)
    a_log, bias = noise(5, seed=2), noise(5, seed=3)
    decay, beta = triton_operations.delta_gates(a, b, a_log, bias, beta_scale=2.0)
    odd = triton_operations.delta_gates(a[:1], b[:1], a_log, bias)
    assert all(gate.data_ptr() % 16 == 0 for gate in odd), "the rule would be compiled anew for them"
    steps = triton_operations.mamba_steps(a, bias, 1e-3, 9.0)
    plain = triton_operations.mamba_steps(a, None, 0.0, math.inf)
    softplus = F.softplus(a.double() + bias.double())
    exact = {
        "decay": (decay, -torch.exp(a_log.double()) * softplus), "beta": (beta, 2.0 * torch.sigmoid(b.double())),
        "steps": (steps, softplus.clamp(1e-3, 9.0)), "plain": (plain, F.softplus(a.double())),
    }  # fmt: skip
    assert softplus.min() < 1e-4 and softplus.max() > 9.0
    for found, wanted in exact.values():
        torch.testing.assert_close(found, wanted.float(), atol=1e-12, rtol=1e-6)
    gated, wide = triton_operations.silu_gate(a, b), a.double() * F.silu(b.double())
    assert gated.dtype == dtype
    torch.testing.assert_close(gated, wide.to(dtype), atol=1e-6, rtol=ROUNDING[dtype])


@pytest.mark.parametrize("bound", [None, -5.0])
@each_dtype
def test_decays_of_channels_have_the_values_of_float64(bound: float | None, dtype: torch.dtype) -> None:
    """Three heads of 100 channels, more than a program computes. Decays near 1 keep their digits."""
    mixed, a_log, bias = noise(7, 320, seed=1, dtype=dtype) * 8, noise(3, seed=2), noise(3, 100, seed=3)
    f, b = mixed[:, :300].unflatten(1, (3, 100)), mixed[:, 300:303]
    found = triton_operations.kimi_gates(f, b, a_log, bias, lower_bound=bound)
    wanted = reference.kimi_gates(f, b, a_log.double(), bias.double(), lower_bound=bound)
    assert wanted[0].abs().min() < 1e-6
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=1e-30, rtol=1e-5)


def test_a_step_size_that_is_not_a_number_is_not_limited() -> None:
    """On a CUDA device, the usual minimum and maximum return the limit."""
    steps = triton_operations.mamba_steps(torch.tensor([[math.nan, 99.0]], device=DEVICE), None, 1e-3, 9.0)
    assert steps.isnan().tolist() == [[True, False]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are noted in Triton's interpreter")
@each_case
def test_launches_depend_on_shapes_alone(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without data: no value can be read. One variant is compiled for all numbers of tokens and sequences."""
    launches: list[tuple[tuple, tuple[int, ...]]] = []

    def run(function: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((variant(function, args, kwargs), grid))

    monkeypatch.setattr(InterpretedFunction, "run", run)
    monkeypatch.setattr(f"{__name__}.DEVICE", torch.device("meta"))
    rule, states = made(case, triton_operations, torch.float16)
    for tokens, sequences in [(1, 1), (2, 2), (7, 1), (7, 2), (7, 7)]:
        step = StateStep(*(torch.empty(size, dtype=torch.int32, device="meta") for size in (
            sequences + 1, sequences, sequences, sequences + 1, 0, 0)))  # fmt: skip
        rule(states, step, slice(tokens))
        blocks = math.prod(launches[-1][1]) / (tokens if "convolution" in case else sequences)
        assert blocks == math.prod(launches[0][1])
    assert len({key for key, _ in launches}) == 1


@pytest.mark.parametrize("kinds", [pytest.param(["80", "89", "90", "100"], marks=SOAK)])
def test_kernels_fit_every_kind_of_device(kinds: list[str]) -> None:
    """Compiled for each, without a device: nothing is spilled, and the next token's inputs are copied ahead."""
    found = of_program("recurrent_resources", "largest", *kinds)
    assert len(found) == 8 * len(kinds)
    assert not any(taken["stack"] for taken in found.values())
    assert not any(taken["waits"] for name, taken in found.items() if " of 256" in name)
