"""Clients that send completions through a proxy, one after another, and remember how every one of them ended."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

SESSION = "X-Session-Id"


def headers(key: str, session: str) -> dict[str, str]:
    """Headers of a request of this session, by a client with this API key."""
    return {"Authorization": f"Bearer {key}", SESSION: session}


@dataclass(frozen=True)
class Ending:
    """How one request ended. Complete: all its tokens came, and for a stream its end mark."""

    session: str
    complete: bool
    what: str = ""  # status, event or exception of an incomplete one
    cached_tokens: int = 0
    prompt_tokens: int = 0


def completion(url: str, key: str, session: str, body: dict, stream: bool) -> Ending:
    """Send one request and read its whole answer. Raises nothing: a failure is part of the result."""
    body = body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})
    try:
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, headers=headers(key, session), timeout=300, trust_env=False
        ) as response:
            if response.status_code != 200:
                return Ending(session, False, f"{response.status_code} {response.read().decode()}")
            if not stream:
                usage = json.loads(response.read())["usage"]
            else:
                usage = {}
                done = False
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            return Ending(session, False, f"event {event['error']['code']}")
                        usage = event["usage"] or usage
                if not done:
                    return Ending(session, False, "the stream ended without [DONE]")
    except httpx.HTTPError as error:
        return Ending(session, False, f"{type(error).__name__}: {error}")
    complete = usage["completion_tokens"] == body["max_tokens"]
    return Ending(session, complete, "" if complete else str(usage), cached_tokens(usage), usage["prompt_tokens"])


def cached_tokens(usage: dict) -> int:
    """Tokens of the prompt that were in the prefix cache."""
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


class Load:
    """Sessions that each send one request after another until they are told to stop; every second one streams."""

    def __init__(self, url: str, key: str, sessions: list[str], max_tokens: int) -> None:
        self.endings: list[Ending] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(url, key, session, max_tokens, number % 2 == 0), daemon=True)
            for number, session in enumerate(sessions)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(300)

    @property
    def lost(self) -> list[Ending]:
        """Endings of requests that are not complete."""
        return [ending for ending in self.endings if not ending.complete]

    def _run(self, url: str, key: str, session: str, max_tokens: int, stream: bool) -> None:
        for prompt in _turns(session):
            if self._stop.is_set():
                return
            body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
            self.endings.append(completion(url, key, session, body, stream))


def _turns(session: str) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield f"# {session}\n" + "".join(f"value_{turn} = {turn}\n" for turn in range(number % 20))
