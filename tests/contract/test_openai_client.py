"""The official client over a real socket."""

from __future__ import annotations

import asyncio

import openai
import pytest

from oarlock.engine.errors import QueueFullError


@pytest.fixture
def server(make_server):
    return make_server("Hello, wörld! 😀", api_key=("secret",))


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0) as client:
        yield client


def test_completions(client):
    plain = client.completions.create(model="demo", prompt="x", logprobs=2, echo=True)
    assert plain.choices[0].text == "xHello, wörld! 😀"
    assert plain.choices[0].logprobs.tokens[0] == "x"
    assert plain.usage.prompt_tokens_details.cached_tokens == 0
    options = {"include_usage": True}
    chunks = list(client.completions.create(model="demo", prompt="x", stream=True, stream_options=options))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "Hello, wörld! 😀"
    assert chunks[-1].usage.total_tokens > 5


def test_chat(client):
    messages = [{"role": "user", "content": "x"}]
    plain = client.chat.completions.create(model="demo", messages=messages, logprobs=True, top_logprobs=1)
    assert plain.choices[0].message.content == "Hello, wörld! 😀"
    assert plain.choices[0].finish_reason == "stop"
    text = ""
    with client.chat.completions.stream(model="demo", messages=messages) as stream:
        for event in stream:
            if event.type == "content.delta":
                text += event.delta
        assert stream.get_final_completion().choices[0].message.content == text == "Hello, wörld! 😀"


def test_the_asynchronous_client(server):
    async def scenario():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="secret") as client:
            stream = await client.completions.create(model="demo", prompt=[[1, 2], [3]], n=2, stream=True)
            texts = [""] * 4
            async for chunk in stream:
                texts[chunk.choices[0].index] += chunk.choices[0].text
            return texts

    assert asyncio.run(scenario()) == ["Hello, wörld! 😀"] * 4


def test_models(client):
    models = client.models.list().data
    assert [model.id for model in models] == ["demo", "alias/with/slash"]
    assert models[0].max_model_len == 256
    assert client.models.retrieve("alias/with/slash").id == "alias/with/slash"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nope")
    assert caught.value.code == "model_not_found"


def test_errors_are_the_clients_own_classes(server, client):
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(model="demo", prompt="x", temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="nope", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="wrong").completions.create(model="demo", prompt="x")
    assert caught.value.code == "invalid_api_key"


def test_an_error_in_a_stream_is_raised_not_swallowed(server, client):
    server.stage.engine.fail_after = 2
    with pytest.raises(openai.APIError, match="not finite"):
        list(client.completions.create(model="demo", prompt="x", stream=True))


@pytest.mark.slow
def test_a_full_queue_is_retried_by_the_client(server, client):
    server.stage.engine.refuse = QueueFullError("full", 0.1)
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="demo", prompt="x")
    assert len(server.stage.engine.requests) == 1
    with pytest.raises(openai.RateLimitError):
        client.with_options(max_retries=1).completions.create(model="demo", prompt="x")
    assert len(server.stage.engine.requests) == 3


@pytest.mark.slow
def test_responses(client):
    plain = client.responses.create(model="demo", input="x", instructions="Be brief.")
    assert (plain.output_text, plain.status) == ("Hello, wörld! 😀", "completed")
    with client.responses.stream(model="demo", input="x", previous_response_id=plain.id) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == "Hello, wörld! 😀"
    assert final.usage.input_tokens > plain.usage.input_tokens
    assert client.responses.retrieve(final.id).output_text == final.output_text
    assert [item.role for item in client.responses.input_items.list(final.id)] == ["user", "assistant", "user"]
    assert client.responses.input_tokens.count(model="demo", input="x").input_tokens > 0
    client.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(final.id)


@pytest.mark.slow
def test_a_response_that_is_cancelled_ends_with_its_text(make_server):
    server = make_server("Hello, wörld! 😀", pause_after=2)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        with client.responses.create(input="x", model="demo", stream=True) as stream:
            events = iter(stream)
            response_id = next(events).response.id
            for event in events:
                if event.type == "response.output_text.delta":
                    break
            assert client.responses.cancel(response_id).status == "cancelled"
            last = list(events)[-1]
        assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
        assert last.response.output_text.startswith("H")
