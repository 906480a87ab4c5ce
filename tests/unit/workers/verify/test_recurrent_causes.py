"""Causes of wrong states: the slot that was read is named, from what the recorded tensors give with each state."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from oarlock.workers.attention.backend import LayerStep
from oarlock.workers.layers.gated_delta import GatedDelta
from oarlock.workers.layers.short_convolution import ShortConvolution
from oarlock.workers.recurrent.states import StateStep
from tests.golden.tiny_models import make_tiny
from tests.unit.workers.verify.cases import VerifyCase, altered

PROMPTS = [[7, 3, 250, 41, 9, 112, 300], [11, 290, 6, 31], [299, 12, 45]]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> VerifyCase:
    folder = tmp_path_factory.mktemp("recurrent")
    return VerifyCase(make_tiny(folder, "qwen3_5_text"), folder / "run", prompts=PROMPTS)


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_is_found_where_nothing_is_wrong(case: VerifyCase, size: int) -> None:
    comparison, causes = case.run(size)
    assert comparison.first_fault is None, comparison.first_fault
    assert causes == []


def not_swapped(step: StateStep) -> StateStep:
    """Read the slot that is written next, which has the state of one step earlier."""
    return replace(step, reads=step.writes)


def of_another_sequence(step: StateStep) -> StateStep:
    return replace(step, reads=step.reads.roll(1))


def none_at_all(step: StateStep) -> StateStep:
    return replace(step, reads=step.reads * 0)


@pytest.mark.parametrize(
    ("method", "change", "cause"),
    [
        (
            "convolve",
            not_swapped,
            "convolution of layer 0 on rank 0: its slot is stale or was not swapped: it read the state after 7",
        ),
        (
            "recur",
            not_swapped,
            "recurrence of layer 0 on rank 0: its slot is stale or was not swapped: it read the state after 7",
        ),
        ("convolve", of_another_sequence, "it read the state after 4 tokens of sequence 2, in place of 8 of its own 0"),
        ("recur", of_another_sequence, "it read the state after 4 tokens of sequence 2, in place of 8 of its own 0"),
        ("recur", none_at_all, "it read no state"),
    ],
)
def test_a_slot_that_should_not_have_been_read_is_named(
    case: VerifyCase, monkeypatch: pytest.MonkeyPatch, method: str, change: Callable[[StateStep], StateStep], cause: str
) -> None:
    usual = getattr(GatedDelta, method)

    def wrong(self: GatedDelta, *args: Any) -> Any:
        *inputs, step = args
        batch = step.batch
        if batch.context_lens[0] == len(PROMPTS[0]) + 2:  # the second token of each sequence after its prompt
            step = replace(step, batch=replace(batch, state=change(batch.state)))
        return usual(self, *inputs, step)

    monkeypatch.setattr(GatedDelta, method, wrong)
    _, causes = case.run(1)
    assert any(cause in one for one in causes), causes


@pytest.mark.parametrize(
    ("tensor", "cause"),
    [
        ("conv1d.weight", "linear_attn.conv1d.weight"),
        ("A_log", "linear_attn.A_log or dt_bias"),
        ("norm.weight", "linear_attn.norm: its weight"),
        ("out_proj.weight", "linear_attn.out_proj.weight"),
        ("in_proj_b.weight", "linear_attn.in_proj_b.weight"),
    ],
)
def test_a_damaged_tensor_is_named(case: VerifyCase, tmp_path: Path, tensor: str, cause: str) -> None:
    name = f"model.layers.0.linear_attn.{tensor}"
    _, causes = case.run(1, altered(case.model, tmp_path / "other", name, lambda one: one + one.abs().mean()))
    assert any(cause in one for one in causes), causes


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> VerifyCase:
    folder = tmp_path_factory.mktemp("convolutions")
    return VerifyCase(make_tiny(folder, "lfm2"), folder / "run", prompts=PROMPTS)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (not_swapped, "its slot is stale or was not swapped: it read the state after 7 tokens"),
        (of_another_sequence, "it read the state after 4 tokens of sequence 2, in place of 8 of its own 0"),
        (none_at_all, "it read no state"),
    ],
)
@pytest.mark.slow
def test_the_slot_that_a_short_convolution_read_is_named(
    short: VerifyCase, monkeypatch: pytest.MonkeyPatch, change: Callable[[StateStep], StateStep], cause: str
) -> None:
    usual = ShortConvolution._mixed

    def wrong(self: ShortConvolution, x: Tensor, step: LayerStep) -> Tensor:
        batch = step.batch
        if batch.context_lens[0] == len(PROMPTS[0]) + 2:
            step = replace(step, batch=replace(batch, state=change(batch.state)))
        return usual(self, x, step)

    monkeypatch.setattr(ShortConvolution, "_mixed", wrong)
    _, causes = short.run(1)
    assert any(f"convolution of layer 0 on rank 0: {cause}" in one for one in causes), causes


@pytest.mark.slow
def test_a_damaged_short_convolution_is_named_and_an_intact_one_is_not(short: VerifyCase, tmp_path: Path) -> None:
    assert short.run(2)[1] == []
    name = "model.layers.0.conv.conv.weight"
    _, causes = short.run(1, altered(short.model, tmp_path / "other", name, lambda one: one + one.abs().mean()))
    assert any("convolution of layer 0 on rank 0: model.layers.0.conv.conv.weight" in one for one in causes), causes
