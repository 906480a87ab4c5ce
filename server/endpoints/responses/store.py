"""Store of the latest responses for `previous_response_id`, in memory and limited in bytes.

A response belongs to the API key that requested it; no other key finds it. If the memory is full, the key that holds
most of it loses its oldest response. So no key can displace another key's responses beyond an equal share. Everything
is kept as JSON, so that its size is known, and without members that no later request reads.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from oarlock.server.endpoints.responses.translate import Item
from oarlock.server.json_text import dumps
from oarlock.server.schemas.response_items import (
    CompactionItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    MessageItem,
    ReasoningItem,
    ThoughtPart,
)
from oarlock.server.schemas.strict_model import StrictModel

# Bytes in addition to the JSON: id, object and store entry of a response; id of an item.
_OF_RESPONSE, _OF_ITEM = 1536, 640
_UNREAD = frozenset(
    {
        "annotations",
        "logprobs",
        "encrypted_content",
        # Requests can only set these to values without an effect.
        "prompt_cache_breakpoint",
        "caller",
        "async_",
    }
)
_TYPES = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
    "compaction": CompactionItem,
}


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation before it."""

    response: bytes  # JSON of the response as it was sent
    before: bytes  # JSON list of the items that the response answers
    output: dict[str, bytes]  # id -> JSON of each output item
    size: int

    @property
    def input(self) -> list[Item]:
        """The items that the response answers, without instructions."""
        return [_parsed(item) for item in from_json(self.before)]

    @property
    def conversation(self) -> list[Item]:
        """The conversation that the next request continues."""
        return [*self.input, *(_parsed(from_json(item)) for item in self.output.values())]


@dataclass(slots=True)
class _OwnerResponses:
    """The responses of one owner, oldest first."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    items: dict[str, str] = field(default_factory=dict)  # id of an item -> id of its response
    num_bytes: int = 0

    def remove(self, response_id: str) -> StoredResponse:
        """Remove and return a response. Raises `KeyError`."""
        found = self.responses.pop(response_id)
        for item_id in found.output:
            self.items.pop(item_id, None)
        self.num_bytes -= found.size
        return found


class ResponseStore:
    """Responses stored for each owner."""

    def __init__(self, max_bytes: int) -> None:
        """Limit the store to `max_bytes`; 0 stores nothing."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._by_owner: dict[str, _OwnerResponses] = {}  # owner -> its responses; no entry is empty

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        """Upper bound of the bytes that all stored responses take."""
        return self._bytes

    def __len__(self) -> int:
        return sum(len(stored.responses) for stored in self._by_owner.values())

    def put(self, owner: str, response: dict[str, Any], items: Iterable[Item]) -> None:
        """Keep a response that answers `items`. A response that is larger than the store is not kept."""
        written = _written(response)
        before = _written(list(map(_kept, items)))
        output = {item["id"]: _written(_kept(_parsed(item))) for item in response["output"]}
        size = _OF_RESPONSE + len(written) + len(before) + sum(_OF_ITEM + len(item) for item in output.values())
        if size > self._max_bytes:
            return
        self.delete(owner, response["id"])
        stored = self._by_owner.setdefault(owner, _OwnerResponses())
        stored.responses[response["id"]] = StoredResponse(written, before, output, size)
        stored.items |= dict.fromkeys(output, response["id"])
        stored.num_bytes += size
        self._bytes += size
        while self._bytes > self._max_bytes:
            largest = max(self._by_owner, key=lambda name: self._by_owner[name].num_bytes)
            self.delete(largest, next(iter(self._by_owner[largest].responses)))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response, which counts as the owner's latest from now on."""
        stored = self._by_owner.get(owner)
        if stored is None or response_id not in stored.responses:
            return None
        stored.responses.move_to_end(response_id)
        return stored.responses[response_id]

    def item(self, owner: str, item_id: str) -> Item | None:
        """Return an output item of a stored response."""
        stored = self._by_owner.get(owner)
        found = None if stored is None else self.get(owner, stored.items.get(item_id, ""))
        return None if found is None else _parsed(from_json(found.output[item_id]))

    def delete(self, owner: str, response_id: str) -> bool:
        """Remove a response. Return whether it was there."""
        stored = self._by_owner.get(owner)
        if stored is None or response_id not in stored.responses:
            return False
        self._bytes -= stored.remove(response_id).size
        if not stored.responses:
            del self._by_owner[owner]
        return True


def _kept(value: Any) -> Any:
    """Return the parts of an item that later requests may read, ready for JSON."""
    if isinstance(value, CompactionItem):
        return {"type": value.type, "id": value.id, "encrypted_content": value.encrypted_content}
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
