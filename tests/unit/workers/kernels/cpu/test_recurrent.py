"""The recurrent kernels of every level: against float64, for any cut and batch, and which slots they change."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from oarlock.workers.kernels.cpu import recurrent
from oarlock.workers.recurrent import reference
from oarlock.workers.recurrent.states import NULL_SLOT, StateStep
from tests.unit.workers.kernel_levels import threads
from tests.unit.workers.state_steps import state_step_of

pytestmark = pytest.mark.usefixtures("level")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SLOTS = 12
LENS = [1, 70, 5, 1, 20]  # one prompt is longer than the tokens whose inputs are prepared together
SAVES = [(1, 2, 10), (1, 64, 8), (1, 70, 9), (2, 5, 11)]  # (sequence, its tokens, slot)


STEP = state_step_of(LENS, [1, NULL_SLOT, 2, NULL_SLOT, 2], [3, 4, 5, 6, 7], SAVES)


@dataclass(frozen=True)
class Operation:
    """One recurrent operation and its sizes. `rows(T)` returns its rows in float32, and each of them with a factor."""

    state: tuple[int, ...]
    rows: Callable[[int], list[Tensor]]  # become the dtype of the model
    gates: Callable[[int], list[Tensor]]  # stay float32
    run: Callable[..., Tensor]  # module, rows, gates, states, step
    wide_state: bool = True

    def inputs(self, dtype: torch.dtype, tokens: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
        torch.manual_seed(0)
        states = torch.randn(SLOTS, *self.state)
        states[NULL_SLOT] = 0
        rows = [row.to(dtype) for row in self.rows(tokens)]
        return rows, self.gates(tokens), states if self.wide_state else states.to(dtype)


def delta(
    key_heads: int, value_heads: int, key_width: int, value_width: int, *, decays_channels: bool = False
) -> Operation:
    decays = (value_heads, key_width) if decays_channels else (value_heads,)
    widths = key_heads * key_width, key_heads * key_width, value_heads * value_width

    def log_decays(tokens: int) -> Tensor:
        found = -torch.rand(tokens, *decays)
        if decays_channels:  # one channel forgets all, in some rows beyond the range of float32, and one nothing
            found[..., 0], found[::3, ..., 0], found[..., -1] = -80.0, -400.0, 0.0
        return found

    def run(module, rows: list[Tensor], gates: list[Tensor], states: Tensor, step: StateStep) -> Tensor:
        q, k, v = rows[0].split(widths, 1)  # rows of one projection
        q, k = (part.unflatten(1, (key_heads, key_width)) for part in (q, k))
        return module.gated_delta_rule(q, k, v.unflatten(1, (value_heads, value_width)), *gates, states, step)

    return Operation(
        (value_heads, key_width, value_width),
        lambda tokens: [torch.randn(tokens, sum(widths))],
        lambda tokens: [log_decays(tokens), torch.rand(tokens, value_heads)],
        run,
    )


def mamba(heads: int, head_width: int, groups: int, state_width: int, *, skips: bool) -> Operation:
    torch.manual_seed(1)
    a, d = -torch.rand(heads), torch.rand(heads)

    def run(module, rows: list[Tensor], gates: list[Tensor], states: Tensor, step: StateStep) -> Tensor:
        wide = states.dtype
        x, b, c = rows[0].split((heads * head_width, groups * state_width, groups * state_width), 1)
        b, c = (part.unflatten(1, (groups, state_width)) for part in (b, c))
        x = x.unflatten(1, (heads, head_width))
        return module.mamba2(x, gates[0], a.to(wide), b, c, d.to(wide) if skips else None, states, step)

    return Operation(
        (heads, head_width, state_width),
        lambda tokens: [torch.randn(tokens, heads * head_width + 2 * groups * state_width)],
        lambda tokens: [torch.rand(tokens, heads)],
        run,
    )


def convolution(channels: int, taps: int, *, bias: bool, silu: bool) -> Operation:
    torch.manual_seed(1)
    weight, shift = torch.randn(channels, taps), torch.randn(channels)

    def run(module, rows: list[Tensor], gates: list[Tensor], states: Tensor, step: StateStep) -> Tensor:
        wide = torch.float64 if states.dtype == torch.float64 else torch.float32
        x = rows[0][:, 3 : 3 + channels]
        return module.causal_convolution(
            x, states, weight.to(wide), shift.to(wide) if bias else None, step, silu=silu
        )  # fmt: skip

    rows = lambda tokens: [torch.randn(tokens, channels + 5)]  # noqa: E731
    return Operation((channels, taps - 1), rows, lambda tokens: [], run, wide_state=False)


OPERATIONS = {
    "delta": delta(2, 4, 24, 70),
    "delta-equal-heads": delta(2, 2, 64, 64),
    "delta-narrow": delta(1, 3, 5, 3),
    "kimi": delta(3, 3, 24, 70, decays_channels=True),
    "kimi-equal-heads": delta(2, 2, 64, 64, decays_channels=True),
    "kimi-narrow": delta(1, 3, 5, 3, decays_channels=True),
    "mamba": mamba(4, 38, 2, 40, skips=True),
    "mamba-without-skip": mamba(2, 64, 1, 64, skips=False),
    "mamba-narrow": mamba(3, 3, 1, 5, skips=True),
    "convolution": convolution(100, 4, bias=True, silu=True),
    "convolution-of-3": convolution(64, 3, bias=False, silu=False),
    "convolution-of-7": convolution(70, 7, bias=False, silu=False),
    "convolution-of-2": convolution(7, 2, bias=True, silu=False),
}
each_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
one_of_each = pytest.mark.parametrize(
    "operation", [OPERATIONS[name] for name in ("delta", "kimi-equal-heads", "mamba", "convolution")],
    ids=["delta", "kimi", "mamba", "convolution"],
)  # fmt: skip
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_dtype
@each_operation
def test_results_and_states_are_right_and_no_other_slot_changes(operation: Operation, dtype: torch.dtype) -> None:
    rows, gates, states = operation.inputs(dtype, sum(LENS))
    exact_states, before = states.double(), states.clone()
    wide = [row.double() for row in rows], [gate.double() for gate in gates]
    exact = operation.run(reference, *wide, exact_states, STEP)
    ours = operation.run(recurrent, rows, gates, states, STEP)
    assert ours.dtype == dtype and ours.is_contiguous()
    torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=max(1e-5, torch.finfo(dtype).eps))
    written = torch.tensor([*range(3, 12)])
    torch.testing.assert_close(states[written].double(), exact_states[written], atol=1e-5, rtol=1e-5)
    assert torch.equal(states[:3], before[:3]), "slots that are read keep their states"


@each_dtype
@one_of_each
@pytest.mark.parametrize("count", [1, 8])
def test_bits_depend_neither_on_the_batch_nor_on_cuts_nor_on_threads(
    operation: Operation, dtype: torch.dtype, count: int
) -> None:
    rows, gates, states = operation.inputs(dtype, sum(LENS))
    with threads(3):
        expected, expected_states = operation.run(recurrent, rows, gates, states, STEP), states
    with threads(count):
        for seq, cuts in enumerate(([], [1, 3, 67], [2], [], [4, 19])):
            first = sum(LENS[:seq])
            states = operation.inputs(dtype, 1)[2]
            slot, free = int(STEP.reads[seq]), [3, 4]
            for begin, end in pairwise([0, *cuts, LENS[seq]]):
                saves = [(0, length - begin, kept) for s, length, kept in SAVES if s == seq and begin < length <= end]
                step = state_step_of([end - begin], [slot], free[:1], saves)
                part = slice(first + begin, first + end)
                result = operation.run(
                    recurrent, [row[part] for row in rows], [gate[part] for gate in gates], states, step
                )
                assert torch.equal(result, expected[part]), f"sequence {seq} from token {begin}"
                slot, free = free[0], [free[1], free[0]]
            assert torch.equal(states[slot], expected_states[STEP.writes[seq]])
            for s, length, kept in SAVES:
                assert s != seq or torch.equal(states[kept], expected_states[kept]), f"saved after {length} tokens"


@one_of_each
def test_a_broken_sequence_disturbs_no_other(operation: Operation) -> None:
    rows, gates, states = operation.inputs(torch.bfloat16, sum(LENS))
    healthy_states = states.clone()
    healthy = operation.run(recurrent, rows, gates, healthy_states, STEP)
    rows[0][71 + 3] = float("nan")  # of sequence 2
    ours = operation.run(recurrent, rows, gates, states, STEP)
    assert ours[71 + 3].isnan().any()
    others = [*range(71), *range(76, sum(LENS))]
    assert torch.equal(ours[others], healthy[others])
    kept = [slot for slot in range(SLOTS) if slot not in (5, 11)]
    assert torch.equal(states[kept], healthy_states[kept])


def test_a_sequence_without_tokens_keeps_its_state() -> None:
    for operation in OPERATIONS.values():
        rows, gates, states = operation.inputs(torch.float32, 4)
        step = state_step_of([2, 0, 2], [1, 2, NULL_SLOT], [3, 4, 5], [])
        operation.run(recurrent, rows, gates, states, step)
        assert torch.equal(states[4], states[2])


@each_dtype
@pytest.mark.parametrize("kind", ["gates first", "norm first", "sigmoid"])
@pytest.mark.parametrize(("tokens", "groups", "width"), [(1, 4, 128), (37, 3, 50), (2, 1, 3)])
def test_a_gated_norm_is_right_to_its_rounding(
    tokens: int, groups: int, width: int, kind: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    how: dict[str, Any] = {"gates_first": kind == "gates first", "sigmoid": kind == "sigmoid"}
    x, weight = (torch.randn(tokens, groups, width) * 3).to(dtype), torch.randn(groups, width)
    gate = (torch.randn(tokens, groups * width + 7) * 3).to(dtype)[:, 2:-5].unflatten(1, (groups, width))
    exact = reference.gated_norm(x.double(), gate.double(), weight.double(), 1e-5, **how)
    ours = recurrent.gated_norm(x, gate, weight, 1e-5, **how)
    torch.testing.assert_close(ours.double(), exact, atol=1e-6, rtol=max(2e-6, torch.finfo(dtype).eps))
    assert torch.equal(recurrent.gated_norm(x[-1:], gate[-1:], weight, 1e-5, **how), ours[-1:])


@each_dtype
@pytest.mark.parametrize("gates_first", [False, True])
@pytest.mark.parametrize("here", [2, 8])
def test_a_gated_norm_of_several_heads_is_right_to_its_rounding(
    here: int, gates_first: bool, dtype: torch.dtype
) -> None:
    """Of 8 heads in groups of 4, this rank has all or some of one group."""
    torch.manual_seed(0)
    x, weight = (torch.randn(5, 8, 20) * 3).to(dtype), torch.randn(8, 20)
    gate = (torch.randn(5, 8, 20) * 3).to(dtype)
    own = slice(4, 4 + here) if here < 4 else slice(0, 8)
    squares = recurrent.gated_squares(x, gate, gates_first=gates_first)
    exact = reference.gated_squares(x.double(), gate.double(), gates_first=gates_first)
    torch.testing.assert_close(squares.double(), exact, atol=0, rtol=1e-6)
    assert torch.equal(
        recurrent.gated_squares(x[:, own].contiguous(), gate[:, own], gates_first=gates_first), squares[:, own]
    )
    grouped = squares.unflatten(1, (2, 4))[:, own.start // 4 : (own.stop + 3) // 4]
    ours = recurrent.gated_norm_of_heads(
        x[:, own].contiguous(), gate[:, own], grouped, weight[own], 1e-5, gates_first=gates_first
    )
    of_groups = [rows.double().view(5, 2, 80) for rows in (x, gate)]
    exact = reference.gated_norm(*of_groups, weight.double().view(2, 80), 1e-5, gates_first=gates_first)
    exact = exact.view(5, 8, 20)[:, own]
    torch.testing.assert_close(ours.double(), exact, atol=1e-6, rtol=max(2e-6, torch.finfo(dtype).eps))


@each_dtype
def test_rows_are_gated_by_silu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, gate = ((torch.randn(5, 3, 21) * 4).to(dtype) for _ in range(2))
    exact = reference.silu_gate(x.double(), gate.double())
    ours = recurrent.silu_gate(x, gate)
    torch.testing.assert_close(ours.double(), exact, atol=1e-6, rtol=max(1e-6, torch.finfo(dtype).eps))


@each_dtype
def test_gates_of_heads_are_right(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    both, a_log, bias = (torch.randn(41, 26) * 20).to(dtype), torch.randn(13), torch.randn(13)
    a, b = both.split(13, 1)
    exact = reference.delta_gates(a, b, a_log.double(), bias.double(), beta_scale=2.0)
    for ours, theirs in zip(recurrent.delta_gates(a, b, a_log, bias, beta_scale=2.0), exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-30, rtol=3e-6)
    f, shifts = a[:, :12].unflatten(1, (3, 4)), torch.randn(3, 4)
    for bound in (None, -5.0):
        of_heads = a_log[:3], shifts
        found = recurrent.kimi_gates(f, b[:, :3], *of_heads, lower_bound=bound)
        wanted = reference.kimi_gates(f, b[:, :3], *(part.double() for part in of_heads), lower_bound=bound)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.double(), theirs, atol=1e-30, rtol=6e-6)
    for shift in (None, bias):
        exact = reference.mamba_steps(a.double(), None if shift is None else shift.double(), 1e-3, 30.0)
        ours = recurrent.mamba_steps(a, shift, 1e-3, 30.0)
        torch.testing.assert_close(ours.double(), exact.double(), atol=1e-30, rtol=2e-6)
