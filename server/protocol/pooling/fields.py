"""The fields that all requests for vectors and scores share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from oarlock.engine.types import MAX_PRIORITY, MIN_PRIORITY
from oarlock.server.protocol.base import ACCEPTED, INT32_MAX, MAX_TIMEOUT_S, WHOLE, FieldError, StrictModel

MAX_INPUTS = 2048  # of one request, as OpenAI's API allows


class PoolingFields(StrictModel):
    """What every such request may have."""

    model: Annotated[str, Field(max_length=512)] | None = Field(
        None, description="one of the served names, echoed in the answer; without it the first; unknown: 404"
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = Field(
        None,
        description="keep only so many tokens from a text's beginning, those that the model puts around it included; "
        "-1: as many as fit; without it a text that is too long is refused",
    )
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = Field(
        None,
        description="seconds until the answer is 408. The header X-Request-Timeout says the same; the shorter counts",
    )
    priority: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY), WHOLE] | None = Field(
        0, description="lower runs earlier; waiting counts as well, so that none starves"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]*$")] | None = Field(
        None, description="prompt beginnings are shared in the KV cache only between equal salts; printable ASCII"
    )
    user: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="accepted; a hash of it in the request log", json_schema_extra=ACCEPTED
    )

    @model_validator(mode="after")
    def _some_tokens_are_kept(self) -> PoolingFields:
        if self.truncate_prompt_tokens == 0:
            raise FieldError("truncate_prompt_tokens", "is 0, which would leave nothing; use -1 for what fits")
        return self
