"""A served multimodal model as its users see it: text in parts is answered, an image is a 400 with the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.contract.test_text_part_wire import MEDIA, PARTS, ROUTES
from tests.e2e.running import RunningServer
from tests.golden.tiny_models import make_tiny

CLASS = "Gemma3ForConditionalGeneration"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = make_tiny(tmp_path_factory.mktemp("wrapper"), "gemma3", tokenizer=True)
    (model / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    with RunningServer(model, "--served-model-name", "tiny", "--tensor-parallel-size", 2) as server:
        yield server


def test_the_text_part_is_named(server: RunningServer) -> None:
    (card,) = server.client.get("/v1/models").json()["data"]
    assert (card["id"], card["architecture"], card["text_part_of"]) == ("tiny", "Gemma3ForCausalLM", CLASS)
    assert card["chat"] is True
    assert f"tiny (Gemma3ForCausalLM, the text part of {CLASS}," in server.log


@pytest.mark.parametrize("path", ROUTES)
def test_parts_of_text_are_answered_as_one_text(server: RunningServer, path: str) -> None:
    around, kind = ROUTES[path]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    answers = []
    for content in ("Is it blue?", [{"type": kind, "text": "Is it"}, {"type": kind, "text": " blue?"}]):
        answer = server.client.post(path, json={**around(content), "temperature": 0, limit: 4})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        answers.append(found.get("choices") or found.get("content") or [one["content"] for one in found["output"]])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("path", "part", "media"), MEDIA)
def test_media_are_a_400(server: RunningServer, path: str, part: dict[str, object], media: str) -> None:
    around, _ = ROUTES[path]
    answer = server.client.post(path, json=around([part]))
    assert answer.status_code == 400
    assert f"This server serves the text part of tiny; {media} not supported." in answer.json()["error"]["message"]
