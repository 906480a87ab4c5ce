"""`--tokenizer` and `--chat-template`: what is used instead of the model's own, and what is said before weights are."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest

from oarlock.base.errors import StartupError
from oarlock.server.config.settings import make_settings
from oarlock.server.hub import model_path
from oarlock.server.hub.model_path import HubModel
from oarlock.server.llm.tokenizer import find_files
from tests.house.rules import ROOT
from tests.unit.server.llm.chat_templates import rendered

DEMO = ROOT / "models" / "oarlock-demo"
USER = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"


@pytest.fixture
def other(tmp_path):
    """A directory with a tokenizer alone, which knows one token more."""
    folder = tmp_path / "other"
    folder.mkdir()
    described = json.loads((DEMO / "tokenizer.json").read_text())
    last = max(token["id"] for token in described["added_tokens"])
    extra = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    described["added_tokens"].append({"id": max(last, 4095) + 1, "content": "<|extra|>", **extra})
    (folder / "tokenizer.json").write_text(json.dumps(described))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "other {{ messages[0].content }}"}))
    return folder


def _find(**values):
    return asyncio.run(find_files(make_settings(values), lambda phase, fraction, detail: None))


def _rendered(**values):
    tokenizer = _find(**values).load_tokenizer()
    tokenizer.close()
    return rendered(tokenizer.template, USER, True, 1000)


def test_a_tokenizer_of_its_own(other):
    files = _find(tokenizer=str(other))
    assert (files.model, files.tokenizer) == (str(DEMO), str(other))
    tokenizer = files.load_tokenizer()
    tokenizer.close()
    assert tokenizer.encode("<|extra|>") == [4096]
    assert _rendered(tokenizer=str(other)) == "other hi"
    assert _find().tokenizer is None


@pytest.mark.slow
def test_a_template_of_its_own(other, tmp_path, monkeypatch):
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    assert _rendered(chat_template=str(file)) == "[user] hi"
    assert _rendered(chat_template=str(file), tokenizer=str(other)) == "[user] hi"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _rendered(chat_template="~/template.jinja") == "[user] hi"
    assert "hi" in _rendered() and "[user]" not in _rendered()
    digests = [_find(**values).load_tokenizer().digest for values in ({}, {"chat_template": str(file)})]
    assert digests[0] != digests[1], "answers under another template have another fingerprint"


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe", "byte 0 is not UTF-8 text"),
        (b"", "does not render the messages"),
        (b"{{ messages }}\n{% for %}", r"template\.jinja is not valid Jinja: line 2"),
    ],
)
def test_a_wrong_template_is_named_before_anything_is_fetched(monkeypatch, tmp_path, content, cause):
    async def forbidden(*args):
        raise AssertionError("asked the network")

    monkeypatch.setattr(model_path, "download", forbidden)
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StartupError, match=cause):
        _find(model="owner/model", chat_template=str(file))


def test_a_wrong_tokenizer_is_named(monkeypatch, tmp_path):
    async def forbidden(*args):
        raise AssertionError("asked the network")

    monkeypatch.setattr(model_path, "download", forbidden)
    for name, cause in (
        (str(DEMO / "tokenizer.json"), "is a file"),
        ("/no/such/dir", "is neither a directory, nor a GGUF file, nor a hub id"),
    ):
        with pytest.raises(StartupError, match=f"--tokenizer {name} {cause}"):
            _find(tokenizer=name)
    with pytest.raises(StartupError, match=r"has no tokenizer\.json"):
        _find(tokenizer=str(tmp_path)).load_tokenizer()


def test_the_model_is_fetched_with_what_is_used_in_place_of_its_own(monkeypatch, other):
    asked = []

    async def fetched(wanted, on_progress):
        asked.append(HubModel.from_json(wanted.to_json()))
        return str(other)

    monkeypatch.setattr(model_path, "download", fetched)
    files = _find(model="owner/model", tokenizer="owner/words", chat_template=str(DEMO / "chat_template.jinja"))
    assert files.tokenizer == str(other)
    words, model = asked
    assert (words.model, words.tokenizer_only, words.tokenizer) == ("owner/words", True, None)
    assert (model.model, model.tokenizer_only, model.tokenizer) == ("owner/model", False, str(other))
    assert model.chat_template == str(DEMO / "chat_template.jinja")


def test_a_gguf_file_can_lend_its_tokenizer(monkeypatch, tmp_path):
    file = tmp_path / "words.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(model_path, "gguf_model", lambda path: path)
    monkeypatch.setattr(model_path, "described", lambda path: shutil.copytree(DEMO, tmp_path / "described"))
    assert _find(tokenizer=str(file)).tokenizer == str(tmp_path / "described")
