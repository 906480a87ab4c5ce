"""The request of `/admin/abort`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from oarlock.server.strict_model import FieldError, StrictModel


class AbortRequest(StrictModel):
    """`POST /admin/abort`."""

    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None, description="the `X-Request-Id` of the requests to end, or the `id` of their answer"
    )
    all: bool | None = Field(False, description="true: every open request; this or `request_id`, not both")

    @model_validator(mode="after")
    def _one_of_both(self) -> AbortRequest:
        if self.request_id is None and not self.all:
            raise FieldError("request_id", "is missing: say which request to end, or all: true")
        if self.request_id is not None and self.all:
            raise FieldError("all", "cannot be combined with request_id")
        return self
