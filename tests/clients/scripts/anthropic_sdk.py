"""Anthropic's Python client: whole, streamed, tools, thoughts, structured output, counting, errors, an agent's loop."""

from __future__ import annotations

import json
from typing import Any

import anthropic
from reporter import Report, arguments, expect

QUESTION = "What does os.path.join do?"
SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"enum": ["good", "bad"]}, "stars": {"enum": [1, 2, 3]}},
    "required": ["verdict", "stars"],
    "additionalProperties": False,
}
RATE = {"name": "rate", "description": "Rates a function.", "input_schema": SCHEMA}
LOOK = {"name": "look", "description": "Looks it up.", "input_schema": {"type": "object", "properties": {}}}


def checked(value: Any) -> None:
    expect(value["verdict"] in ("good", "bad") and value["stars"] in (1, 2, 3), value)


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def agent_loop(client: anthropic.Anthropic, asked: dict[str, Any]) -> None:
    """Plan, call, hand the result back, answer; the history is what the client was given."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for choice in ({"type": "tool", "name": "look"}, {"type": "any", "disable_parallel_tool_use": True}):
        turn = client.messages.create(**asked | {"messages": messages, "tools": [RATE, LOOK], "tool_choice": choice})
        expect(turn.stop_reason == "tool_use", turn)
        expect(len(messages) == 1 or (turn.usage.cache_read_input_tokens or 0) > 0, turn.usage)
        calls = [block for block in turn.content if block.type == "tool_use"]
        for call in calls:
            if call.name == "rate":
                checked(call.input)
        messages.append({"role": "assistant", "content": turn.content})
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "noted"} for call in calls]
        messages.append({"role": "user", "content": results})
    counted = client.messages.count_tokens(model=asked["model"], messages=messages, tools=[RATE, LOOK])
    last = client.messages.create(
        **asked | {"messages": messages, "tools": [RATE, LOOK], "tool_choice": {"type": "none"}}
    )
    expect(last.stop_reason in ("end_turn", "max_tokens"), last)
    used = last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0)
    expect(abs(used - counted.input_tokens) <= 400 and used > 20, f"{used} is far from {counted.input_tokens}")


def main() -> int:
    given = arguments()
    report = Report()
    client = anthropic.Anthropic(base_url=given.url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {
        "model": given.model,
        "max_tokens": 120,
        "messages": [{"role": "user", "content": QUESTION}],
        "extra_body": {"temperature": 0},
    }
    with report.exercise("messages, whole and streamed alike"):
        whole = client.messages.create(**asked)
        expect(text_of(whole) and whole.stop_reason == "end_turn", whole)
        with client.messages.stream(**asked) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        expect(text == text_of(final) == text_of(whole), f"{text!r} is not {text_of(whole)!r}")
        expect(final.usage.output_tokens == whole.usage.output_tokens, final.usage)
    with report.exercise("a stop sequence, and the limit"):
        stopped = client.messages.create(**asked, stop_sequences=["components"])
        expect((stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "components"), stopped)
        cut = client.messages.create(**asked | {"max_tokens": 3})
        expect(cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 3, cut)
    with report.exercise("an answer that goes on with given words"):
        words = text_of(whole)[:20]
        began = [*asked["messages"], {"role": "assistant", "content": words}]
        expect(text_of(client.messages.create(**asked | {"messages": began})).strip(), "nothing came")
    with report.exercise("tools, forced, whole and streamed alike"):
        forced = asked | {"tools": [RATE, LOOK], "tool_choice": {"type": "tool", "name": "rate"}}
        (call,) = client.messages.create(**forced).content
        checked(call.input)
        with client.messages.stream(**forced) as stream:
            pieces = "".join(event.partial_json for event in stream if event.type == "input_json")
            (streamed,) = stream.get_final_message().content
        expect(streamed.input == call.input == json.loads(pieces), f"{streamed.input} is not {call.input}")
    with report.exercise("output_config: JSON that matches a schema"):
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        checked(json.loads(text_of(client.messages.create(**asked, output_config=form))))
    with report.exercise("count_tokens is the usage"):
        counted = client.messages.count_tokens(model=given.model, messages=asked["messages"])
        usage = whole.usage
        expect(counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0), counted)
    with report.exercise("an agent's loop: plan, calls, results, answer"):
        agent_loop(client, asked)
    with report.exercise("a stream that is left early, and the next request"):
        with client.messages.stream(**asked | {"max_tokens": 1000}) as stream:
            next(iter(stream.text_stream))
        expect(text_of(client.messages.create(**asked)) == text_of(whole), "the next answer is another")
    with report.exercise("a tool that is not the client's own is not offered, and a header names it"):
        raw = client.messages.with_raw_response.create(**asked, tools=[{"type": "bash_20250124", "name": "bash"}])
        expect("bash_20250124" in raw.headers.get("X-Ignored-Parameters", ""), dict(raw.headers))
        expect(text_of(raw.parse()) == text_of(whole), "the tool changed the answer")
    with report.exercise("errors as the client's own classes, with the request's id"):
        wrong: list[tuple[dict[str, Any], type[anthropic.APIStatusError]]] = [
            ({"model": "other"}, anthropic.NotFoundError),
            ({"max_tokens": 0}, anthropic.BadRequestError),
        ]
        for fields, kind in wrong:
            try:
                client.messages.create(**asked | fields)
            except kind as error:
                expect(error.request_id and error.body["error"]["message"], error)
            else:
                raise AssertionError(f"{fields} was accepted")
    with report.exercise("models.list and models.retrieve"):
        names = [model.id for model in client.models.list()]
        expect(given.model in names and client.models.retrieve(given.model).id == given.model, names)
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
