"""The covering set of a test's combinations has every value or every pair of values, and few combinations."""

import itertools

import pytest

from tests.covering_set import covering_set, pairs_of, values_of


def product(*sizes: int) -> list[dict[str, str]]:
    ranges = [[f"{number}" for number in range(size)] for size in sizes]
    names = [f"parameter {index}" for index in range(len(sizes))]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*ranges)]


@pytest.mark.parametrize(("sizes", "most"), [((6, 8, 3, 2, 2), 60), ((6, 4), 24), ((7,), 7), ((4, 3, 3), 18)])
def test_every_pair_stands_in_a_chosen_combination(sizes, most):
    cases = product(*sizes)
    chosen = covering_set(cases, [True] * len(cases), pairs=True)
    assert set().union(*(pairs_of(cases[index]) for index in chosen)) == set().union(*map(pairs_of, cases))
    assert len(chosen) <= most


def test_combinations_that_are_not_in_the_product_are_not_missed():
    cases = [case for case in product(4, 4, 4) if case["parameter 0"] <= case["parameter 1"]]
    chosen = covering_set(cases, [True] * len(cases), pairs=True)
    assert set().union(*(pairs_of(cases[index]) for index in chosen)) == set().union(*map(pairs_of, cases))


@pytest.mark.parametrize(("sizes", "most", "num_pairs"), [((6, 8, 3, 2, 2), 8, 60), ((6, 4), 6, 6), ((7,), 7, 7)])
def test_every_value_stands_in_a_chosen_combination(sizes, most, num_pairs):
    cases = product(*sizes)
    chosen = covering_set(cases, [True] * len(cases))
    assert set().union(*(values_of(cases[index]) for index in chosen)) == set().union(*map(values_of, cases))
    assert len(chosen) == most
    assert len(set().union(*(pairs_of(cases[index]) for index in chosen))) >= num_pairs  # they are far apart


def test_what_cannot_run_here_covers_only_what_nothing_else_does():
    cases = product(3, 4, 2)
    runs = [case["parameter 0"] != "2" for case in cases]
    chosen = covering_set(cases, runs, pairs=True)
    runnable = [case for case, runs_here in zip(cases, runs, strict=True) if runs_here]
    alone = covering_set(runnable, [True] * 16, pairs=True)
    assert {index for index in chosen if runs[index]} == {
        [index for index, runs_here in enumerate(runs) if runs_here][number] for number in alone
    }
    assert any(not runs[index] for index in chosen)
