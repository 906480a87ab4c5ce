"""`/v1/responses` through the official Python client: plain, streamed, calls and results, structured, stored."""

from __future__ import annotations

from typing import Any

import openai
from reporter import Report, expect

QUESTION = "What does os.path.join do?"


def responses(report: Report, client: openai.OpenAI, model: str, tool: dict[str, Any], form: type[Any]) -> None:
    """`tool`: a function in the form of chat completions. `form`: a pydantic model."""
    asked = {"model": model, "input": QUESTION, "temperature": 0, "max_output_tokens": 40}
    with report.exercise("responses, whole and streamed alike"):
        whole = client.responses.create(**asked)
        expect(whole.output_text and whole.usage.output_tokens > 0, whole)
        with client.responses.stream(**asked) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
        expect(text == final.output_text == whole.output_text, f"{text!r} is not {whole.output_text!r}")
        expect(final.usage.output_tokens == whole.usage.output_tokens, final.usage)
    with report.exercise("responses.parse: a pydantic model as text_format"):
        parsed = client.responses.parse(**asked | {"max_output_tokens": 60}, text_format=form)
        expect(isinstance(parsed.output_parsed, form), parsed)
    with report.exercise("responses, an agent's loop: a forced call, its result, an answer"):
        function = {"type": "function", "strict": True, **tool["function"]}
        loop = asked | {"tools": [function], "max_output_tokens": 120}
        turn = client.responses.create(**loop, tool_choice="required", parallel_tool_calls=False)
        (call,) = (item for item in turn.output if item.type == "function_call")
        form.model_validate_json(call.arguments)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "noted"}
        gone_on = client.responses.create(
            **loop | {"input": [result]}, previous_response_id=turn.id, tool_choice="none"
        )
        history = [{"role": "user", "content": QUESTION}, *turn.output, result]
        stateless = client.responses.create(**loop | {"input": history}, store=False, tool_choice="none")
        expect(stateless.output_text == gone_on.output_text, stateless)
        expect(stateless.usage.input_tokens == gone_on.usage.input_tokens, stateless.usage)
    if hasattr(client.responses, "compact"):  # older clients do not have it
        with report.exercise("responses.compact: a summary, which the next prompt shows"):
            talk = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": whole.output_text}]
            compacted = client.responses.compact(model=model, input=talk)
            expect([item.type for item in compacted.output] == ["message", "compaction"], compacted)
            kept = [item.to_dict(warnings=False) for item in compacted.output]
            alone = client.responses.create(**asked | {"input": kept[:1]})
            gone_on = client.responses.create(**asked | {"input": kept})
            expect(gone_on.usage.input_tokens > alone.usage.input_tokens, gone_on.usage)
    with report.exercise("responses, errors name the field"):
        for fields, param in (({"background": True}, "background"), ({"temperature": 3}, "temperature")):
            try:
                client.responses.create(**asked | fields)
            except openai.BadRequestError as error:
                expect(error.param == param, error)
            else:
                raise AssertionError(f"{fields} was accepted")
