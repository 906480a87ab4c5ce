"""The combinations that `make test` and `make test-long` run cover every value or every pair, and are few."""

import itertools

import pytest

from tests.covering_set import covering_set, pairs_of, values_of


@pytest.mark.parametrize(
    ("sizes", "num_for_values", "num_for_pairs"), [((6, 8, 3, 2, 2), 8, 60), ((6, 4), 6, 24), ((7,), 7, 7)]
)
def test_a_covering_set_has_every_value_or_pair_and_few_combinations(sizes, num_for_values, num_for_pairs):
    product = itertools.product(*(map(str, range(size)) for size in sizes))
    cases = [{f"parameter {index}": value for index, value in enumerate(values)} for values in product]
    runs = [case["parameter 0"] != "0" for case in cases]  # the others are skipped here, and cover only their value
    for parts_of, pairs, most in ((values_of, False, num_for_values), (pairs_of, True, num_for_pairs)):
        chosen = covering_set(cases, [True] * len(cases), pairs=pairs)
        assert set().union(*map(parts_of, map(cases.__getitem__, chosen))) == set().union(*map(parts_of, cases))
        assert len(chosen) <= most
        assert [runs[index] for index in covering_set(cases, runs, pairs=pairs)].count(False) == 1
