"""Every kind of difference between two answers is found, counted and described; equal answers are equal."""

from dataclasses import replace

import numpy as np
import pytest

from oarlock.engine.replay.comparison import ReplayComparison
from oarlock.workers.protocol import ALL_BANNED, FINITE, NONFINITE, StepMetadata, StepOutput, empty_step


def make_step() -> StepMetadata:
    """Two sequences, three rows: the second sequence's last two tokens."""
    return replace(
        empty_step(7),
        token_ids=np.arange(5, dtype=np.int32),
        query_start_loc=np.array([0, 2, 5], np.int32),
        seq_lens=np.array([2, 9], np.int32),
        rows=np.arange(2, dtype=np.int32),
        logits_indices=np.array([1, 3, 4], np.int32),
        target_ids=np.full(3, -1, np.int32),
        sample_positions=np.array([2, 8, 9], np.int32),
        num_logprobs=np.array([1, 1, -1], np.int32),
    )


def make_answer() -> StepOutput:
    return StepOutput(
        7,
        np.array([10, 11, 12], np.int32),
        np.full(3, FINITE, np.uint8),
        np.array([-1.5, -np.inf, 0.0], np.float32),
        np.array([1, 2, 0], np.int32),
        np.array([[10], [30], [-1]], np.int32),
        np.array([[-1.5], [-0.1], [-np.inf]], np.float32),
    )


def changed(**fields: list) -> StepOutput:
    """The answer with some elements replaced: `name=[index, value]`."""
    answer = make_answer()
    for name, (index, value) in fields.items():
        getattr(answer, name)[index] = value
    return answer


def compare(got: StepOutput, tolerance: float | None, expected: StepOutput | None = None) -> ReplayComparison:
    comparison = ReplayComparison(tolerance)
    comparison.add(make_step(), expected or make_answer(), got)
    return comparison


@pytest.mark.parametrize("tolerance", [None, 0.0, 0.1])
def test_vectors_are_compared_number_by_number(tolerance: float | None) -> None:
    def answer(numbers: list[float], lens: tuple[int, ...] = (2, 1)) -> StepOutput:
        return replace(make_answer(), pooled=np.array(numbers, np.float32), pooled_lens=np.array(lens, np.int32))

    expected = answer([1.0, -0.0, 3.0])
    assert compare(expected, tolerance, expected).is_equal
    assert compare(answer([1.0, 0.0, 3.0]), tolerance, expected).is_equal == (tolerance != 0)
    near = compare(answer([1.0, 0.0, 3.05]), tolerance, expected)
    assert near.vectors.compared == 3 and near.is_equal == (tolerance != 0)
    far = compare(answer([1.5, 0.0, 3.0]), tolerance, expected)
    assert far.is_equal == (tolerance is None) and far.vectors.largest == 0.5 and "vectors" in far.table()
    assert (far.first is None) == (tolerance is None)
    missing = compare(answer([1.0, -0.0], (2, -1)), tolerance, expected)
    assert missing.is_equal == (tolerance is None) and missing.first is not None and "[2, -1]" in missing.first


@pytest.mark.parametrize("tolerance", [None, 0.0, 0.1])
def test_the_same_answer_is_equal(tolerance: float | None) -> None:
    comparison = compare(make_answer(), tolerance)
    assert comparison.is_equal and comparison.first is None
    assert (comparison.tokens.compared, comparison.logprobs.compared) == (3, 2)
    assert (comparison.tokens.different, comparison.logprobs.different) == (0, 0)


@pytest.mark.parametrize("tolerance", [None, 0.0, 0.1])
def test_another_token_is_named_with_its_place(tolerance: float | None) -> None:
    comparison = compare(changed(token_ids=[1, 99]), tolerance)
    assert not comparison.is_equal
    assert comparison.tokens.different == 1
    assert comparison.first == "step 7, row 1 (sequence 1 of 2, position 8): expected token 11, got token 99"
    assert comparison.logprobs.compared == 1  # logprobs of different tokens are not compared


def test_not_finite_is_a_difference_and_its_token_is_none() -> None:
    comparison = compare(changed(finite=[0, NONFINITE], token_ids=[0, 0]), 0.0)
    assert comparison.tokens.different == 1
    assert comparison.first is not None and "not finite" in comparison.first
    both = changed(finite=[0, NONFINITE], token_ids=[0, 0])
    assert compare(both, 0.0, expected=changed(finite=[0, NONFINITE])).is_equal


def test_why_a_row_has_no_token_is_compared_as_well() -> None:
    broken, banned = changed(finite=[0, NONFINITE]), changed(finite=[0, ALL_BANNED], token_ids=[0, 0])
    comparison = compare(banned, 0.0, expected=broken)
    assert comparison.tokens.different == 1 and comparison.first is not None
    assert comparison.first.endswith("expected logits that are not finite, got no token allowed")
    assert compare(banned, 0.0, expected=changed(finite=[0, ALL_BANNED])).is_equal
    assert not compare(banned, 0.0).is_equal and not compare(make_answer(), 0.0, expected=banned).is_equal


@pytest.mark.parametrize(("tolerance", "is_equal"), [(None, True), (0.0, False), (1e-4, False), (0.01, True)])
def test_logprobs_are_checked_against_the_tolerance(tolerance: float | None, is_equal: bool) -> None:
    comparison = compare(changed(logprobs=[0, -1.501]), tolerance)
    assert comparison.is_equal == is_equal
    assert comparison.logprobs.largest == pytest.approx(0.001, rel=1e-3)
    assert (comparison.first is None) == is_equal
    assert "0.001" in comparison.table()


@pytest.mark.parametrize("fields", [{"ranks": [0, 3]}, {"top_ids": [1, 31]}, {"top_logprobs": [1, -0.2]}])
def test_without_tolerance_alternatives_count_too(fields: dict) -> None:
    assert not compare(changed(**fields), 0.0).is_equal
    assert compare(changed(**fields), 0.1).is_equal


def test_rows_that_did_not_ask_are_not_compared() -> None:
    assert compare(changed(logprobs=[2, -3.0], ranks=[2, 5]), 0.0).is_equal


def test_missing_rows_and_logprobs() -> None:
    short = StepOutput(7, np.array([10], np.int32), np.array([FINITE], np.uint8))
    assert not compare(short, None).is_equal
    bare = StepOutput(7, make_answer().token_ids, make_answer().finite)
    assert not compare(bare, 0.0).is_equal
    assert compare(make_answer(), 0.0, expected=bare).is_equal  # none were recorded


def test_the_first_difference_stays_the_first() -> None:
    comparison = compare(changed(token_ids=[0, 98]), 0.0)
    first = comparison.first
    comparison.add(make_step(), make_answer(), changed(token_ids=[1, 99]))
    assert comparison.first == first and comparison.tokens.different == 2
