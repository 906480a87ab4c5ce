"""The conversation of a chat: its messages as OpenAI's API has them, and the file that they are kept in."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ROLES = ("system", "developer", "user", "assistant")


class ConversationError(Exception):
    """A file cannot be written, read or understood; the text is one sentence with what to do."""


@dataclass(slots=True)
class Conversation:
    """Messages of a conversation so far. `system` stands before the messages and is not one of them."""

    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    file: Path | None = None  # that it was last saved to or loaded from

    def as_messages(self) -> list[dict[str, str]]:
        """Messages that a request carries."""
        return [{"role": "system", "content": self.system}, *self.messages] if self.system else list(self.messages)

    def reset(self) -> None:
        """Forget the messages; the system prompt stays."""
        self.messages.clear()

    def save(self, name: str, model: str) -> Path:
        """Write it to `name`, or, where that is empty, to the file of before. Raises `ConversationError`."""
        path = Path(name).expanduser() if name else self.file
        if path is None:
            raise ConversationError("Name a file: /save FILE.json")
        if path.exists() and path != self.file:
            raise ConversationError(f"{path} is there already. Name another file, or remove it first.")
        text = json.dumps({"model": model, "messages": self.as_messages()}, ensure_ascii=False, indent=1)
        try:
            path.write_text(text + "\n", "utf-8")
        except OSError as error:
            raise ConversationError(f"{path} cannot be written ({error.strerror}). Name another file.") from None
        self.file = path
        return path

    def load(self, name: str) -> int:
        """Replace the messages by those of a file; returns their number. Raises `ConversationError`.

        A file of `save`, or a list of messages as a request has it; of text only.
        """
        if not name:
            raise ConversationError("Name a file: /load FILE.json")
        path = Path(name).expanduser()
        try:
            read = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise ConversationError(f"{path} cannot be read ({error.strerror}). Name another file.") from None
        except ValueError as error:
            raise ConversationError(f"{path} is not JSON ({error}). Name a file that /save wrote.") from None
        messages = _checked(path, read.get("messages") if isinstance(read, dict) else read)
        self.system = "\n\n".join(entry["content"] for entry in messages if entry["role"] in ("system", "developer"))
        self.messages = [entry for entry in messages if entry["role"] in ("user", "assistant")]
        self.file = path
        return len(self.messages)


def _checked(path: Path, messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list):
        raise ConversationError(f"{path} holds no list of messages. Name a file that /save wrote.")
    for number, entry in enumerate(messages):
        role = entry.get("role") if isinstance(entry, dict) else None
        if role not in _ROLES:
            raise ConversationError(
                f"{path}: messages[{number}].role is {role!r}; it must be one of {', '.join(_ROLES)}."
            )
        if not isinstance(entry.get("content"), str):
            raise ConversationError(f"{path}: messages[{number}].content is no text; only text can be loaded.")
    return [{"role": entry["role"], "content": entry["content"]} for entry in messages]
