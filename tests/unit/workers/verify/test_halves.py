"""`verify` runs layers in the form that serves as well: a half that computes something else there is named."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from oarlock.workers.kernels.cpu.structures import CLayerStep
from oarlock.workers.layers.fused_layer import PreparedLayers
from tests.golden.tiny_models import make_tiny
from tests.unit.workers.kernel_levels import NO_KERNELS
from tests.unit.workers.verify.cases import VerifyCase

needs_kernels = pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> VerifyCase:
    folder = tmp_path_factory.mktemp("model")
    model = make_tiny(folder, "qwen2", seed=3, head_dim=32, dtype=torch.bfloat16)
    return VerifyCase(model, folder / "verify", "bfloat16", block_size=16)


@needs_kernels
@pytest.mark.parametrize("size", [1, 2])
def test_every_half_of_a_right_model_is_compared(case: VerifyCase, size: int) -> None:
    comparison, causes = case.run(size)
    assert comparison.halves is not None and comparison.halves.why_not is None
    assert comparison.halves.compared == 6 and comparison.halves.differences == ()
    assert comparison.ok and causes == []


Run = Callable[[int, int, int, int], int]


def add_to_first(run: Run, number: int, amount: float) -> Run:
    """Branches of which one leaves the first number of `hidden`, in bfloat16, larger by a little."""

    def broken(branches: int, first: int, last: int, step: int) -> int:
        result = run(branches, first, last, step)
        if not first <= number < last:
            return result
        address = CLayerStep.from_address(step).hidden
        first = torch.frombuffer((ctypes.c_uint16 * 1).from_address(address), dtype=torch.bfloat16)
        first += amount
        return result

    return broken


@needs_kernels
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("number", [2, 5])
def test_a_broken_half_is_named(case: VerifyCase, monkeypatch: pytest.MonkeyPatch, number: int, size: int) -> None:
    prepare = PreparedLayers.__init__

    def prepare_broken(layers: PreparedLayers, *arguments: object, **named: object) -> None:
        prepare(layers, *arguments, **named)  # ty: ignore[invalid-argument-type]
        layers._run = add_to_first(layers._run, number, 0.5)

    monkeypatch.setattr(PreparedLayers, "__init__", prepare_broken)
    comparison, causes = case.run(size)
    first = comparison.different_halves[0]
    assert (first.layer, first.half, first.rank) == (number // 2, "mlp" if number % 2 else "attention", 0)
    assert first.largest == pytest.approx(0.5, abs=0.1)
    assert comparison.first_fault is None and not comparison.ok
    assert len(causes) == 1 and f"the {first.half} half of layer {first.layer}" in causes[0]


@pytest.mark.slow
def test_layers_that_cannot_be_prepared_say_why(tmp_path: Path) -> None:
    """Heads of 8 numbers on blocks of 8 tokens, which the C++ attention does not take."""
    comparison, _ = VerifyCase(make_tiny(tmp_path, "qwen2"), tmp_path / "verify").run(1)
    assert comparison.halves is not None and comparison.halves.compared == 0
    assert comparison.halves.why_not is not None and comparison.halves.why_not.startswith("attention is computed by")
    assert comparison.ok
