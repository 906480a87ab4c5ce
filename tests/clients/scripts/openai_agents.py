"""OpenAI's Agents SDK: a plan, forced calls that really run, their results, an answer, and a handoff."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pydantic
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from reporter import Report, arguments, expect

QUESTION = "What does os.path.join do?"
# An answer that the token limit cuts counts as a failure there, and the demo model likes to go on: a sentence will do.
SETTINGS = ModelSettings(temperature=0, max_tokens=600, store=False, extra_body={"stop": [".", "?"]})
noted: list[tuple[str, int]] = []


class Plan(pydantic.BaseModel):
    """What is to be done."""

    first: Literal["read", "ask"]
    steps: Literal[1, 2, 3]


@function_tool
def note(verdict: Literal["good", "bad"], stars: Literal[1, 2, 3]) -> str:
    """Note what you think."""
    noted.append((verdict, stars))
    return f"noted: {verdict}"


def kinds(items: list[Any]) -> list[str]:
    return [item.type for item in items]


async def exercises(report: Report, model: Any, name: str) -> None:
    """`name`: of the API below `model`."""
    with report.exercise(f"{name}: a plan by schema"):
        planner = Agent("planner", model=model, output_type=Plan, model_settings=SETTINGS)
        planned = await Runner.run(planner, QUESTION)
        expect(isinstance(planned.final_output, Plan), planned)
    forced = SETTINGS.resolve(ModelSettings(tool_choice="required", parallel_tool_calls=False))
    worker = Agent("worker", instructions="Be brief.", model=model, tools=[note], model_settings=forced)
    with report.exercise(f"{name}: a forced call runs, and its result is answered"):
        noted.clear()
        done = await Runner.run(worker, QUESTION, max_turns=4)
        expect(len(noted) == 1, noted)
        expect(kinds(done.new_items)[:2] == ["tool_call_item", "tool_call_output_item"], done.new_items)
        expect(len(done.raw_responses) == 2 and isinstance(done.final_output, str), done)
        expect(all(turn.usage.output_tokens > 0 for turn in done.raw_responses), done.raw_responses)
    with report.exercise(f"{name}: the same as a stream"):
        noted.clear()
        streamed = Runner.run_streamed(worker, QUESTION, max_turns=4)
        seen = [event.item async for event in streamed.stream_events() if event.type == "run_item_stream_event"]
        expect(kinds(seen) == kinds(done.new_items), seen)
        expect(streamed.final_output == done.final_output, streamed.final_output)
    with report.exercise(f"{name}: the conversation goes on"):
        more = await Runner.run(
            Agent("worker", instructions="Be brief.", model=model, tools=[note], model_settings=SETTINGS),
            [*done.to_input_list(), {"role": "user", "content": "And on Windows?"}],
        )
        first, later = done.raw_responses[0].usage.input_tokens, more.raw_responses[0].usage.input_tokens
        expect(later > first, (first, later))
    with report.exercise(f"{name}: a handoff by a forced call"):
        other = Agent("other", instructions="Be brief.", model=model, model_settings=SETTINGS)
        desk = Agent("desk", model=model, handoffs=[other], model_settings=forced)
        handed = await Runner.run(desk, QUESTION, max_turns=4)
        expect(handed.last_agent.name == "other" and handed.final_output, handed)


async def run(report: Report) -> None:
    given = arguments()
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{given.url}/v1", api_key="none")
    await exercises(report, OpenAIResponsesModel(given.model, openai_client=client), "responses")
    await exercises(report, OpenAIChatCompletionsModel(given.model, openai_client=client), "chat completions")


def main() -> int:
    report = Report()
    asyncio.run(run(report))
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
