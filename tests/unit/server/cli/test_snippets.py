"""`oarlock snippets`: with any name of a model and any key, the code stays valid and means them."""

from __future__ import annotations

import ast
import json
import re
import shlex

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.server.cli.main import main
from oarlock.server.cli.snippets import SNIPPETS
from tests.e2e.running import ROOT

NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=20).filter(
    lambda name: "@" not in name  # a place within a value is one that this test could not tell from ours
)


@pytest.mark.parametrize("name", SNIPPETS)
@settings(max_examples=20)
@given(model=NAMES, key=NAMES)
def test_any_name_is_quoted(name, model, key):
    snippet = SNIPPETS[name]
    text = snippet.filled("http://h:1/v1", model, key)
    assert not re.search("@[A-Z_]+@", text)
    if snippet.language == "py":
        found = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    elif snippet.language == "sh":
        found = set(shlex.split(text.replace("\\\n", " ")))
    elif snippet.language == "yaml":
        found = set(_values(text))
    else:
        found = {json.loads(f'"{part}"') for part in _quoted(text)}
    joined = "\n".join(str(value) for value in found)
    assert key in joined or json.dumps(key)[1:-1] in joined
    if name != "open-webui":  # asks the server for its models
        assert model in joined or json.dumps(model)[1:-1] in joined
    assert ("http://h:1" if name == "claude-code" else "http://h:1/v1") in joined


@pytest.mark.parametrize("name", ["claude-code", "codex", "opencode", "qwen-code"])
def test_the_page_shows_the_setup_of_agents(name):
    setup = SNIPPETS[name].filled("http://127.0.0.1:8000/v1", "demo", "none")
    assert f"```sh\n{setup}```" in (ROOT / "docs" / "clients.md").read_text()
    assert len(setup.splitlines()) <= 3


def _values(text: str) -> list[str]:
    return [str(value) for value in yaml.safe_load(text)["models"][0].values()]


def _quoted(text: str) -> list[str]:
    return re.findall(r'"((?:[^"\\]|\\.)*)"', text)


@pytest.mark.parametrize(
    ("arguments", "code", "cause", "fix"),
    [
        (["--client", "langchian"], 2, "no snippet for langchian", "langchain"),
        (["http://127.0.0.1:1"], 3, "No server responds", "oarlock serve"),
    ],
)
def test_mistakes(capsys, arguments, code, cause, fix):
    assert main(["snippets", *arguments]) == code
    error = capsys.readouterr().err
    assert cause in error and fix in error
