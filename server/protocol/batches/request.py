"""The request of `/v1/batches`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from oarlock.server.protocol.base import WHOLE, StrictModel

MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 86_400
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_ID_LENGTH = 64


class ExpiresAfter(StrictModel):
    """When a file is deleted by itself."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S), WHOLE]


class CreateBatchRequest(StrictModel):
    """`POST /v1/batches`."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=_ID_LENGTH)] = Field(
        description="a file of requests, one JSON object on each line, from `/v1/files`"
    )
    endpoint: Literal["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"] = Field(
        description="the `url` of every request in the file"
    )
    completion_window: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}[smhd]$")] = Field(
        description="`24h`, or another time in s, m, h or d: what has no answer by then is an error in the error file"
    )
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = Field(None, description="in the batch again, used for nothing", json_schema_extra={"x-effect": "none"})
    output_expires_after: ExpiresAfter | None = Field(
        None, description="when the output and error files are deleted by themselves; without it they stay"
    )

    @property
    def window_s(self) -> int:
        """The completion window in seconds."""
        return int(self.completion_window[:-1]) * _UNITS[self.completion_window[-1]]
