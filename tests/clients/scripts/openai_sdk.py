"""The official Python client, versions 1 to 3: every call that this server answers.

Runs inside the client's environment against a served model whose answers are tiny and greedy.
"""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import openai
import pydantic
from openai_responses import responses
from openai_retries import exercise_retries
from reporter import Report, arguments, expect

QUESTION = "Q: What does os.path.join do?\nA:"
MESSAGES = [{"role": "user", "content": "What does os.path.join do?"}]


class Review(pydantic.BaseModel):
    """Bounded, so that a model of any size can finish it."""

    verdict: Literal["good", "bad"]
    stars: Literal[1, 2, 3]


TOOL = {
    "type": "function",
    "function": {
        "name": "review",
        "description": "Say what you think.",
        "parameters": {
            "type": "object",
            "properties": {"verdict": {"enum": ["good", "bad"]}, "stars": {"enum": [1, 2, 3]}},
            "required": ["verdict", "stars"],
            "additionalProperties": False,
        },
    },
}
OTHER_TOOL = {"type": "function", "function": {"name": "pass_on", "parameters": {"type": "object", "properties": {}}}}


def completions(report: Report, client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "prompt": QUESTION, "temperature": 0, "max_tokens": 24}
    with report.exercise("completions"):
        whole = client.completions.create(**asked)
        expect(whole.choices[0].text, whole)
        expect(whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens, whole.usage)
    with report.exercise("completions, stream with usage"):
        chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        expect(text == whole.choices[0].text, f"{text!r} is not {whole.choices[0].text!r}")
        expect(chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks[-1])
    with report.exercise("n, seed, several prompts of token ids"):
        fields = {"model": model, "prompt": [[5, 6, 7], [8, 9]], "n": 2, "seed": 3, "max_tokens": 6}
        first, second = client.completions.create(**fields), client.completions.create(**fields)
        expect([choice.index for choice in first.choices] == [0, 1, 2, 3], first)
        expect([choice.text for choice in first.choices] == [choice.text for choice in second.choices], second)
    with report.exercise("echo with logprobs and max_tokens 0"):
        scored = client.completions.create(
            model=model, prompt=QUESTION, temperature=0, max_tokens=0, echo=True, logprobs=2
        )
        expect(scored.choices[0].text == QUESTION and scored.usage.completion_tokens == 0, scored)
        expect("".join(scored.choices[0].logprobs.tokens) == QUESTION, scored.choices[0].logprobs)
        expect(scored.choices[0].logprobs.token_logprobs[0] is None, scored.choices[0].logprobs)
    with report.exercise("stop, best_of, logit_bias, penalties"):
        word = whole.choices[0].text.split()[1]
        cut = client.completions.create(**asked, stop=[word]).choices[0]
        expect((cut.text, cut.finish_reason) == (whole.choices[0].text.split(word)[0], "stop"), cut)
        forced = client.completions.create(
            **asked | {"max_tokens": 3}, logit_bias={"77": 100}, extra_body={"return_token_ids": True}
        )
        expect(forced.choices[0].token_ids == [77, 77, 77], forced)
        best = client.completions.create(
            model=model, prompt="import ", best_of=3, max_tokens=4, presence_penalty=0.5, frequency_penalty=0.5
        )
        expect(len(best.choices) == 1, best)


def chat(report: Report, client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 200}
    with report.exercise("chat, whole and streamed alike, logprobs"):
        whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        expect(whole.choices[0].message.role == "assistant", whole)
        tokens = whole.choices[0].logprobs.content
        expect(all(len(token.top_logprobs) >= 2 for token in tokens), tokens)
        text = ""
        with client.chat.completions.stream(**asked) as stream:
            for event in stream:
                text += event.delta if event.type == "content.delta" else ""
            expect(stream.get_final_completion().choices[0].message.content == text, text)
        expect(text == whole.choices[0].message.content, f"{text!r} is not {whole.choices[0].message.content!r}")
    with report.exercise("chat, system, developer and assistant messages, parts of text"):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Very."}, *MESSAGES]
        messages += [{"role": "assistant", "content": "It joins."}]
        messages += [{"role": "user", "content": [{"type": "text", "text": "What?"}]}]
        answer = client.chat.completions.create(**asked | {"messages": messages, "n": 2})
        expect(len(answer.choices) == 2, answer)


