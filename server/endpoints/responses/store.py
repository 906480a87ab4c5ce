"""Responses that were answered lately, for `previous_response_id`: in memory, bounded in bytes, the oldest go first.

A response belongs to the API key that asked for it: no other key finds it. Everything is kept as JSON, so that its size
is known, and without what no later request reads.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from oarlock.server.endpoints.responses.schema import (
    FunctionCallItem,
    FunctionCallOutputItem,
    MessageItem,
    ReasoningItem,
    ThoughtPart,
)
from oarlock.server.endpoints.responses.translate import Item
from oarlock.server.json_text import dumps
from oarlock.server.strict_model import StrictModel

# Bytes beside the JSON itself: of a response its id, its object and its place in the store; of an item its id's.
_OF_RESPONSE, _OF_ITEM = 1536, 640
_UNREAD = frozenset(
    {
        "annotations",
        "logprobs",
        "encrypted_content",
        # Only values that mean nothing pass.
        "prompt_cache_breakpoint",
        "caller",
        "namespace",
        "async_",
    }
)
_TYPES = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation before it."""

    response: bytes  # JSON, as it was answered
    before: bytes  # JSON: the list of the items that it was the answer to
    output: dict[str, bytes]  # JSON of each of its own items, by id
    size: int

    @property
    def input(self) -> list[Item]:
        """The items that it was the answer to; instructions are not part of them."""
        return [_parsed(item) for item in from_json(self.before)]

    @property
    def conversation(self) -> list[Item]:
        """The conversation that the next request continues."""
        return [*self.input, *(_parsed(from_json(item)) for item in self.output.values())]


class ResponseStore:
    """Responses stored for each owner."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: 0 stores nothing."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._items: dict[tuple[str, str], str] = {}  # (owner, id of an item) -> id of its response

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        """Bytes that all stored responses take at most."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, owner: str, response: dict[str, Any], items: Iterable[Item]) -> None:
        """Keep a response whose conversation before it was `items`. One that is larger than the store is not kept."""
        written = _written(response)
        before = _written(list(map(_kept, items)))
        output = {item["id"]: _written(_kept(_parsed(item))) for item in response["output"]}
        size = _OF_RESPONSE + len(written) + len(before) + sum(_OF_ITEM + len(item) for item in output.values())
        if size > self._max_bytes:
            return
        self.delete(owner, response["id"])
        self._stored[owner, response["id"]] = StoredResponse(written, before, output, size)
        self._items |= {(owner, item_id): response["id"] for item_id in output}
        self._bytes += size
        while self._bytes > self._max_bytes:
            self.delete(*next(iter(self._stored)))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Used ones are dropped later."""
        found = self._stored.get((owner, response_id))
        if found is not None:
            self._stored.move_to_end((owner, response_id))
        return found

    def item(self, owner: str, item_id: str) -> Item | None:
        """An output item of a stored response."""
        found = self.get(owner, self._items.get((owner, item_id), ""))
        return None if found is None else _parsed(from_json(found.output[item_id]))

    def delete(self, owner: str, response_id: str) -> bool:
        """Whether it was there."""
        found = self._stored.pop((owner, response_id), None)
        if found is None:
            return False
        for item_id in found.output:
            self._items.pop((owner, item_id), None)
        self._bytes -= found.size
        return True


def _kept(value: Any) -> Any:
    """Parts of an item that later requests may read, for JSON."""
    if isinstance(value, ReasoningItem) and not value.content and value.encrypted_content is not None:
        value = value.model_copy(update={"content": [ThoughtPart(type="reasoning_text", text=value.text)]})
    if isinstance(value, StrictModel):
        members = ((name, getattr(value, name)) for name in type(value).model_fields if name not in _UNREAD)
        return {name: _kept(member) for name, member in members if member is not None}
    return list(map(_kept, value)) if isinstance(value, list) else value


def _written(value: Any) -> bytes:
    return dumps(value).encode("utf-8", "replace")


def _parsed(item: dict[str, Any]) -> Item:
    return _TYPES[item.get("type", "message")].model_validate(item, strict=False)
