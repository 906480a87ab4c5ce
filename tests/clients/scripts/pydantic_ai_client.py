"""Pydantic AI: an agent's text, streams, typed output by tool and by schema, and a tool that is really called."""

from __future__ import annotations

import asyncio
from typing import Literal

import pydantic
from pydantic_ai import Agent, NativeOutput, ToolDefinition, ToolOutput
from pydantic_ai.direct import model_request_sync
from pydantic_ai.messages import ModelRequest, ToolCallPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from reporter import Report, arguments, expect

QUESTION = "What does os.path.join do?"


class Review(pydantic.BaseModel):
    """What you think."""

    verdict: Literal["good", "bad"]
    stars: Literal[1, 2, 3]


async def streamed(agent: Agent) -> str:
    async with agent.run_stream(QUESTION) as run:
        return "".join([piece async for piece in run.stream_text(delta=True)])


def main() -> int:
    given = arguments()
    report = Report()
    provider = OpenAIProvider(base_url=f"{given.url}/v1", api_key="none")
    model = OpenAIChatModel(given.model, provider=provider, settings={"temperature": 0, "max_tokens": 120})
    with report.exercise("an agent's text, whole and streamed alike"):
        agent = Agent(model, instructions="Be brief.")
        whole = agent.run_sync(QUESTION)
        expect(asyncio.run(streamed(agent)) == whole.output, whole)
        expect(whole.usage.output_tokens > 0, whole.usage)
    for form in (ToolOutput, NativeOutput):
        with report.exercise(f"typed output by {form.__name__}"):
            found = Agent(model, output_type=form(Review)).run_sync(QUESTION).output
            expect(isinstance(found, Review), found)
    with report.exercise("a function tool, required"):
        tool = ToolDefinition(name="review", parameters_json_schema=Review.model_json_schema())
        wanted = ModelRequestParameters(function_tools=[tool], allow_text_output=False)
        answer = model_request_sync(model, [ModelRequest.user_text_prompt(QUESTION)], model_request_parameters=wanted)
        calls = [part for part in answer.parts if isinstance(part, ToolCallPart)]
        Review.model_validate(calls[0].args_as_dict())
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