def structured(report: Report, client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "max_completion_tokens": 60, "temperature": 0}
    with report.exercise("parse: a pydantic model as response_format"):
        parsed = client.chat.completions.parse(**asked, response_format=Review)
        expect(isinstance(parsed.choices[0].message.parsed, Review), parsed)
    with report.exercise("parse, streamed"):
        with client.chat.completions.stream(**asked, response_format=Review) as stream:
            final = stream.get_final_completion()
        expect(final.choices[0].message.parsed == parsed.choices[0].message.parsed, final)
    with report.exercise("response_format json_schema"):
        schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
        schema["additionalProperties"] = False
        form = {"type": "json_schema", "json_schema": {"name": "ok", "schema": schema, "strict": True}}
        answer = client.chat.completions.create(**asked, response_format=form)
        expect(set(json.loads(answer.choices[0].message.content)) == {"ok"}, answer)
    with report.exercise("structured_outputs on completions: choice and regex"):
        for form in ({"choice": ["yes", "no"]}, {"regex": "yes|no"}):
            answer = client.completions.create(
                model=model, prompt="Is it? ", max_tokens=9, extra_body={"structured_outputs": form}
            )
            expect(answer.choices[0].text in ("yes", "no"), answer)


def tools(report: Report, client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "max_completion_tokens": 120, "temperature": 0}
    named = {"type": "function", "function": {"name": "review"}}
    for choice, label in (("required", "required"), (named, "named")):
        with report.exercise(f"tools, {label}, whole and streamed alike"):
            fields = asked | {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
            whole = client.chat.completions.create(**fields).choices[0]
            call = whole.message.tool_calls[0]
            Review.model_validate_json(call.function.arguments)
            expect(call.function.name == "review" and whole.finish_reason in ("tool_calls", "stop"), whole)
            with client.chat.completions.stream(**fields) as stream:
                events = [event.type for event in stream]
                final = stream.get_final_completion().choices[0]
            expect("tool_calls.function.arguments.delta" in events, events)
            seen = final.message.tool_calls[0].function
            expect((seen.name, seen.arguments) == (call.function.name, call.function.arguments), final)
            expect(final.finish_reason == whole.finish_reason, final)
    with report.exercise("tools, auto and none, and a result handed back"):
        for choice in ("auto", "none"):
            answer = client.chat.completions.create(**asked, tools=[TOOL, OTHER_TOOL], tool_choice=choice).choices[0]
            expect(choice == "auto" or not answer.message.tool_calls, answer)
        call = {"id": "call_1", "type": "function", "function": {"name": "review", "arguments": "{}"}}
        messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": "call_1", "content": "noted"}]
        answer = client.chat.completions.create(**asked | {"messages": messages}, tools=[TOOL])
        expect(answer.choices[0].finish_reason in ("stop", "length", "tool_calls"), answer)


def models_and_errors(report: Report, client: openai.OpenAI, model: str) -> None:
    with report.exercise("models.list and models.retrieve"):
        expect(model in [entry.id for entry in client.models.list()], "not in the list")
        expect(client.models.retrieve(model).id == model, model)
    with report.exercise("errors as the client's own classes, with param and code"):
        cases = (
            ({"temperature": 3}, openai.BadRequestError, "temperature", None),
            ({"model": "other"}, openai.NotFoundError, "model", "model_not_found"),
            ({"prompt": [5] * 5000}, openai.BadRequestError, "prompt", "context_length_exceeded"),
        )
        for fields, kind, param, code in cases:
            for stream in (False, True):
                try:
                    client.completions.create(**{"model": model, "prompt": "x", "stream": stream} | fields)
                except kind as error:
                    expect((error.param, error.code) == (param, code), error)
                    expect(set(error.body) == {"message", "type", "param", "code"}, error.body)
                    expect(error.request_id, "no request id")
                else:
                    raise AssertionError(f"{fields} was accepted")
    with report.exercise("request ids through raw responses"):
        raw = client.completions.with_raw_response.create(
            model=model, prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
        )
        expect(raw.headers["x-request-id"] == "mine-1", raw.headers)
        expect(raw.parse().id, raw)


async def asynchronous(report: Report, url: str, model: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        with report.exercise("asynchronous client, 16 streams at once equal to one by itself"):

            async def text(number: int) -> str:
                prompt = f"Q: What is {number}?\nA:"
                stream = await client.completions.create(
                    model=model, prompt=prompt, max_tokens=12, temperature=0, stream=True
                )
                return "".join([choice.text async for chunk in stream for choice in chunk.choices])

            together = await asyncio.gather(*(text(number) for number in range(16)))
            expect(together[3] == await text(3) and together[11] == await text(11), together)
        with report.exercise("asynchronous parse and tools"):
            parsed = await client.chat.completions.parse(
                model=model, messages=MESSAGES, response_format=Review, max_completion_tokens=60
            )
            expect(isinstance(parsed.choices[0].message.parsed, Review), parsed)


def main() -> int:
    given = arguments()
    report = Report()
    with openai.OpenAI(base_url=f"{given.url}/v1", api_key="none", max_retries=0) as client:
        for part in (completions, chat, structured, tools, models_and_errors):
            part(report, client, given.model)
        responses(report, client, given.model, TOOL, Review)
    asyncio.run(asynchronous(report, given.url, given.model))
    if given.small_url:
        exercise_retries(report, given.small_url, given.small_pid, given.model)
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
