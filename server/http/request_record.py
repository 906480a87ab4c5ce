"""Records of requests to generate, and the middleware's findings about a request: its id and its API key.

Records of the last thousand requests hold times, counts, ids and the label of the key, never a text. While a request
runs, its record reads from the generation; afterwards it keeps only numbers.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from oarlock.engine.stats import RequestHistory
from oarlock.server.errors import HttpError
from oarlock.server.http.api_keys import Key
from oarlock.server.llm.async_llm import AsyncLLM
from oarlock.server.llm.generation import Generation

MAX_RECORDS = 1000
FULL_S = 0.02
_MAX_CHOICES = 8  # choices of one request about which the engine is asked


@dataclass(frozen=True, slots=True)
class ChoiceRecord:
    """One choice at the engine."""

    engine_id: int
    replica: int
    finish_reason: str | None
    has_grammar: bool


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are in seconds of `time.monotonic`; None: the request has not reached that point."""

    request_id: str
    route: str
    key_label: str | None = None
    received_s: float = field(default_factory=time.monotonic)
    received_at: float = field(default_factory=time.time)  # Unix time
    parsed_s: float | None = None  # the body was read and checked
    started_s: float | None = None  # the prompts were tokenized and sent to the engine
    first_token_s: float | None = None
    ended_s: float | None = None
    streamed: bool = False
    response_id: str = ""
    num_choices: int = 0
    adapter: str | None = None  # name of the LoRA adapter
    adapter_awaited_s: float | None = None  # began to wait for the end of the adapter's first load
    adapter_ready_s: float | None = None  # the adapter was loaded
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    choices: list[ChoiceRecord] = field(default_factory=list)  # the first choices
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_sent: int = 0  # pieces of the response
    num_slow: int = 0  # pieces that waited for the client to read
    sending_s: float = 0.0  # total time of the slow pieces
    status: int = 0  # 0: the client left before the response began
    error_status: int | None = None  # includes an error inside a stream, which began with 200
    error_code: str | None = None
    error_param: str | None = None
    generation: Generation | None = None  # set while the request runs

    def started(self, generation: Generation, *, streamed: bool) -> None:
        """Record that the request was sent to the engine."""
        self.started_s, self.generation, self.streamed = time.monotonic(), generation, streamed
        self.num_choices = len(generation.choices)
        request = generation.choices[0].request
        params, self.adapter = request.params, request.adapter
        self.max_tokens, self.temperature, self.top_p = params.max_tokens, params.temperature, params.top_p

    @contextmanager
    def awaiting(self, adapter: str) -> Generator[None]:
        """Record that the request waits for the end of the first load of `adapter`, unless it is loaded already."""
        self.adapter, self.adapter_awaited_s = adapter, time.monotonic()
        yield
        self.adapter_ready_s = time.monotonic()

    def sent_slowly(self, seconds: float) -> None:
        """Record a piece that took longer than `FULL_S` to send, because the connection was full."""
        self.sending_s += seconds
        self.num_slow += 1

    def failed(self, error: HttpError) -> None:
        """Record the error that was the response or ended it. Its message is not kept: it may contain text of the
        request.
        """
        self.error_status, self.error_code, self.error_param = error.status, error.code, error.param

    def refresh(self) -> None:
        """Copy the current numbers of the generation."""
        generation = self.generation
        if generation is not None:
            self.response_id = generation.response_id
            self.first_token_s = generation.first_token_at
            self.prompt_tokens = generation.prompt_tokens
            self.cached_tokens = generation.cached_tokens
            self.completion_tokens = generation.completion_tokens
            self.choices = [
                ChoiceRecord(
                    choice.request.request_id,
                    generation.replica_of(choice),
                    choice.finish_reason,
                    choice.request.params.grammar is not None,
                )
                for choice in generation.choices[:_MAX_CHOICES]
            ]

    def ended(self, status: int) -> None:
        """Record that the response is complete, or that its client has left."""
        self.ended_s, self.status = time.monotonic(), status
        self.refresh()
        self.generation = None


class RecentRequests:
    """The records by request id, the oldest first. Clients may choose ids; of equal ids only the last is kept."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def open(self, record: RequestRecord) -> None:
        """Add the record of a new request."""
        self._records.pop(record.request_id, None)
        self._records[record.request_id] = record
        if len(self._records) > MAX_RECORDS:
            self._records.popitem(last=False)

    def find(self, given: str) -> RequestRecord | None:
        """Return the record with this id of a request or a response, or None."""
        for prefix in ("", "cmpl-", "chatcmpl-", "resp_", "embd-", "pool-", "rerank-", "score-"):
            if given.startswith(prefix) and (found := self._records.get(given.removeprefix(prefix))):
                found.refresh()
                return found
        return None

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._records.values())


async def histories_of(async_llm: AsyncLLM, record: RequestRecord) -> list[RequestHistory]:
    """Return the histories in the order of the choices, without choices that no engine knows any more."""
    asked = [
        replica.histories([choice.engine_id for choice in record.choices if choice.replica == replica.number])
        for replica in async_llm.engine.replicas
        if any(choice.replica == replica.number for choice in record.choices)
    ]
    found = {one["request_id"]: one for some in await asyncio.gather(*asked) for one in some}
    return [found[choice.engine_id] for choice in record.choices if choice.engine_id in found]


def request_id_of(scope: Any) -> str:
    """Return the id that responses carry as `X-Request-Id`."""
    return scope["state"]["request_id"]


def record_of(scope: Any) -> RequestRecord | None:
    """Return the record of a request to generate; None for all others."""
    return scope["state"].get("record")


def salt_of(scope: Any, salt: str | None) -> str | None:
    """Return the salt of a request's prompt in the prefix cache: its own `salt`, combined with its API key's if there
    are keys.

    The key's salt ensures that response times reveal nothing about the prompts of other keys.
    """
    key: Key | None = scope["state"]["key"]
    return salted(None if key is None else key.salt, salt)


def salted(owner: str | None, salt: str | None) -> str | None:
    """Return `salt_of` for the salt of a key; `owner` is None if there are no keys."""
    return salt if owner is None else f"{owner}|{salt or ''}"


def label_of(scope: Any) -> str | None:
    """Return the operator's label of the request's API key."""
    key: Key | None = scope["state"]["key"]
    return None if key is None else key.label


def client_of(scope: Any, user: str | None) -> str:
    """Return the client's name for the log: the label of the key, and a hash of the end user's name."""
    label = label_of(scope)
    parts = [] if label is None else [label]
    if user:
        parts.append("user:" + hashlib.blake2b(user.encode(), digest_size=6).hexdigest())
    return "/".join(parts)
