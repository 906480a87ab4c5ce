"""Chooses the combinations of a parametrised test that cover every pair of its parameters' values.

Most faults need one value of one parameter or two values together (Kuhn, Wallace and Gallo, "Software fault
interactions and implications for software testing", IEEE TSE 2004). So a test at every level of instruction set,
or with a product of three parameters and more, runs combinations in which each pair of values stands somewhere, each
value at each level among them. The others are marked `product` and run in `make test-long`.
"""

import itertools
from collections.abc import Mapping, Sequence

Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(case: Mapping[str, str]) -> set[Pair]:
    """Every two values that stand together in one combination; for a single parameter, its value."""
    values = sorted(case.items())
    return set(itertools.combinations(values, 2)) or {(value, value) for value in values}


def covering_set(cases: Sequence[Mapping[str, str]], preferred: Sequence[bool]) -> set[int]:
    """Indices of combinations that cover all pairs which occur among the preferred ones.

    `cases`: for each combination the value of each parameter, as text. `preferred`: whether a combination can run
    here; of the others, which are skipped, only so many are chosen that each value stands somewhere. Greedy: always the
    combination with the most that is not covered yet, the first of equals, so every process chooses the same.
    """
    chosen: set[int] = set()
    covered: set[object] = set()
    for wanted in (True, False):
        found = [pairs_of(case) if wanted else set(case.items()) for case in cases]
        left = [index for index in range(len(cases)) if preferred[index] is wanted]
        while left:
            best = max(left, key=lambda index: (len(found[index] - covered), -index))
            if not found[best] - covered:
                break
            chosen.add(best)
            covered |= found[best]
            left.remove(best)
        covered |= {value for index in chosen for value in cases[index].items()}
    return chosen
