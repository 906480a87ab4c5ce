"""Check that a prompt contains the documents of a request: most templates ignore them, or read other keys of them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from oarlock.engine.errors import RequestError


def check_documents(documents: Sequence[Mapping[str, Any]], prompt: str) -> None:
    """Raise `RequestError` if the prompt lacks the longest text of a document."""
    for position, document in enumerate(documents):
        text = max(_texts(document), key=len, default="").strip()
        escaped = json.dumps(text, ensure_ascii=False)[1:-1]  # as in a document that is written as JSON
        if not text or (text not in prompt and escaped not in prompt):
            message = (
                f"This model's chat template does not show documents[{position}] (keys: {', '.join(document)[:128]}). "
                "Write its text into a message."
            )
            raise RequestError(message, "documents", "unsupported_value")


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
