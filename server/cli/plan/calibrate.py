"""Seconds of a step from what `oarlock bench serve` has measured, in place of the roofline's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from oarlock.engine.errors import StartupError
from oarlock.engine.preflight import Measured, StepLoad, StepTime
from oarlock.server.bench import result
from oarlock.server.bench.metrics import Sample

_EXIT_CODE = 2
_FIX = "Give results of `oarlock bench serve --concurrency N --output FILE`, of a server like those to be simulated."


class _Run(NamedTuple):
    """Figures of one run, to which the time of a step is fitted."""

    users: float  # at once
    gap_s: float  # between tokens: the median
    first_s: float  # to the first token: the median
    prompt: float  # tokens
    context: float  # tokens in the middle of an answer


def calibrated(files: Sequence[Path], estimate: StepTime) -> Measured:
    """Fit the time of a step to `files`: a straight line through their gaps by the number of users, and the first
    tokens of the run with the fewest users. With a single run, `estimate` says how much one more user adds. Raises
    `StartupError`."""
    runs = sorted((_run(file) for file in files), key=lambda run: run.users)
    users, gaps_s = np.array([run.users for run in runs]), np.array([run.gap_s for run in runs])
    if users[-1] - users[0] > 0.5:
        row_s, step_s = (float(value) for value in np.polyfit(users, gaps_s, 1))
    else:
        one, two = (_estimated(estimate, count, runs[0].context) for count in (1.0, 2.0))
        row_s = (two - one) * gaps_s[0] / _estimated(estimate, users[0], runs[0].context)
        step_s = float(gaps_s[0]) - row_s * users[0]
    row_s = max(row_s, 0.0)
    step_s = max(step_s, 0.0)
    token_s = (runs[0].first_s - step_s) / runs[0].prompt
    if runs[0].first_s <= runs[0].gap_s:
        raise StartupError(
            "--calibrate: the first tokens came as fast as all others, so what a prompt takes cannot be told.",
            "Measure with longer prompts: --input-tokens 512.",
            _EXIT_CODE,
        )
    return Measured(step_s, token_s, row_s)


def _estimated(estimate: StepTime, users: float, context: float) -> float:
    return float(estimate.seconds(StepLoad(users, users, users * context, users * context)))


def _run(file: Path) -> _Run:
    try:
        found = result.read(file)
    except StartupError as error:
        raise StartupError(f"--calibrate: {error.cause}", _FIX, _EXIT_CODE) from None
    done: list[Sample] = [one for one in found.samples if one.failure is None and one.itl_s]
    if not done or not found.summary.get("duration_s"):
        raise StartupError(f"--calibrate {file}: no request of it has two tokens or more.", _FIX, _EXIT_CODE)
    gaps = np.concatenate([one.itl_s for one in done])
    return _Run(
        users=max(1.0, sum(one.e2el_s for one in done) / found.summary["duration_s"]),
        gap_s=float(np.median(gaps)),
        first_s=float(np.median([one.ttft_s for one in done])),
        prompt=float(np.mean([one.input_tokens for one in done])),
        context=float(np.mean([one.input_tokens + one.output_tokens / 2 for one in done])),
    )
