"""Loading, special tokens, chat templates in their sandbox, and what is refused."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from oarlock.base.errors import StartupError
from oarlock.engine.errors import RequestError
from oarlock.server.llm.chat_template import ChatTemplate
from oarlock.server.llm.tokenizer import Tokenizer
from tests.unit.server.llm.chat_templates import rendered

DEMO = Path(__file__).resolve().parents[4] / "models" / "oarlock-demo"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    return tmp_path


def _template(source, names=None):
    return ChatTemplate(source, names or {})


def test_it_agrees_with_transformers(folder):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    ours = Tokenizer.load(folder)
    for text in ("hello world", "  x = 1\n", "é😀<|im_end|>x", ""):
        assert ours.encode(text) == theirs(text)["input_ids"]
    expected = theirs.apply_chat_template(USER, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ours.encode(rendered(ours.template, USER, True, 1000), add_special_tokens=False) == expected
    assert ours.eos_token_ids == (theirs.eos_token_id,)


@pytest.mark.parametrize(("in_file", "wanted"), [(True, True), (True, False), (False, True), (False, False)])
def test_add_bos_token_is_obeyed(folder, in_file, wanted):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if in_file:
        name = "<|endoftext|>"
        backend.post_processor = TemplateProcessing(single=f"{name} $A", special_tokens=[(name, 0)])
    loaded = Tokenizer(backend, {"bos_token": "<|endoftext|>", "add_bos_token": wanted})
    plain = loaded.encode("x", add_special_tokens=False)
    assert loaded.encode("x") == ([0, *plain] if wanted else plain)
    loaded.close()


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("wanted", [True, False, None])
@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "PreTrainedTokenizerFast", "Qwen2TokenizerFast"])
def test_an_end_behind_a_text_is_that_of_tokenizer_json_as_transformers_has_it(folder, kind, wanted, in_file):
    """Where there is a tokenizer.json, transformers takes `add_eos_token` from it and not from the configuration."""
    from transformers import AutoTokenizer

    file, name = folder / "tokenizer.json", "<|im_end|>"
    backend = tokenizers.Tokenizer.from_file(str(file))
    if in_file:
        marks = [(name, backend.token_to_id(name))]
        backend.post_processor = TemplateProcessing(single=f"$A {name}", special_tokens=marks)
        backend.save(str(file))
    config = {"tokenizer_class": kind, "eos_token": name, "add_eos_token": wanted}
    if wanted is None:
        del config["add_eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, ours = AutoTokenizer.from_pretrained(str(folder)), Tokenizer.load(folder)
    for text in ("hello world", "  x = 1\n", f"x{name}"):
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert (ours.closing == [backend.token_to_id(name)]) is in_file
    ours.close()


@pytest.mark.parametrize("in_config", [None, "text", "list"])
def test_a_template_for_tools_is_found_where_transformers_saves_it(folder, tmp_path, in_config):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder))
    theirs.chat_template = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ tools | length }}", "other": "O"}
    saved = tmp_path / "saved"
    theirs.save_pretrained(str(saved))
    assert (saved / "additional_chat_templates" / "tool_use.jinja").is_file()
    if in_config is not None:  # an older file: what is beside it counts
        (saved / "chat_template.jinja").unlink()
        old = "D{{ messages[0].content }}"
        names = [{"name": "default", "template": old}, {"name": "tool_use", "template": "an older one"}]
        file = saved / "tokenizer_config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, "chat_template": old if in_config == "text" else names}))
    ours, tools = Tokenizer.load(saved), [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert rendered(ours.template, USER, True, 1000) == "Dhi"
    assert rendered(ours.template, USER, True, 1000, tools=tools) == "T1"
    assert theirs.apply_chat_template(USER, tools=tools, tokenize=False) == "T1"
    ours.close()
    (saved / "own.jinja").write_text("own {{ messages[0].content }} {{ tools | length }}")
    given = Tokenizer.load(saved, saved / "own.jinja")
    assert rendered(given.template, USER, True, 1000, tools=tools) == "own hi 1", (
        "the operator's template is the only one"
    )
    given.close()


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
def test_the_template_of_a_multimodal_models_processor_is_used(folder, file):
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text('{"chat_template": "tokenizer {{ messages[0].content }}"}')
    (folder / "processor_config.json").write_text('{"processor_class": "Gemma3Processor"}')
    (folder / file).write_text('{"chat_template": "processor {{ messages[0].content }}"}')
    loaded = Tokenizer.load(folder)
    assert rendered(loaded.template, USER, True, 1000) == "processor hi"
    loaded.close()
    (folder / file).write_text('{"chat_template": "{% for %}"}')
    with pytest.raises(StartupError, match=rf"{file} is not valid Jinja"):
        Tokenizer.load(folder)
    (folder / file).write_text('{"chat_template": 5}')
    with pytest.raises(StartupError, match=rf"chat_template in .*{file} is 5, which is not a template"):
        Tokenizer.load(folder)
    (folder / "chat_template.jinja").write_text("newer {{ messages[0].content }}")
    newer = Tokenizer.load(folder)
    assert rendered(newer.template, USER, True, 1000) == "newer hi"
    newer.close()


@pytest.mark.slow
def test_it_needs_neither_torch_nor_transformers():
    code = (
        "import sys\nfrom oarlock.server.llm.tokenizer import Tokenizer\n"
        f"Tokenizer.load({str(DEMO)!r})\nprint('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    root = str(DEMO.parents[1])
    answer = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"


@pytest.mark.parametrize("content", ["", "{", '{"version": 5}'])
def test_a_damaged_tokenizer_is_named(folder, content):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(folder)


def test_a_damaged_config_and_template_are_named(folder):
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(StartupError, match="not valid Jinja"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(StartupError, match=r"tokenizer_config\.json does not hold"):
        Tokenizer.load(folder)


def test_a_model_without_a_template_refuses_chat(folder):
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = Tokenizer.load(folder)
    assert not loaded.template.exists
    with pytest.raises(RequestError, match="no chat template"):
        rendered(loaded.template, USER, True, 1000)


def test_an_error_that_a_template_raises_reaches_the_client():
    template = _template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        rendered(template, USER, True, 1000)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(source):
    with pytest.raises(RequestError):
        rendered(_template(source), USER, True, 1000)


def test_templates_cannot_read_attributes_of_python_objects():
    assert rendered(_template("[{{ raise_exception.__globals__ }}{{ messages.__class__ }}]"), USER, True, 10) == "[]"


def test_a_template_cannot_write_without_end():
    with pytest.raises(RequestError, match="writes more than 1000 characters"):
        rendered(_template("{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}"), USER, True, 1000)


def test_the_names_that_published_templates_use():
    source = (
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}"
        "{% if loop.first %}{% continue %}{% endif %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    written = rendered(_template(source, {"bos_token": "<s>"}), USER, True, 1000)
    assert written == '<s>{"role": "user", "content": "hi"}4'


def test_several_named_templates():
    config = {"chat_template": [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]}
    assert rendered(ChatTemplate.from_config(config, {}), USER, True, 10) == "D"


def test_a_short_text_does_not_wait_for_a_long_one(folder):
    """Long texts have a thread of their own: three of them would occupy all threads for short ones."""
    tokenizer = Tokenizer.load(folder)
    release = threading.Event()

    async def both() -> list[int]:
        long = [asyncio.create_task(tokenizer.run(release.wait, 8_000_000)) for _ in range(3)]
        try:
            return await asyncio.wait_for(tokenizer.aencode("hello"), 30)
        finally:
            release.set()
            await asyncio.gather(*long)

    assert asyncio.run(both()) == tokenizer.encode("hello")
    tokenizer.close()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_the_digest_changes_with_each_file_that_decides_ids(tmp_path, name):
    folder = shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    before = Tokenizer.load(folder).digest
    assert Tokenizer.load(folder).digest == before
    if name == "chat_template.jinja":
        (folder / name).write_text("{{ messages }}")
    else:
        described = json.loads((folder / name).read_text())
        described |= {"normalizer": {"type": "Lowercase"}} if name == "tokenizer.json" else {"add_bos_token": True}
        (folder / name).write_text(json.dumps(described))
    assert Tokenizer.load(folder).digest != before
