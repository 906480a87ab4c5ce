"""Causes of wrong states: the slot that was read is named by trying each state on the recorded tensors."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oarlock.workers.attention import forward_batch
from oarlock.workers.attention.backend import LayerStep
from oarlock.workers.kernels.cpu import recurrent as cpu
from oarlock.workers.layers.gated_delta import GatedDelta
from oarlock.workers.layers.kimi_delta import KimiDelta
from oarlock.workers.layers.mamba2 import Mamba2
from oarlock.workers.layers.short_convolution import ShortConvolution
from oarlock.workers.protocol import StepMetadata
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


def late(step: StateStep) -> StateStep:
    """Save checkpoints after one token more."""
    return replace(step, save_lens=step.save_lens + 1)


# Sizes of heads that the C++ kernel of attention takes, or no attention, and so the call that computes whole layers.
OF_FUSED_LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"head_dim": 16},
    "lfm2": {"num_attention_heads": 4, "num_key_value_heads": 2},
    **{family: {"layer_types": ["linear_attention"] * 3} for family in ("kimi_linear", "bailing_hybrid")},
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], VerifyCase]:
    made: dict[str, VerifyCase] = {}

    def of(family: str) -> VerifyCase:
        folder = tmp_path_factory.mktemp(family)
        if family not in made:
            model = make_tiny(folder, family, **OF_FUSED_LAYERS.get(family, {}))
            made[family] = VerifyCase(model, folder / "run", prompts=PROMPTS, block_size=16)
        return made[family]

    return of


def use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "can_serve", lambda dtype, device: False)
    monkeypatch.setattr(cpu, "computes_gates", lambda device: False)


LATE = "its checkpoint is 1 token too late: it read the state after 4 tokens of its sequence, in place of 3"


@pytest.mark.parametrize(
    ("family", "layer", "method", "what", "uses_torch"),
    [
        ("qwen3_5_text", GatedDelta, "convolve", "convolution", False),
        ("qwen3_5_text", GatedDelta, "recur", "recurrence", True),
        ("kimi_linear", KimiDelta, "convolve", "convolution", False),
        pytest.param("bailing_hybrid", KimiDelta, "recur", "recurrence", False, marks=pytest.mark.soak),
        ("mamba2", Mamba2, "recur", "recurrence", False),
        ("mamba2", Mamba2, "convolve", "convolution", True),
        ("falcon_h1", Mamba2, "recur", "recurrence", False),  # without a norm: the gated result is compared
        ("lfm2", ShortConvolution, "_mixed", "convolution", True),
    ],
)
def test_a_late_checkpoint_of_one_operation_is_named(
    cases: Callable[[str], VerifyCase], monkeypatch: pytest.MonkeyPatch, family: str, layer: type, method: str,
    what: str, uses_torch: bool,
) -> None:  # fmt: skip
    usual = getattr(layer, method)

    def wrong(self: Any, *args: Any) -> Any:
        *inputs, step = args
        return usual(self, *inputs, replace(step, batch=replace(step.batch, state=late(step.batch.state))))

    case = cases(family)
    if uses_torch:
        use_torch(monkeypatch)
    assert case.run(1)[0].first_fault is None
    monkeypatch.setattr(layer, method, wrong)
    _, causes = case.run(1)
    assert any(f"{what} of layer 0 on rank 0: {LATE}" in one for one in causes), causes


@pytest.mark.parametrize(
    ("tensor", "cause"),
    [
        ("A_log", "recurrence of layer 0 on rank 0: model.layers.0.self_attn.A_log or dt_bias"),
        ("k_conv1d.weight", "convolution of layer 0 on rank 0: model.layers.0.self_attn.conv1d.weight"),
        ("o_norm.weight", "self_attn.o_norm: its weight"),
        ("f_a_proj.weight", "self_attn.f_a_proj.weight"),
    ],
)
@pytest.mark.soak
def test_a_damaged_tensor_of_kimi_delta_attention_is_named(
    cases: Callable[[str], VerifyCase], tmp_path: Path, tensor: str, cause: str
) -> None:
    case, name = cases("kimi_linear"), f"model.layers.0.self_attn.{tensor}"
    _, causes = case.run(1, altered(case.model, tmp_path / "other", name, lambda one: one + one.abs().mean()))
    assert any(cause in one for one in causes), causes


@pytest.mark.parametrize(
    "family", ["qwen3_5_text", pytest.param("kimi_linear", marks=pytest.mark.soak), "mamba2", "lfm2"]
)
def test_a_late_checkpoint_of_the_served_call_is_named(
    cases: Callable[[str], VerifyCase], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    usual = forward_batch.state_step

    def wrong(step: StepMetadata, device: torch.device) -> StateStep:
        return late(usual(step, device))

    case = cases(family)
    monkeypatch.setattr(forward_batch, "state_step", wrong)
    comparison, causes = case.run(2)
    assert comparison.halves is not None and comparison.halves.compared and not comparison.different_halves
    assert any(f"convolution of layer 0 on ranks 0, 1: {LATE}" in one for one in causes), causes


@pytest.mark.parametrize(
    ("method", "what", "change", "cause"),
    [
        ("convolve", "convolution", not_swapped, "its slot is stale or was not swapped: it read the state after 7"),
        ("recur", "recurrence", of_another_sequence, "it read the state after 4 tokens of sequence 2, in place of 8"),
        ("recur", "recurrence", none_at_all, "it read no state"),
    ],
)
def test_the_slot_that_mamba_read_is_named(
    cases: Callable[[str], VerifyCase], monkeypatch: pytest.MonkeyPatch, method: str, what: str,
    change: Callable[[StateStep], StateStep], cause: str,
) -> None:  # fmt: skip
    usual = getattr(Mamba2, method)

    def wrong(self: Mamba2, *args: Any) -> Any:
        *inputs, step = args
        if step.batch.context_lens[0] == len(PROMPTS[0]) + 2:
            step = replace(step, batch=replace(step.batch, state=change(step.batch.state)))
        return usual(self, *inputs, step)

    case = cases("mamba2")
    monkeypatch.setattr(Mamba2, method, wrong)
    _, causes = case.run(1)
    assert any(f"{what} of layer 0 on rank 0: {cause}" in one for one in causes), causes


@pytest.mark.parametrize(
    ("tensor", "cause"),
    [("conv1d.weight", "layers.0.mamba.conv1d.weight"), ("A_log", "A_log, dt_bias or D"), ("D", "or D")],
)
def test_a_damaged_tensor_of_mamba_is_named(
    cases: Callable[[str], VerifyCase], tmp_path: Path, tensor: str, cause: str
) -> None:
    case = cases("mamba2")
    name = f"backbone.layers.0.mixer.{tensor}"
    _, causes = case.run(1, altered(case.model, tmp_path / "other", name, lambda one: one + one.abs().mean()))
    assert any(cause in one for one in causes), causes
