"""The result of one check, and the format of all results as text or JSON."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. An error keeps a server from starting; a warning makes it slower, or less certain."""

    check: str  # one or two words
    text: str  # one line
    state: str = OK
    fix: str = ""  # one line; set for a warning or an error
    facts: dict[str, Any] = field(default_factory=dict)  # the same as values and names, for programs

    def __post_init__(self) -> None:
        assert bool(self.fix) == (self.state in (WARNING, ERROR)), f"{self.check}: a fix is for what is wrong"


def as_text(findings: Iterable[Finding]) -> str:
    """Return a line for each finding, followed by a line for its fix."""
    findings = list(findings)
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<7}  {finding.check:<{width}}  {finding.text}")
        if finding.fix:
            lines.append(f"{'fix':>7}  {'':<{width}}  {finding.fix}")
    return "\n".join(lines)


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    findings = list(findings)
    return {"ok": is_fine(findings), "findings": [asdict(finding) for finding in findings]}


def is_fine(findings: Iterable[Finding]) -> bool:
    """Return whether nothing keeps a server from starting."""
    return all(finding.state != ERROR for finding in findings)
