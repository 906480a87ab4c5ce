"""Modules of transformers that keep states: a prompt in pieces beside others gives the results of one call."""

import copy
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from oarlock.workers.recurrent.states import NULL_SLOT, LayerStates, StateStep
from oarlock.workers.transformers_backend.class_description import StateCall
from oarlock.workers.transformers_backend.observers import ObservedMemory, Observer
from oarlock.workers.transformers_backend.states import Piece, SequenceStates, StateError, make_all_stateful, pieces_of

HIDDEN = 32
LENGTHS = 19, 11  # tokens of the two sequences
SLOTS = 16
SIZES = {
    "hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2,
    "linear_num_heads": 4, "linear_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "state_size": 8, "n_groups": 2, "num_heads": 8,
    "chunk_size": 4,
}  # fmt: skip
# Modules of real classes: two kinds of gated delta rules, Mamba 2, and convolutions alone or before attention.
MODULES = {
    "bailing_hybrid": ("BailingHybridDeltaAttention", "cache_params", {}),
    "kimi_linear": ("KimiLinearDeltaAttention", "cache_params", {"head_dim": None}),
    "qwen3_next": ("Qwen3NextGatedDeltaNet", "cache_params", {}),
    "mamba2": ("Mamba2Mixer", "cache_params", {}),
    "lfm2": ("Lfm2ShortConv", "past_key_values", {"layer_types": ["conv", "full_attention"]}),
    "zaya": ("ZayaCCAProjection", "past_key_values", {"layer_types": ["hybrid", "hybrid"]}),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny operations take longer on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def slots_of(calls: tuple[StateCall, ...], dtype: torch.dtype) -> dict[int, LayerStates]:
    """Return the slots of each layer. They hold NaN, except for the null slot."""
    found: dict[int, list[Tensor]] = {}
    for call in calls:
        of_call = torch.float32 if call.dtype == "float32" else dtype
        part = torch.full((SLOTS, *call.shape), float("nan"), dtype=of_call)
        part[NULL_SLOT] = 0
        found.setdefault(call.layer, []).append(part)
    return {layer: LayerStates(tuple(parts)) for layer, parts in found.items()}


def state_step(*sequences: tuple[int, int, int, list[tuple[int, int]]]) -> StateStep:
    """Return a step of sequences (tokens, slot that is read, slot that is written, saves as (length, slot))."""

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    lens, reads, writes, saves = zip(*sequences, strict=True)
    flat = [save for of_sequence in saves for save in of_sequence]
    starts = [sum(lens[:s]) for s in range(len(lens) + 1)]
    first_saves = [sum(map(len, saves[:s])) for s in range(len(lens) + 1)]
    return StateStep(
        tensor(starts), tensor(list(reads)), tensor(list(writes)), tensor(first_saves),
        tensor([save[0] for save in flat]), tensor([save[1] for save in flat]),
    )  # fmt: skip


class Harness:
    """A module of a real class with random weights, two sequences of inputs, and their results by the class itself."""

    def __init__(self, model_type: str, dtype: torch.dtype = torch.float32) -> None:
        name, self.memory, settings = MODULES[model_type]
        config = CONFIG_MAPPING[model_type](**{**SIZES, **settings})
        kind = getattr(import_module(f"transformers.models.{model_type}.modeling_{model_type}"), name)
        torch.manual_seed(1)
        self.model = nn.ModuleDict({"mixer": kind(config, layer_idx=0)}).to(dtype).eval()
        for parameter in self.model.parameters():
            parameter.requires_grad_(False).normal_(0, 0.3)
        self.inputs = [torch.randn(1, length, HIDDEN, dtype=dtype) for length in LENGTHS]
        self.calls = self._look()
        self.expected = [self._rows(self.model["mixer"](one, **{self.memory: None})) for one in self.inputs]
        self.slots = slots_of(self.calls, dtype)
        self.states = make_all_stateful(self.model, self.calls)

    def _look(self) -> tuple[StateCall, ...]:
        observed = copy.deepcopy(self.model).to("meta")
        names = {id(module): name for name, module in observed.named_modules()}
        observer = Observer(names, None, self.inputs[0].shape[1], 0)
        with observer.watching():
            observed["mixer"](self.inputs[0].to("meta"), **{self.memory: ObservedMemory()})
        return tuple(observer.states)

    @staticmethod
    def _rows(result: Any) -> Tensor:
        """Return the result as [1, tokens, values]; the module before an attention returns queries, keys and values."""
        parts = result if isinstance(result, tuple) else (result,)
        return torch.cat([part.flatten(2) for part in parts], 2)

    def step(self, *parts: tuple[int, int, int, int, int, list[tuple[int, int]]]) -> float:
        """Run parts (sequence, its first token, end, slots that are read and written, saves); return the error."""
        row = torch.cat([self.inputs[s][:, first:end] for s, first, end, *_ in parts], 1)
        expected = torch.cat([self.expected[s][:, first:end] for s, first, end, *_ in parts], 1)
        self.states.begin_step(state_step(*((end - first, *rest) for _, first, end, *rest in parts)), self.slots)
        found = self._rows(self.model["mixer"](row, **{self.memory: self.states}))
        assert found.shape == expected.shape
        return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("model_type", MODULES)
def test_pieces_give_the_results_of_one_call(model_type: str) -> None:
    harness, bound = Harness(model_type), 1e-5
    first, second = LENGTHS
    assert harness.step((0, 0, first, 0, 1, []), (1, 0, second, 0, 2, [])) < bound
    # Chunks of several sizes beside another sequence, and states that are saved in the middle and at the end.
    assert harness.step((0, 0, 2, 0, 1, []), (1, 0, 1, 0, 3, [])) < bound
    assert harness.step((1, 1, 8, 3, 4, [(2, 5), (7, 6)]), (0, 2, 12, 1, 2, [(3, 7)])) < bound
    assert harness.step((0, 12, first, 2, 1, []), (1, 8, second, 4, 3, [])) < bound
    # Each saved state leads to the same results, in one call and token by token.
    assert harness.step((1, 3, second, 5, 8, []), (0, 5, 6, 7, 9, [])) < bound
    assert harness.step((1, 8, second, 6, 8, [])) < bound
    slot = 0
    for token in range(first):
        write = 10 + token % 2
        assert harness.step((0, token, token + 1, slot, write, [])) < bound
        slot = write
    for part in harness.slots[0].parts:
        assert not part[NULL_SLOT].any() and part[12:].isnan().all()


def test_states_have_the_dtypes_of_their_slots() -> None:
    """A model in bfloat16 keeps its recurrent states in float32, also if its results come back token by token."""
    harness = Harness("kimi_linear", torch.bfloat16)
    assert [part.dtype for part in harness.slots[0].parts] == [torch.bfloat16, torch.float32]
    assert harness.step((0, 0, 7, 0, 1, [])) < 0.03
    assert harness.step((0, 7, 8, 1, 2, [])) < 0.03
    assert harness.step((0, 8, LENGTHS[0], 2, 1, [])) < 0.03


class Sums(nn.Module):
    """Adds the two tokens before each token, which are a convolution's state, in a module inside of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, cos: tuple[Tensor, Tensor], *, memory: SequenceStates) -> tuple[Tensor, None]:
        assert cos[0].shape[1] == cos[1].shape[1] == x.shape[1]
        joined = memory.update_conv_state(x.mT, 0, 1, conv_kernel_size=2)
        padded = torch.nn.functional.pad(joined, (2, 0))[..., -x.shape[1] - 2 :]
        return (padded.unfold(2, 3, 1).sum(3).mT + cos[0] * self.inner(x[0], memory)), None


class Inner(nn.Module):
    """Counts a sequence's tokens in a state of the same layer."""

    def forward(self, x: Tensor, memory: SequenceStates) -> Tensor:
        before = memory.get_recurrent_state(0)
        assert memory.has_previous_state(0) is (before is not None)
        counts = torch.arange(1.0, len(x) + 1)[:, None] + (0 if before is None else before)
        memory.update_recurrent_state(counts[-1:], 0)
        return counts


def test_several_states_of_nested_modules() -> None:
    calls = (StateCall(0, "inner", 0, (1,), "float32", False), StateCall(0, "", 1, (4, 2), "float32", True))
    module = Sums()
    states, slots = make_all_stateful(module, calls), slots_of(calls, torch.float32)
    x, cos = torch.randn(1, 9, 4), torch.rand(1, 9, 1)
    padded = torch.cat([torch.zeros(1, 2, 4), x], 1)
    expected = padded[:, 2:] + padded[:, 1:-1] + padded[:, :-2] + cos * torch.arange(1.0, 10)[None, :, None]
    states.begin_step(state_step((5, 0, 1, [(1, 3), (5, 4)]), (1, 0, 2, [])), slots)
    rows = torch.cat([x[:, :5], x[:, :1]], 1), torch.cat([cos[:, :5], cos[:, :1]], 1)
    found, nothing = module(rows[0], (rows[1], rows[1]), memory=states)
    assert nothing is None
    torch.testing.assert_close(found, torch.cat([expected[:, :5], expected[:, :1]], 1))
    torch.testing.assert_close([part[4] for part in slots[0].parts], [part[1] for part in slots[0].parts])
    for read, first in ((3, 1), (1, 5)):
        states.begin_step(state_step((9 - first, read, 5, [])), slots)
        found, _ = module(x[:, first:], (cos[:, first:], cos[:, first:]), memory=states)
        torch.testing.assert_close(found, expected[:, first:])


def test_linear_layers_that_read_the_input_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys, values, gates and decays of a whole row are products of one call; the output's are not."""
    harness, seen = Harness("kimi_linear"), []
    multiply = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *rest: seen.append(x.shape[1]) or multiply(x, *rest))
    assert harness.step((0, 0, 6, 0, 1, [(4, 5)]), (1, 0, 3, 0, 2, [])) < 1e-5
    wide = len([tokens for tokens in seen if tokens == 9])
    assert wide >= 5 and sorted(seen) == sorted([9] * wide + [4, 2, 3] * ((len(seen) - wide) // 3))
    monkeypatch.undo()
    assert harness.step((0, 6, 7, 1, 3, []), (1, 3, 4, 2, 4, [])) < 1e-5


def test_pieces_end_at_saves() -> None:
    step = state_step((4, 1, 2, [(1, 7), (4, 8)]), (2, 0, 3, []), (3, 5, 4, [(2, 9)]))
    assert list(pieces_of(step)) == [
        Piece(0, 1, 1, 2, 7), Piece(1, 4, 2, 2, 8), Piece(4, 6, 0, 3), Piece(6, 8, 5, 4, 9), Piece(8, 9, 4, 4),
    ]  # fmt: skip


def test_uses_of_the_memory_that_were_not_seen() -> None:
    calls = (StateCall(0, "", 0, (4,), "float32", False),)
    states, slots = SequenceStates(calls), slots_of(calls, torch.float32)
    states.begin_step(state_step((2, 0, 1, [])), slots)
    with pytest.raises(StateError, match="uses get_linear_cache of its memory"):
        states.get_linear_cache(0)
    with pytest.raises(StateError, match="layer 0 that the look at the class did not find"):
        states.get_recurrent_state(0)
    with pytest.raises(StateError, match="layer 1 uses a state that the look"):
        states.run(lambda: states.get_conv_state(1), (), {})
    with pytest.raises(StateError, match=r"keeps a state \[1, 1\]"):
        states.run(lambda: states.update_recurrent_state(torch.ones(1, 1), 0), (), {})
    with pytest.raises(StateError, match=r"int64 that was \[1, 4\] of torch.float32"):
        states.run(lambda: states.update_recurrent_state(torch.ones(1, 4, dtype=torch.int64), 0), (), {})
