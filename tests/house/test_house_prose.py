"""The gauge: docstrings, comments and pages keep its limits, and a text that breaks them is noticed."""

import pytest

from tests.house import prose

RIDDLE = "of those that speak alone: what is left of it lies where they told it"


@pytest.mark.slow
@pytest.mark.parametrize("read", [prose.product, prose.pages])
def test_prose_keeps_the_limits(read):
    found = read()
    assert prose.num_words(found) > 20_000
    assert prose.beyond_the_limits(prose.rates(found)) == []


def test_a_riddle_breaks_every_limit():
    limits = prose.beyond_the_limits(prose.rates([prose.Prose("a.py:1", RIDDLE, is_comment=True)]))
    assert [line.partition(":")[0] for line in limits] == [*(one.name for one in prose.PATTERNS), "detached comments"]
