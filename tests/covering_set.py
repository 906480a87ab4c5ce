"""Chooses the combinations of a parametrised test that cover each value of its parameters, or each pair of values.

Most faults need one value of one parameter or two values together (Kuhn, Wallace and Gallo, "Software fault
interactions and implications for software testing", IEEE TSE 2004). So `make test` runs combinations in which each
value stands somewhere, as far apart from each other as can be; `make test-long` runs those in which each pair of values
does, marked `product`. The others are marked `every` and run when they are asked for.
"""

import itertools
from collections.abc import Mapping, Sequence

Case = Mapping[str, str]


def values_of(case: Case) -> set[object]:
    """Every value of one combination."""
    return set(case.items())


def pairs_of(case: Case) -> set[object]:
    """Every two values that stand together in one combination; for a single parameter, its value."""
    return set(itertools.combinations(sorted(case.items()), 2)) or values_of(case)


def covering_set(cases: Sequence[Case], preferred: Sequence[bool], *, pairs: bool = False) -> set[int]:
    """Indices of combinations that cover all values, or all pairs, which occur among the preferred ones.

    `cases`: for each combination the value of each parameter, as text. `preferred`: whether a combination can run
    here; of the others, which are skipped, only so many are chosen that each value stands somewhere. Greedy: always the
    combination with the most that is not covered yet, of equals the one with the most new pairs, and of those the
    first, so every process chooses the same.
    """
    chosen: set[int] = set()
    covered: set[object] = set()
    all_pairs = [pairs_of(case) for case in cases]
    for wanted in (True, False):
        found = all_pairs if pairs and wanted else [values_of(case) for case in cases]
        left = [index for index in range(len(cases)) if preferred[index] is wanted]
        seen: set[object] = set()  # pairs of the chosen combinations
        while left:
            best = max(left, key=lambda index: (len(found[index] - covered), len(all_pairs[index] - seen), -index))
            if not found[best] - covered:
                break
            chosen.add(best)
            covered |= found[best]
            seen |= all_pairs[best]
            left.remove(best)
        covered |= {value for index in chosen for value in cases[index].items()}
    return chosen
