"""One batch of `/v1/batches`: its states and their times, as it is kept and as it is shown."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

OPEN = ("validating", "in_progress", "cancelling", "finalizing")
# Why requests of a batch have no answer: by its final state, the code and the message of their lines.
UNANSWERED = {
    "expired": ("batch_expired", "This request was not answered before the completion window ended."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was answered."),
}
_OWN = ("owner", "label", "window_s", "output_expires_s", "outcome", "written", "counts")


@dataclass(slots=True)
class Batch:
    """A description that changes; times are whole seconds of the clock."""

    id: str
    owner: str | None  # the name of its API key; None: there were no keys
    label: str | None  # of that key, whose share of the engine it takes once it is a key no more
    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: int
    model: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None
    status: str = "validating"
    outcome: str | None = None  # the state after `finalizing`
    written: dict[str, str] = field(default_factory=dict)  # ids of files that are being published, by kind
    counts: tuple[int, int, int] = (0, 0, 0)  # requests: all, answered, failed
    errors: list[dict[str, Any]] | None = None
    usage: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    cancelling_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    def enter(self, status: str) -> None:
        """Change its state, at this moment."""
        self.status = status
        if getattr(self, f"{status}_at", 0) is None:
            setattr(self, f"{status}_at", int(time.time()))

    def kept(self) -> dict[str, Any]:
        """For the directory."""
        return asdict(self)

    def wire(self) -> dict[str, Any]:
        """The object of the API."""
        members = {name: value for name, value in asdict(self).items() if name not in _OWN}
        total, completed, failed = self.counts
        members["errors"] = None if self.errors is None else {"object": "list", "data": self.errors}
        members["request_counts"] = {"total": total, "completed": completed, "failed": failed}
        return {"object": "batch", **members}
