"""Types of flags for argparse: numbers with a range, whose errors name the limit."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """A whole number of at least `low` and at most `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low or (high is not None and value > high):
            limit = f"at least {low}" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{value} is out of range: it has to be {limit}")
        return value

    return parse


def positive(text: str) -> float:
    """A number above 0, or `inf`."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is out of range: it has to be above 0")
    return value


def finite(text: str) -> float:
    """A number above 0."""
    value = positive(text)
    if math.isinf(value):
        raise argparse.ArgumentTypeError("inf is out of range: it has to be finite")
    return value


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is out of range: it has to be finite and at least 0")
    return value


def below_one(text: str) -> float:
    """A number of at least 0 and below 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range: it has to be at least 0 and below 1")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if math.isnan(value):
        raise argparse.ArgumentTypeError("nan is not a number")
    return value
