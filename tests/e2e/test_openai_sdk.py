"""The official client, unmodified: whole answers, streams, models, errors as its own exception classes."""

import openai
import pytest

QUESTION = "Q: What does os.path.join do?\nA:"


@pytest.fixture(scope="module")
def client(tp1):
    with openai.OpenAI(base_url=f"{tp1.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_completion_whole_and_streamed(client):
    asked = {"model": "demo", "prompt": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(**asked)
    assert whole.choices[0].text
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0  # the first request left its blocks


def test_a_chat_whole_and_streamed(client):
    asked = {"model": "demo", "messages": [{"role": "user", "content": "What does os.path.join do?"}], "temperature": 0}
    whole = client.chat.completions.create(**asked, max_completion_tokens=24)
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**asked, max_completion_tokens=24, stream=True))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content != ""


def test_n_stop_echo_and_logprobs(client):
    both = client.completions.create(model="demo", prompt="import ", n=2, seed=3, max_tokens=8)
    assert [choice.index for choice in both.choices] == [0, 1]
    full = client.completions.create(model="demo", prompt=QUESTION, temperature=0, max_tokens=24).choices[0].text
    word = full.split()[2]
    cut = client.completions.create(model="demo", prompt=QUESTION, temperature=0, max_tokens=24, stop=word).choices[0]
    assert (cut.text, cut.finish_reason) == (full[: full.index(word)], "stop")
    echoed = client.completions.create(
        model="demo", prompt=QUESTION, temperature=0, max_tokens=4, echo=True, logprobs=2
    ).choices[0]
    assert echoed.text.startswith(QUESTION)
    assert echoed.logprobs.token_logprobs[0] is None
    assert "".join(echoed.logprobs.tokens) == echoed.text
    assert all(value <= 0 for value in echoed.logprobs.token_logprobs[1:])


def test_models(client):
    assert [model.id for model in client.models.list()] == ["demo", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_the_clients_own_classes(client):
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="demo", prompt="x", temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="x")
    assert unknown.value.code == "model_not_found"
