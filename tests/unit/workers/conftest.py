"""Fixtures that run a test at each level of instruction set that this processor has."""

from collections.abc import Generator

import pytest

from workers.kernels.cpu import levels, library
from workers.kernels.cpu.levels import EMULATED_BF16_DOT, Level
from workers.platform.processor import features

LEVELS = levels.available()
if LEVELS and EMULATED_BF16_DOT.machine == LEVELS[0].machine and EMULATED_BF16_DOT.needs <= features():
    LEVELS = [*LEVELS, EMULATED_BF16_DOT]


@pytest.fixture(params=LEVELS, ids=lambda level: level.name)
def level(request: pytest.FixtureRequest) -> Generator[Level]:
    """Each level in turn; its kernels are those that the test uses."""
    with library.using(request.param):
        if reason := library.why_not():
            pytest.skip(reason)
        yield request.param


@pytest.fixture(params=["torch", *LEVELS], ids=lambda form: form if isinstance(form, str) else form.name)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    """The name of the form that computes: torch's operations, then the kernels of each level in turn."""
    if request.param == "torch":
        monkeypatch.setattr(library, "why_not", lambda: "this test runs without kernels")
        yield "torch"
        return
    with library.using(request.param):
        if reason := library.why_not():
            pytest.skip(reason)
        yield request.param.name
