"""Confidence intervals of a ratio of two runs, by resampling blocks of consecutive requests.

Requests that run together are slow or fast together, so single requests must not be drawn: that would give intervals
that are too narrow. The circular block bootstrap of Politis and Romano (1992) draws stretches of consecutive requests
instead; a run's end is followed by its beginning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

Statistic = Callable[[np.ndarray], np.ndarray]  # indices of requests, shape [draws, n] -> a figure per draw: [draws]
DRAWS = 2000
_AT_ONCE = 250  # draws, so that the arrays of indices stay small


def block_length(count: int, together: int) -> int:
    """Requests per block: at least those that run together and n^(1/3), and never over a tenth of the run."""
    return max(1, min(max(together, round(count ** (1 / 3))), count // 10))


def draw_blocks(count: int, length: int, draws: int, random: np.random.Generator) -> np.ndarray:
    """Indices of `draws` resampled runs of `count` requests: shape [draws, count]."""
    blocks = -(-count // length)
    starts = random.integers(0, count, (draws, blocks, 1))
    return ((starts + np.arange(length)) % count).reshape(draws, -1)[:, :count]


def resampled(statistic: Statistic, count: int, length: int, random: np.random.Generator) -> np.ndarray:
    """The figure in each of `DRAWS` resampled runs: shape [DRAWS]."""
    parts = [statistic(draw_blocks(count, length, _AT_ONCE, random)) for _ in range(DRAWS // _AT_ONCE)]
    return np.concatenate(parts)


def ratio_interval(
    first: np.ndarray, second: np.ndarray, ratio: float, blocks: int, confidence: float
) -> tuple[float, float]:
    """The interval of second / first from the resampled figures of two independent runs: percentiles of their ratios.

    `ratio`: as measured; `blocks`: in the run that has fewer of them. Resampling k blocks shows (k - 1) / k of the
    variance, and k is small, so the interval is stretched to that of Student's t with k - 1 degrees of freedom.
    """
    tail = 50 * (1 - confidence)
    ends = np.percentile(second / first, [tail, 100 - tail])
    stretch = _student(confidence, blocks - 1) * math.sqrt(blocks / (blocks - 1)) if blocks > 1 else math.inf
    low, high = (ratio * math.exp(stretch * math.log(end / ratio)) for end in ends)
    return low, high


def _student(confidence: float, freedom: int) -> float:
    """The quantile of Student's t as a multiple of the normal one, by the expansion of Cornish and Fisher."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return 1 + (first + second) / z
