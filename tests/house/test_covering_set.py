"""The covering set of a test's combinations has every pair of values, and few combinations."""

import itertools

import pytest

from tests.covering_set import covering_set, pairs_of


def product(*sizes: int) -> list[dict[str, str]]:
    ranges = [[f"{number}" for number in range(size)] for size in sizes]
    names = [f"parameter {index}" for index in range(len(sizes))]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*ranges)]


@pytest.mark.parametrize(("sizes", "most"), [((6, 8, 3, 2, 2), 60), ((6, 4), 24), ((7,), 7), ((4, 3, 3), 18)])
def test_every_pair_stands_in_a_chosen_combination(sizes, most):
    cases = product(*sizes)
    chosen = covering_set(cases, [True] * len(cases))
    assert set().union(*(pairs_of(cases[index]) for index in chosen)) == set().union(*map(pairs_of, cases))
    assert len(chosen) <= most


def test_combinations_that_are_not_in_the_product_are_not_missed():
    cases = [case for case in product(4, 4, 4) if case["parameter 0"] <= case["parameter 1"]]
    chosen = covering_set(cases, [True] * len(cases))
    assert set().union(*(pairs_of(cases[index]) for index in chosen)) == set().union(*map(pairs_of, cases))


def test_what_cannot_run_here_covers_only_what_nothing_else_does():
    cases = product(3, 4, 2)
    runs = [case["parameter 0"] != "2" for case in cases]
    chosen = covering_set(cases, runs)
    alone = covering_set([case for case, runs_here in zip(cases, runs, strict=True) if runs_here], [True] * 16)
    assert {index for index in chosen if runs[index]} == {
        [index for index, runs_here in enumerate(runs) if runs_here][number] for number in alone
    }
    assert any(not runs[index] for index in chosen)
