"""Plugin of pytest that keeps ten cases of each test: each next one is the one with most values not tried yet."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

MOST = 10


def spread(cases: Sequence[frozenset[tuple[str, str]]], most: int = MOST) -> list[int]:
    """Indices of `most` of `cases`, each the (parameter, value) pairs of one, in their order."""
    left, chosen, tried = list(range(len(cases))), [], set[tuple[str, str]]()
    while left and len(chosen) < most:
        best = max(left, key=lambda index: (len(cases[index] - tried), -index))
        tried |= cases[best]
        chosen.append(best)
        left.remove(best)
    return sorted(chosen)


def _values(item: pytest.Item) -> frozenset[tuple[str, str]]:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return frozenset((name, repr(value)) for name, value in parameters.items())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    items[:] = [cases[index] for cases in tests.values() for index in spread([_values(item) for item in cases])]
