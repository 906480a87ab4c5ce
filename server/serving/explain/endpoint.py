"""`GET /v1/requests/{id}`: finds a request's record, asks the engine about its choices, and reports."""

from __future__ import annotations

from typing import Any

from oarlock.server.errors import HttpError
from oarlock.server.serving.base import OpenAIServing
from oarlock.server.serving.explain.histories import histories_of
from oarlock.server.serving.explain.records import MAX_RECORDS
from oarlock.server.serving.explain.report import report


class OpenAIServingExplain(OpenAIServing):
    """Reports on the last requests to generate."""

    state_name = "explain"

    async def explain(self, given: str) -> dict[str, Any]:
        """`given`: the id of a request or of its answer. Raises `HttpError` (404)."""
        record = self.state.requests.find(given)
        if record is None:
            message = f"None of the last {MAX_RECORDS} requests to generate has this id."
            raise HttpError(404, message, param="id", code="request_not_found")
        histories = [] if self.state.async_llm is None else await histories_of(self.state.async_llm, record)
        wanted = {one for history in histories for one in history["ahead"]}
        return report(record, histories, self._response_ids(wanted), self.settings.enable_prefix_caching)

    def _response_ids(self, engine_ids: set[int]) -> dict[int, str]:
        """The ids of answers by the numbers that the engine has for their choices, as far as they are known."""
        found = {}
        for record in self.state.requests:
            record.refresh()
            for choice in record.choices:
                if choice.engine_id in engine_ids:
                    found[choice.engine_id] = record.response_id
        return found
