"""Nodes of these tests look for each other, and tell each other that they wait, more often than real ones."""

import pytest

from workers.distributed.nodes import admission, joining


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_TICK_S", 0.02)
    monkeypatch.setattr(joining, "_RETRY_S", 0.02)
