"""Runs whole models with products of quantised weights as they run on CUDA devices: in Triton's interpreter."""

import importlib.util
import os

import pytest

from oarlock.workers.layers import placement
from tests.golden.interpreter_lock import one_kernel_at_a_time

INTERPRETED = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="Triton's interpreter does not run here",
)


def use_device_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Place weights as on a device, until `monkeypatch` undoes it."""
    one_kernel_at_a_time(monkeypatch)
    monkeypatch.setattr(placement, "runs_on_host", lambda device: False)
