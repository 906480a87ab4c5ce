"""The JSON file of a run: its settings, its figures and every request, so that it can be drawn and compared later."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from oarlock.engine.errors import StartupError
from oarlock.server.bench import metrics
from oarlock.server.bench.metrics import Sample

FORMAT = "oarlock-bench-1"
_DIGITS = 6  # microseconds


@dataclass(slots=True)
class Result:
    """A run of `kind` serve, throughput or latency.

    `settings`: what was asked for, by name. `summary`: as `metrics.summarize` makes it, or figures of the engine.
    `samples`: of `serve`, every request. `series`: of the other two, a figure's value in each iteration.
    """

    kind: str
    settings: dict[str, Any]
    summary: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    is_interrupted: bool = False
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def failures(self) -> dict[str, dict[str, Any]]:
        return metrics.failures(self.samples)

    def as_json(self) -> dict[str, Any]:
        """Everything, in terms of JSON: what was not measured is null."""
        return {
            "format": FORMAT,
            "kind": self.kind,
            "created": self.created,
            "interrupted": self.is_interrupted,
            "settings": self.settings,
            "summary": self.summary,
            "failures": self.failures,
            "client": self.client,
            "series": self.series,
            "requests": [_sample_json(sample) for sample in self.samples],
        }


def write(result: Result, file: Path) -> None:
    """Write the result as JSON. Raises `StartupError`."""
    write_text(file, json.dumps(result.as_json(), allow_nan=False) + "\n", "--output")


def write_text(file: Path, text: str, flag: str) -> None:
    """Write a report that `flag` asked for. Raises `StartupError`."""
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise StartupError(f"{flag} {file} cannot be written: {error.strerror}.", "Name another file.") from None


def read(file: Path) -> Result:
    """Read a file that `write` made. Raises `StartupError`."""
    fix = "Name a file that `oarlock bench` wrote with --output."
    try:
        found: Any = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"{file} cannot be read: {error}.", fix) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise StartupError(f"{file} is not a result of `oarlock bench` ({FORMAT}).", fix)
    try:
        return Result(
            kind=found["kind"],
            settings=found["settings"],
            summary=found["summary"],
            samples=[_sample(fields) for fields in found["requests"]],
            series=found["series"],
            client=found["client"],
            is_interrupted=found["interrupted"],
            created=found["created"],
        )
    except (KeyError, TypeError) as error:
        raise StartupError(f"{file} is damaged: {error!r}.", fix) from None


def _sample_json(sample: Sample) -> dict[str, Any]:
    return {
        "sent_s": _rounded(sample.sent_s),
        "scheduled_s": None if sample.scheduled_s is None else _rounded(sample.scheduled_s),
        "input_tokens": sample.input_tokens,
        "asked_tokens": sample.asked_tokens,
        "output_tokens": sample.output_tokens,
        "counted_by": sample.counted_by,
        "ttft_s": _rounded(sample.ttft_s),
        "e2el_s": _rounded(sample.e2el_s),
        "itl_s": [round(gap, _DIGITS) for gap in sample.itl_s],
        "failure": sample.failure,
        "detail": sample.detail,
    }


def _sample(fields: dict[str, Any]) -> Sample:
    unmeasured = {name: math.nan for name in ("ttft_s", "e2el_s") if fields[name] is None}
    values: dict[str, Any] = fields | unmeasured
    return Sample(**values)


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, _DIGITS)


def lateness_ms(samples: Sequence[Sample]) -> list[float]:
    """Lateness of the requests of an open loop: how long after its due time each was sent."""
    return [1e3 * (each.sent_s - each.scheduled_s) for each in samples if each.scheduled_s is not None]
