"""A client in the middle of a long stream, for tests of what happens to it."""

from __future__ import annotations

import json
import threading
from typing import Protocol

import httpx

from tests.e2e.long_context import LONG


class HasUrl(Protocol):
    """A server, or a proxy before some."""

    url: str


class OpenStream(threading.Thread):
    """Begins at once. `flowing` is set with the first event; `last` is the newest; `done` says that `[DONE]` came."""

    def __init__(
        self, server: HasUrl, tokens: int = LONG, headers: dict[str, str] | None = None, **fields: object
    ) -> None:
        super().__init__(daemon=True)
        self.url = server.url
        self.headers = headers or {}
        self.body = {"prompt": "import os\n", "stream": True, "max_tokens": tokens, "ignore_eos": True, **fields}
        self.flowing = threading.Event()
        self.last: dict = {}
        self.done = False
        self.failure: Exception | None = None
        self.start()

    def run(self) -> None:
        url = f"{self.url}/v1/completions"
        try:
            with httpx.stream(
                "POST", url, json=self.body, headers=self.headers, timeout=120, trust_env=False
            ) as response:
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        self.done = True
                    elif line.startswith("data: "):
                        self.last = json.loads(line[6:])
                        self.flowing.set()
        except httpx.HTTPError as error:
            self.failure = error
