"""Responses that were answered lately, for `previous_response_id`: in memory, bounded in bytes, the oldest go first.

A response belongs to the API key that asked for it: no other key finds it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from server.json_text import dumps
from server.protocol.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    MessageItem,
    ReasoningItem,
    text_of,
)
from server.serving.responses.translate import Item

_OF_ITEM = 512  # bytes of an item beside its text, about
_TYPES = {"message": MessageItem, "function_call": FunctionCallItem, "reasoning": ReasoningItem}


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation before it."""

    response: dict[str, Any]
    input: tuple[Item, ...]
    size: int

    @property
    def conversation(self) -> tuple[Item, ...]:
        """What a next request goes on from: instructions are not part of it."""
        return (*self.input, *items_of(self.response))


class ResponseStore:
    """What is stored of each owner."""

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
        """What is stored, about."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, owner: str, response: dict[str, Any], items: tuple[Item, ...]) -> None:
        """Keep a response whose conversation before it was `items`. One that is larger than the store is not kept."""
        size = len(dumps(response)) + sum(map(_size, items))
        if size > self._max_bytes:
            return
        self.delete(owner, response["id"])
        self._stored[owner, response["id"]] = StoredResponse(response, items, size)
        self._items |= {(owner, item["id"]): response["id"] for item in response["output"]}
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
        if found is None:
            return None
        return next((item for item in items_of(found.response) if item.id == item_id), None)

    def delete(self, owner: str, response_id: str) -> bool:
        """Whether it was there."""
        found = self._stored.pop((owner, response_id), None)
        if found is None:
            return False
        for item in found.response["output"]:
            self._items.pop((owner, item["id"]), None)
        self._bytes -= found.size
        return True


def _size(item: Item) -> int:
    """Bytes of an item in memory, about; one that several responses share counts with each of them."""
    if isinstance(item, FunctionCallItem):
        return _OF_ITEM + len(item.arguments)
    if isinstance(item, ReasoningItem):
        return _OF_ITEM + len(item.text)
    return _OF_ITEM + len(text_of(item.output if isinstance(item, FunctionCallOutputItem) else item.content))


def items_of(response: dict[str, Any]) -> list[MessageItem | FunctionCallItem | ReasoningItem]:
    """The output of a response as items of a next request."""
    return [_TYPES[item["type"]].model_validate(item, strict=False) for item in response["output"]]
