"""The text part of a multimodal model on every route: parts of text are read, media are refused with the reason."""

from __future__ import annotations

import dataclasses

import anyio
import pytest

from tests.contract.conftest import INFO

WRAPPER = "Gemma3ForConditionalGeneration"
WRAPPED = dataclasses.replace(INFO, architecture="Gemma3ForCausalLM", text_part_of=WRAPPER)
# A published template for images, in other words: it shows nothing of a content that is a plain string.
PARTS = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% for item in message['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}\
{% for item in message['content'] %}{% if item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Route -> (the body around a content, the type of its text parts).
ROUTES = {
    "/v1/chat/completions": (lambda content: {"messages": [{"role": "user", "content": content}]}, "text"),
    "/v1/responses": (lambda content: {"input": [{"role": "user", "content": content}]}, "input_text"),
    "/v1/messages": (lambda content: {"messages": [{"role": "user", "content": content}], "max_tokens": 9}, "text"),
}
MEDIA = [
    ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, "images are"),
    ("/v1/chat/completions", {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}, "audio is"),
    ("/v1/chat/completions", {"type": "video_url", "video_url": {"url": "http://x/y"}}, "videos are"),
    ("/v1/chat/completions", {"type": "file", "file": {"file_id": "x"}}, "files are"),
    ("/v1/responses", {"type": "input_image", "image_url": "http://x/y"}, "images are"),
    ("/v1/responses", {"type": "input_file", "file_id": "x"}, "files are"),
    ("/v1/messages", {"type": "image", "source": {"type": "url", "url": "http://x/y"}}, "images are"),
    ("/v1/messages", {"type": "document", "source": {"type": "url", "url": "http://x/y"}}, "files are"),
]


def post(stage, path, body):
    async def send():
        async with stage.client() as client:
            return await client.post(path, json=body)

    return anyio.run(send)


def get(stage, path):
    async def send():
        async with stage.client() as client:
            return await client.get(path)

    return anyio.run(send)


@pytest.mark.parametrize(("path", "part", "media"), MEDIA)
@pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])  # a large body is read by another process
def test_media_are_refused_with_the_reason(make_stage, path, part, media, is_large):
    around, kind = ROUTES[path]
    body = around([{"type": kind, "text": "What is this?" + " and this?" * 20_000 * is_large}, part])
    stage = make_stage(info=WRAPPED)
    answer = post(stage, path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert f"This server serves the text part of demo; {media} not supported." in error["message"]
    assert f"'{part['type']}'" in error["message"]
    if path != "/v1/messages":
        assert error["code"] == f"{media.split()[0]}_not_supported" and error["param"].endswith("content[1].type")
    assert not stage.engine.requests


@pytest.mark.parametrize(("path", "part", "media"), MEDIA[:5])
def test_a_text_model_has_no_other_part(make_stage, path, part, media):
    around, _ = ROUTES[path]
    answer = post(make_stage(), path, around([part]))
    assert answer.status_code == 400
    assert "supported" in answer.json()["error"]["message"] and "text part of" not in answer.json()["error"]["message"]


def test_other_errors_have_no_reason(make_stage):
    answer = post(make_stage(info=WRAPPED), "/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]})
    assert answer.status_code == 400 and "text part of" not in answer.text


@pytest.mark.parametrize("path", ROUTES)
def test_parts_of_text_reach_a_template_for_parts(chat, path):
    around, kind = ROUTES[path]
    stage = chat("Yes.", PARTS, info=WRAPPED)
    prompts = []
    for content in ("Is it blue?", [{"type": kind, "text": "Is it"}, {"type": kind, "text": " blue?"}]):
        answer = post(stage, path, around(content))
        assert answer.status_code == 200, answer.text
        tokenizer = stage.state.async_llm.input_processor.tokenizer
        ids = list(stage.engine.requests[-1].prompt_token_ids)
        prompts.append(tokenizer.backend.decode(ids, skip_special_tokens=False))
    assert prompts[0] == prompts[1] == "<|im_start|>user\nIs it blue?<|im_end|>\n<|im_start|>assistant\n"


def test_the_model_list_names_the_whole_model(make_stage):
    (card, _) = get(make_stage(info=WRAPPED), "/v1/models").json()["data"]
    assert (card["architecture"], card["text_part_of"]) == ("Gemma3ForCausalLM", WRAPPER)
    assert get(make_stage(), "/v1/models/demo").json()["text_part_of"] is None
