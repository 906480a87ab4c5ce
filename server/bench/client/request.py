"""Sends one request and makes a sample of what came back, whatever went wrong."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from oarlock.server.bench.client.events import EventReader
from oarlock.server.bench.client.http_stream import BrokenError, ConnectError, HttpClient, NotHttpError, StatusError
from oarlock.server.bench.metrics import Cause, Sample
from oarlock.server.bench.workload.prompts import Piece

_MAX_DETAIL = 300


@dataclass(frozen=True, slots=True)
class RequestForm:
    """Fields that all requests of a run share."""

    model: str
    is_chat: bool = False
    ignore_eos: bool = True
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, prompt: Piece | list[dict[str, str]], output_tokens: int) -> bytes:
        """The JSON of one request. `prompt`: ids or text; of a chat, its messages."""
        fields: dict[str, Any] = {
            "model": self.model,
            "messages" if self.is_chat else "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return json.dumps(fields | dict(self.extra), separators=(",", ":")).encode()


@dataclass(slots=True)
class Asking:
    """A request on its way. `sample` is filled when it ends, in whichever way."""

    client: HttpClient
    form: RequestForm
    sample: Sample
    reader: EventReader
    run_began: float  # time.perf_counter()

    async def run(self, body: bytes) -> None:
        """Send it and read its stream. Cancelled, it counts as interrupted."""
        sample = self.sample
        began = time.perf_counter()
        sample.sent_s = began - self.run_began
        try:
            async with asyncio.timeout(self.form.timeout_s):
                await self.client.post(self.form.path, body, self.reader.feed)
        except TimeoutError:
            self._fail(Cause.TIMEOUT, f"no end within {self.form.timeout_s:g} s")
        except ConnectError as error:
            self._fail(Cause.CONNECT, str(error))
        except StatusError as error:
            self._fail(f"HTTP {error.status}", error.text)
        except NotHttpError as error:
            self._fail(Cause.MALFORMED, str(error))
        except BrokenError as error:
            self._fail(Cause.ENDED_EARLY, f"after {len(self.reader.times)} chunks: {error}")
        except asyncio.CancelledError:
            self._fail(Cause.INTERRUPTED, "stopped before its end")
            raise
        finally:
            self._fill(began, time.perf_counter())

    def _fill(self, began: float, ended: float) -> None:
        sample, reader = self.sample, self.reader
        if reader.error is not None:
            self._fail(Cause.ERROR_EVENT, reader.error)
        elif reader.malformed is not None:
            self._fail(Cause.MALFORMED, reader.malformed)
        elif sample.failure is None and not reader.times:
            self._fail(Cause.NO_CHUNK, "the response is complete and holds no chunk of an answer")
        elif sample.failure is None and not reader.is_complete:
            self._fail(Cause.ENDED_EARLY, f"after {len(reader.times)} chunks, without finish_reason or [DONE]")
        if reader.prompt_tokens is not None:
            sample.input_tokens = reader.prompt_tokens
        if reader.completion_tokens is not None:
            sample.output_tokens = reader.completion_tokens
        else:
            sample.output_tokens, sample.counted_by = len(reader.times), "chunks"
        if reader.times:
            sample.ttft_s = reader.times[0] - began
            sample.itl_s = [later - earlier for earlier, later in pairwise(reader.times)]
        sample.e2el_s = (reader.times[-1] if sample.failure is None else ended) - began

    def _fail(self, cause: str, detail: str) -> None:
        # An error event says more than the broken connection behind it.
        self.sample.failure = str(cause)
        self.sample.detail = " ".join(detail.split())[:_MAX_DETAIL]
