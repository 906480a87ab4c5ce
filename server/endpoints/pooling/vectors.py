"""Arithmetic of vectors: normalised, cut, compared. In float64, in one order of sums whatever the batch.

Apart from what calls it, since only servers of vectors and scores load numpy.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np

_LEAST_NORM = 1e-12  # torch.nn.functional.normalize divides by no less


def finished(vectors: np.ndarray, normalize: bool, dimensions: int | None) -> np.ndarray:
    """Floats [n, size] as they are sent: float32 [n, dimensions]."""
    cut = vectors if dimensions is None else vectors[:, :dimensions]
    return (_unit(cut) if normalize else cut).astype(np.float32)


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Cosine of the angle between two vectors, floats [size] each."""
    similarity = float(np.sum(_unit(first[None]) * _unit(second[None])))
    return max(-1.0, min(1.0, similarity))


def probability(logits: np.ndarray) -> float:
    """Probability of the last answer, given the logits of the wrong one, if any, and its own: float32 [1 or 2]"""
    odds = float(logits[-1]) - (float(logits[0]) if len(logits) > 1 else 0.0)
    return 1 / (1 + math.exp(-odds)) if odds >= 0 else math.exp(odds) / (1 + math.exp(odds))


def label(values: np.ndarray, sigmoid: bool) -> float:
    """The score of a head with one label, float32 [1]."""
    return probability(values) if sigmoid else float(values[0])


def encoded(vector: np.ndarray, encoding_format: str) -> Any:
    """A vector, float32 [n], as the member of an answer. Its numbers are those of the float32 exactly."""
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()


def _unit(vectors: np.ndarray) -> np.ndarray:
    """[n, k] to float64 [n, k] of length 1; zeros stay zeros."""
    wide = np.ascontiguousarray(vectors, np.float64)
    norms = np.sqrt(np.sum(wide * wide, axis=-1, keepdims=True))
    return wide / np.maximum(norms, _LEAST_NORM)
