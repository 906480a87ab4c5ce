"""The files that a start reads: of the model, of a tokenizer of its own, and of a chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from oarlock.server.config.settings import Settings
from oarlock.server.hub.download import OnDetailedProgress
from oarlock.server.hub.model_path import resolve, resolve_tokenizer
from oarlock.server.llm.chat_template import read_template
from oarlock.server.llm.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Paths of the files that a start reads, all on this machine."""

    model: str  # directory
    tokenizer: str | None  # directory; None: the model's
    chat_template: str | None  # file; None: that of the tokenizer
    parsers: Mapping[str, str]  # what the operator chose of how chats are written and answers read

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer. Raises `StartupError`."""
        return Tokenizer.load(self.tokenizer or self.model, self.chat_template, self.parsers)


async def find_files(settings: Settings, on_progress: OnDetailedProgress) -> ModelFiles:
    """Fetch missing files, the smallest first. Raises `StartupError`. When cancelled, a download can be resumed."""
    if settings.chat_template is not None:
        await asyncio.to_thread(read_template, settings.chat_template)
    tokenizer = await resolve_tokenizer(settings, on_progress)
    options = ("tool_call_parser", "reasoning_parser", "chat_template_content_format")
    named = {option: getattr(settings, option) for option in options}
    parsers = {option: name for option, name in named.items() if name != "auto"}
    return ModelFiles(await resolve(settings, on_progress, tokenizer), tokenizer, settings.chat_template, parsers)
