"""Outcomes of one class: what was measured of it with each code that may serve it. Torch-free."""

from dataclasses import asdict, dataclass, field
from typing import Any

OURS, THEIRS = "oarlock", "transformers"  # codes, as `--model-impl` names them
SIZES = (1, 2)  # tensor-parallel sizes that are tried


@dataclass(frozen=True, slots=True)
class Run:
    """One class on a number of ranks, computed by one code."""

    error: float | None = None  # largest error of a logit, as a multiple of transformers' own in float32
    largest: float | None = None  # the same, as a share of the largest logit
    same_bits: bool | None = None  # whether other sequences of a batch leave the bits of a sequence as they are
    fault: str | None = None  # one line: what is wrong, or why it does not run; None: it is right


@dataclass(frozen=True, slots=True)
class Code:
    """One class, computed by one code."""

    refusal: str | None = None  # one line: why the code does not serve the class; the rest is empty then
    runs: dict[int, Run] = field(default_factory=dict)  # by tensor-parallel size

    @property
    def ranks(self) -> int:
        """The largest tensor-parallel size that is right, if all smaller ones are; 0: none."""
        right = 0
        for size in SIZES:
            run = self.runs.get(size)
            if run is None or run.fault is not None:
                break
            right = size
        return right

    @property
    def reason(self) -> str | None:
        """Why the class is not served by this code; None: it is, at least by one rank."""
        if self.refusal is not None:
            return self.refusal
        return None if self.ranks else self.runs[SIZES[0]].fault


@dataclass(frozen=True, slots=True)
class Row:
    """One class in the table."""

    name: str
    model_type: str
    codes: dict[str, Code] = field(default_factory=dict)  # by `OURS` and `THEIRS`; without `OURS`: it has no page
    fault: str | None = None  # its process crashed or took too long; `codes` is empty then

    @property
    def server(self) -> str | None:
        """The code that serves the class by default; None: it is refused."""
        if OURS in self.codes:
            return OURS if self.codes[OURS].ranks else None
        served = self.codes.get(THEIRS)
        return THEIRS if served is not None and served.ranks else None

    @property
    def wrong(self) -> list[str]:
        """Runs that finished and were wrong, as `code TP size: fault`."""
        return [
            f"{code} TP {size}: {run.fault}"
            for code, measured in self.codes.items()
            for size, run in measured.runs.items()
            if run.fault is not None
        ]

    @property
    def verdict(self) -> dict[str, Any]:
        """What the packaged table says about transformers' code for this class."""
        code = self.codes.get(THEIRS)
        if code is None:
            return {"refused": self.fault or "it was not tried"}
        return {"ranks": code.ranks} if code.reason is None else {"refused": code.reason}

    def encoded(self) -> dict[str, Any]:
        """Return the row as values for JSON."""
        return asdict(self)

    @staticmethod
    def decoded(fields: dict[str, Any]) -> "Row":
        """Return the row that `encoded` made, after JSON turned its numbers of ranks into strings."""
        codes = {
            name: Code(code["refusal"], {int(size): Run(**run) for size, run in code["runs"].items()})
            for name, code in fields["codes"].items()
        }
        return Row(fields["name"], fields["model_type"], codes, fields["fault"])
