"""Instructor: pydantic objects out of tool calls and out of JSON schemas, one or many, whole or growing."""

from __future__ import annotations

import asyncio
from typing import Literal

import instructor
import openai
import pydantic
from reporter import Report, arguments, expect

MESSAGES = [{"role": "user", "content": "What does os.path.join do?"}]


class Review(pydantic.BaseModel):
    """What you think, and nothing else: a tiny model would add properties until its context is used up."""

    model_config = pydantic.ConfigDict(extra="forbid")

    verdict: Literal["good", "bad"]
    stars: Literal[1, 2, 3]


def main() -> int:
    given = arguments()
    report = Report()
    asked = {"model": given.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 120, "max_retries": 0}
    server = {"base_url": f"{given.url}/v1", "api_key": "none", "max_retries": 0}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(**server), mode=mode)
        with report.exercise(f"mode {mode.name}"):
            found = client.chat.completions.create(response_model=Review, **asked)
            expect(isinstance(found, Review), found)
        with report.exercise(f"mode {mode.name}, with the raw answer, and as a growing object"):
            found, raw = client.chat.completions.create_with_completion(response_model=Review, **asked)
            expect(raw.usage.completion_tokens > 0, raw)
            grown = list(client.chat.completions.create_partial(response_model=Review, **asked))
            expect((grown[-1].verdict, grown[-1].stars) == (found.verdict, found.stars), grown[-1])
    with report.exercise("asynchronous client"):
        later = instructor.from_openai(openai.AsyncOpenAI(**server), mode=instructor.Mode.TOOLS)
        found = asyncio.run(later.chat.completions.create(response_model=Review, **asked))
        expect(isinstance(found, Review), found)
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
