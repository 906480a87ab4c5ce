"""A model without a tokenizer, served with another's and with a chat template from a file."""

import json
import shutil
import subprocess

import pytest

from tests.e2e.running import DEMO, RunningServer, command, environment, free_port

pytestmark = pytest.mark.soak
WORDS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def test_a_model_is_served_with_the_tokenizer_and_the_template_that_are_given(tmp_path):
    bare, words, template = tmp_path / "bare", tmp_path / "words", tmp_path / "template.jinja"
    shutil.copytree(DEMO, bare, ignore=shutil.ignore_patterns(*WORDS))
    words.mkdir()
    for name in WORDS:
        shutil.copy(DEMO / name, words)
    template.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}import ")
    with RunningServer(bare, "--tokenizer", words, "--chat-template", template) as server:
        messages = [{"role": "user", "content": "# paths"}]
        body = {"messages": messages, "max_tokens": 8, "temperature": 0}
        rendered = server.client.post("/v1/chat/completions/render", json=body).json()
        assert rendered["text"] == "# paths\nimport "
        chat = server.client.post("/v1/chat/completions", json=body).json()
        plain = {"prompt": rendered["token_ids"], "max_tokens": 8, "temperature": 0}
        completion = server.client.post("/v1/completions", json=plain).json()
        assert chat["choices"][0]["message"]["content"] == completion["choices"][0]["text"]
        # Grammars are compiled for the tokens of that tokenizer.
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}}}
        bound = server.client.post("/v1/chat/completions", json={**body, "response_format": form}).json()
        assert json.loads(bound["choices"][0]["message"]["content"]) in ("yes", "no")


def test_doctor_takes_it_as_serve_does(tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(DEMO, bare, ignore=shutil.ignore_patterns(*WORDS))
    for flags, problem in (((), "tokenizer.json"), (("--tokenizer", DEMO), "")):
        doctor = command("doctor", bare, *flags, "--port", free_port(), "--json")
        done = subprocess.run(doctor, env=environment(), capture_output=True, text=True, timeout=120)
        (found,) = [one for one in json.loads(done.stdout)["findings"] if one["check"] == "model"]
        assert problem in found["text"] and ("Qwen2ForCausalLM" in found["text"]) == (not problem), done.stdout
