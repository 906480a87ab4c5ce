"""Fixtures that run a test at levels of instruction set that this processor has, each kind of vectors once."""

from collections.abc import Generator

import pytest

from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.build import ISALevel
from oarlock.workers.kernels.triton import availability
from oarlock.workers.quantization import matmul
from tests.unit.workers.kernel_levels import VECTORS, using


@pytest.fixture(params=VECTORS)
def level(request: pytest.FixtureRequest) -> Generator[ISALevel]:
    """Each kind of vectors in turn; its kernels are those that the test uses."""
    with using(request.param):
        yield request.param


@pytest.fixture(params=["torch", *VECTORS])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    """The name of the form that computes: torch's operations, then the kernels of each kind of vectors in turn."""
    if request.param == "torch":
        monkeypatch.setattr(library, "why_not", lambda *_: "this test runs without kernels")
        yield "torch"
        return
    with using(request.param):
        yield request.param.name


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers on the CPU use the kernels in Triton, which are interpreted, and no others."""
    monkeypatch.setattr(library, "why_not", lambda *_: "this test runs without kernels")
    monkeypatch.setattr(matmul, "can_pack", lambda *_: False)
    monkeypatch.setattr(availability, "can_serve", lambda _: True)
