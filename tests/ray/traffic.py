"""Streams of OpenAI's client through the proxy, and the end of each."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import dataclass, field

import httpx
import openai

from tests.ray.cluster import MODEL

LONGEST = 900
LONG = 400
SHORT = 60
_BODY = {"ignore_eos": True}


@dataclass
class Ends:
    """How streams ended. `wrong`: whole, but another text than the model's."""

    whole: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)  # the code of the error event, or of the answer
    silent: list[str] = field(default_factory=list)  # cut without a word
    begun: int = 0  # have got some of their text

    @property
    def lost(self) -> int:
        return self.wrong + len(self.errors) + len(self.silent)

    def __str__(self) -> str:
        parts = [f"{self.whole} whole"]
        parts += [f"{number} {code}" for code, number in Counter(self.errors).items()]
        parts += [f"{len(self.silent)} cut: {self.silent[0]}"] if self.silent else []
        parts += [f"{self.wrong} wrong"] if self.wrong else []
        return ", ".join(parts)


def prompt(number: int) -> str:
    return f"import os\n# part {number % 4}\n"


def client(url: str, retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=retries,
        http_client=httpx.AsyncClient(trust_env=False, timeout=240),
    )


async def texts(url: str, tokens: int) -> dict[str, str]:
    """Answer to each prompt from one server that is asked directly, again where its queue was full."""
    async with client(url, retries=20) as one:
        asked = [prompt(number) for number in range(4)]
        answers = await asyncio.gather(
            *(
                one.completions.create(model=MODEL, prompt=text, max_tokens=tokens, temperature=0, extra_body=_BODY)
                for text in asked
            )
        )
    return {text: answer.choices[0].text for text, answer in zip(asked, answers, strict=True)}


async def stream(one: openai.AsyncOpenAI, number: int, tokens: int, expected: dict[str, str], ends: Ends) -> None:
    """Stream one request, and count its end."""
    pieces: list[str] = []
    try:
        answer = await one.completions.create(
            model=MODEL, prompt=prompt(number), max_tokens=tokens, temperature=0, stream=True, extra_body=_BODY
        )
        async for chunk in answer:
            if not pieces:
                ends.begun += 1
            pieces.append(chunk.choices[0].text)
    except openai.APIStatusError as error:
        ends.errors.append(f"{error.status_code} {error.code}")
    except openai.APIConnectionError as error:
        ends.silent.append(repr(error.__cause__ or error))
    except openai.APIError as error:  # an event of a stream
        ends.errors.append(f"event {error.code}")
    except httpx.HTTPError as error:
        ends.silent.append(repr(error))
    else:
        if "".join(pieces) == expected[prompt(number)]:
            ends.whole += 1
        else:
            ends.wrong += 1


class Streams:
    """Long streams, `number` at once, in a separate thread."""

    def __init__(self, url: str, number: int, expected: dict[str, str], tokens: int = LONG) -> None:
        self.ends = Ends()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(url, number, expected, tokens)))
        self._thread.start()

    async def _run(self, url: str, number: int, expected: dict[str, str], tokens: int) -> None:
        async with client(url) as one:
            await asyncio.gather(*(stream(one, index, tokens, expected, self.ends) for index in range(number)))

    def finish(self) -> Ends:
        self._thread.join(240)
        assert not self._thread.is_alive(), "streams did not end"
        return self.ends


class Traffic:
    """Clients that each send one short stream after another, until the context is left."""

    def __init__(self, url: str, clients: int, expected: dict[str, str], tokens: int = SHORT, retries: int = 0) -> None:
        self.ends = Ends()
        self._stop = threading.Event()
        self._arguments = (url, clients, expected, tokens, retries)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        url, clients, expected, tokens, retries = self._arguments
        async with client(url, retries) as one:

            async def again(number: int) -> None:
                while not self._stop.is_set():
                    await stream(one, number, tokens, expected, self.ends)

            await asyncio.gather(*map(again, range(clients)))

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(240)
        assert not self._thread.is_alive(), "streams did not end"
