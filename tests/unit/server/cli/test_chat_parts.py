"""The parts of a chat: blocks of Markdown, text that is fit to show, conversations in files, the command line."""

from __future__ import annotations

import io
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from oarlock.server.cli.chat.session import Conversation, ConversationError
from oarlock.server.cli.chat.terminal import History, MarkdownBlocks, Screen
from oarlock.server.cli.main import main
from oarlock.server.cli.remote import base_of, fit, message_of

MARKDOWN = st.text(st.sampled_from(list("ab#*-1.` ~\n\t")), max_size=80)


def blocks_of(*pieces: str) -> list[str]:
    reader = MarkdownBlocks()
    found = [block for piece in pieces for block in reader.add(piece)]
    return [*found, reader.rest]


@given(MARKDOWN, st.integers(0, 80))
def test_blocks_are_the_text_however_it_is_cut(text, at):
    whole = blocks_of(text)
    assert blocks_of(*text) == whole == blocks_of(text[:at], text[at:])
    assert "".join("".join(whole).split()) == "".join(text.split())  # only empty lines between blocks are lost


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("one\n\ntwo\n\nthree", 3),
        ("one\ntwo", 1),
        ("```\na\n\nb\n```\n\nc", 2),  # an empty line within code is code
        ("````\n```\n\nx\n````\n\nc", 2),  # a longer fence is not closed by a shorter one
        ("~~~\n```\n\n~~~\n\nc", 2),
        ("1. a\n\n2. b\n\n   more\n\nc", 2),  # a list goes on after an empty line
        ("- a\n\n- b\n\nc", 2),
        ("- a\n\n```\n\nx\n\n- y\n```\n\nc", 3),
        ("```a`b``` c\n\nd", 2),  # code within a line opens nothing
        ("\n\n\none", 1),
    ],
)
def test_markdown_is_divided_into_blocks(text, count):
    assert len([block for block in blocks_of(text + "\n") if block]) == count


def test_control_characters_become_pictures():
    assert fit("a\x1b[2Jb\x07\x9b1m\u202ec\td\r\ne\rf\x7f") == "a␛[2Jb␇�1m�c\td\ne␍f␡"


def test_a_long_answer_does_not_repeat_itself():
    """Lines that have scrolled away cannot be drawn over, so each line may be printed for good only once."""
    import asyncio

    shown = io.StringIO()
    screen = Screen(Console(file=shown, width=60, height=10, force_terminal=True, color_system=None))
    text = "".join(f"line {number} of a list that is long enough\n\n" for number in range(200))

    async def feed() -> None:
        screen.begin()
        for at in range(0, len(text), 7):
            screen.add_content(text[at : at + 7])
        screen.end()

    asyncio.run(feed())
    whole = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", shown.getvalue())
    printed = [line.strip() for line in whole.splitlines() if line.strip().endswith("enough")]
    assert {f"line {number} of a list that is long enough" for number in range(200)} == set(printed)
    assert len(printed) < 400  # each once for good, and a few while they were written


def test_reasoning_is_separate_from_the_content():
    import asyncio

    shown = io.StringIO()
    screen = Screen(Console(file=shown, width=60, height=10, force_terminal=True, color_system="standard"))

    async def feed() -> None:
        screen.begin()
        screen.add_reasoning("Let me *think*.")
        screen.add_content("It **is**.")
        screen.end()

    asyncio.run(feed())
    assert "\x1b[2;3mLet me *think*.\x1b[0m" in shown.getvalue()  # as it was written, dim
    assert "\x1b[1mis\x1b[0m" in shown.getvalue()


def test_saved_conversations_can_be_loaded(tmp_path):
    talk = Conversation("Be brief.", [{"role": "user", "content": "ä?"}, {"role": "assistant", "content": "ö."}])
    with pytest.raises(ConversationError, match="Give a file"):
        talk.save("", "demo")
    path = talk.save(str(tmp_path / "talk.json"), "demo")
    talk.messages.append({"role": "user", "content": "more"})
    assert talk.save("", "demo") == path  # its own file may be written again
    with pytest.raises(ConversationError, match="exists already"):
        Conversation().save(str(path), "demo")
    again = Conversation()
    assert again.load(str(path)) == 3
    assert again.as_messages() == talk.as_messages()
    assert json.loads(path.read_text())["model"] == "demo"


@given(st.lists(st.text(st.sampled_from(list("ab\\\r\nn \u2028")), min_size=1, max_size=8), max_size=9))
def test_messages_come_back_from_the_history(tmp_path_factory, messages):
    history = History(tmp_path_factory.mktemp("state") / "oarlock" / "chat_history")
    assert history.read() == []
    for message in messages:
        history.add(message)
    assert history.read() == messages


def test_a_history_that_has_grown_is_cut(tmp_path):
    path = tmp_path / "chat_history"
    path.write_text("".join(f"{number}\n" for number in range(2001)))
    assert History(path).read() == path.read_text().splitlines() == [str(number) for number in range(1001, 2001)]
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"\xff\n")
    assert History(path).read() == []


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("{", "is not JSON"),
        ('{"a": 1}', "no list of messages"),
        ('[{"role": "tool", "content": "x"}]', "messages[0].role is 'tool'"),
        ('["x"]', "messages[0].role is None"),
        ('[{"role": "user", "content": [{"type": "text"}]}]', "messages[0].content is not text"),
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(tmp_path, content, cause):
    path = tmp_path / "x.json"
    path.write_text(content)
    talk = Conversation("system", [{"role": "user", "content": "kept"}])
    with pytest.raises(ConversationError) as error:
        talk.load(str(path))
    assert cause in str(error.value)
    assert talk.messages[0]["content"] == "kept"


def test_the_address_of_a_server():
    assert base_of("http://host:1/v1/") == base_of("http://host:1") == "http://host:1"
    assert base_of("https://host/prefix/v1") == "https://host/prefix"
    assert message_of('{"error": {"message": "No.\\nNo."}}') == "No. No."
    assert message_of("<html>") == "<html>"
    assert message_of("") == "without an explanation"


@pytest.mark.parametrize(
    ("arguments", "code", "cause", "fix"),
    [
        (["http://x:1/?q"], 2, "not the address of a server", "http://127.0.0.1:8000"),
        (["http://127.0.0.1:1", "--serve-flags=-tp 2"], 2, "apply to a server that is started", "Leave"),
        (["--serve-flags", "--port 1"], 2, "--port in --serve-flags", "oarlock serve"),
        (["--serve-flags", "'"], 2, "--serve-flags cannot be read", "quotation"),
        (["--temperature", "-1"], 2, "at least 0", "--help"),
        (["--load", "/nowhere.json"], 3, "--load: /nowhere.json cannot be read", "--load"),
        (["http://127.0.0.1:1"], 3, "No server responds at http://127.0.0.1:1", "oarlock serve MODEL"),
    ],
)
def test_mistakes_are_one_line_of_cause_and_one_of_fix(monkeypatch, capsys, arguments, code, cause, fix):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert main(["chat", *arguments]) == code
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "fix"]
    assert cause in lines[0] and fix in lines[1]


def test_an_empty_pipe_is_a_mistake(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["chat"]) == 2
    assert "empty" in capsys.readouterr().err
