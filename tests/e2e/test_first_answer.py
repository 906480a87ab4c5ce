"""First questions to the demo model, without a temperature: the README's, and those that the page offers."""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e.running import DEMO, ROOT, RunningServer

TIMES = 20
RIGHT = {  # the first sentences of the docstrings of CPython 3.11
    "What does os.path.join do?": "Join two or more pathname components, inserting '/' as needed.",
    "Explain json.dumps.": "Serialize ``obj`` to a JSON formatted ``str``.",
    "What is str.join for?": "Concatenate any number of strings.",
    "Explain collections.deque.rotate.": "Rotate the deque n steps to the right (default n=1).",
}


def answer(server: RunningServer, path: str, body: dict) -> str:
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice["text"] if "text" in choice else choice["message"]["content"]


def test_the_request_of_the_readme_is_answered_rightly_each_time(tp1):
    first = re.search(r"curl -s http\S+(/v1/\S+) .*?-d '(\{.*?\})'", (ROOT / "README.md").read_text(), re.DOTALL)
    assert first
    path, body = first[1], json.loads(first[2])
    assert "temperature" not in body
    texts = {answer(tp1, path, body) for _ in range(TIMES)}
    assert [text.strip().startswith(RIGHT["What does os.path.join do?"]) for text in texts] == [True]


@pytest.mark.soak
def test_every_question_that_the_page_offers_is_answered_rightly_each_time(tp1):
    introduction = tp1.client.get("/v1/capabilities").json()["introduction"]
    assert introduction == json.loads((DEMO / "introduction.json").read_text())
    assert set(introduction["questions"]) == RIGHT.keys()
    for question, right in RIGHT.items():
        body = {"messages": [{"role": "user", "content": question}]}
        texts = {answer(tp1, "/v1/chat/completions", body) for _ in range(TIMES)}
        assert [text.startswith(right) for text in texts] == [True], question


def test_the_start_says_what_the_demo_model_is(tp1):
    about = " ".join(line.strip().removeprefix("about").strip() for line in tp1.log.splitlines())
    assert json.loads((DEMO / "introduction.json").read_text())["about"] in about
