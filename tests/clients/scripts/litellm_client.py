"""LiteLLM as a library: its OpenAI-compatible route, whole and streamed, and its mapping of errors."""

from __future__ import annotations

import asyncio
import json

import litellm
from reporter import Report, arguments, expect

MESSAGES = [{"role": "user", "content": "What does os.path.join do?"}]
SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"enum": ["good", "bad"]}},
    "required": ["verdict"],
    "additionalProperties": False,
}


def main() -> int:
    given = arguments()
    report = Report()
    litellm.telemetry = False
    server = {"api_base": f"{given.url}/v1", "api_key": "none", "num_retries": 0}
    asked = {"model": f"openai/{given.model}", "messages": MESSAGES, "temperature": 0, "max_tokens": 24, **server}
    with report.exercise("completion (chat), whole and streamed alike"):
        whole = litellm.completion(**asked)
        chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
        built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
        expect(built.choices[0].message.content == whole.choices[0].message.content, built)
        expect(whole.usage.total_tokens > 0, whole)
    with report.exercise("acompletion"):
        answer = asyncio.run(litellm.acompletion(**asked))
        expect(answer.choices[0].message.content == whole.choices[0].message.content, answer)
    with report.exercise("text_completion"):
        text = litellm.text_completion(
            model=f"text-completion-openai/{given.model}", prompt="import ", max_tokens=5, temperature=0, **server
        )
        expect(text.choices[0].text, text)
    with report.exercise("tools, required"):
        tool = {"type": "function", "function": {"name": "review", "parameters": SCHEMA}}
        fields = asked | {"max_tokens": 120}
        answer = litellm.completion(**fields, tools=[tool], tool_choice="required")
        arguments_ = json.loads(answer.choices[0].message.tool_calls[0].function.arguments)
        expect(arguments_["verdict"] in ("good", "bad"), answer)
    with report.exercise("response_format json_schema"):
        form = {"type": "json_schema", "json_schema": {"name": "review", "schema": SCHEMA, "strict": True}}
        answer = litellm.completion(**asked, response_format=form)
        expect(json.loads(answer.choices[0].message.content)["verdict"] in ("good", "bad"), answer)
    with report.exercise("errors: BadRequestError, NotFoundError"):
        for fields, kind in (
            ({"temperature": 3}, litellm.BadRequestError),
            ({"model": "openai/other"}, litellm.NotFoundError),
        ):
            try:
                litellm.completion(**asked | fields)
            except kind as error:
                expect("temperature" in str(error) or "other" in str(error), error)
            else:
                raise AssertionError(f"{fields} was accepted")
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
