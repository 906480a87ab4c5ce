"""`oarlock chat` against the real server: at a terminal, with keys typed, and in a pipe."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess

import httpx
import pytest

from tests.e2e.running import command, environment
from tests.e2e.shown_rows import ShownRows
from tests.e2e.terminal import CTRL_C, CTRL_D, CTRL_Z, TAB, Terminal

pytestmark = pytest.mark.slow
REPLY = "# A title\n\nHello **bold** \x1b[31mred\n\n```python\nx = 1\n```\n"


def prompt_of(server, tokenizer, number: int = -1) -> str:
    """Prompt of a request that the engine got, as text."""
    return tokenizer.decode(server.stage.engine.requests[number].prompt_token_ids)


def chat_env(tmp_path, **changes: str) -> dict[str, str]:
    return environment(XDG_STATE_HOME=str(tmp_path), **changes)


def type_commands(terminal: Terminal, server, tokenizer, saved) -> None:
    """Another model, a file, a new conversation, and the file again."""
    terminal.type("/model\n")
    terminal.expect("\\* demo\n  alias/with/slash")
    terminal.type("/model alias/with/slash\n/model nobody\n")
    terminal.expect("\\* alias/with/slash")
    terminal.expect("has no model nobody. It lists: demo, alias/with/slash")
    terminal.type("/modle\n")
    terminal.expect("Unknown command: /modle. Did you mean /model")

    terminal.type(f"/save {saved}\n/reset all\n")
    terminal.expect("6 messages are in")
    terminal.expect("A new conversation.")
    terminal.type(" /etc/hosts?\n")
    terminal.expect("A title")
    terminal.expect("\n> ")
    assert "What is this?" not in prompt_of(server, tokenizer)
    assert "Be brief." not in prompt_of(server, tokenizer)
    assert "user\n/etc/hosts?\nassistant" in prompt_of(server, tokenizer)
    terminal.type(f"/load {saved}\n")
    terminal.expect("6 messages are loaded")


def test_a_conversation_at_a_terminal(make_server, tokenizer, tmp_path, wait_for):
    server = make_server(REPLY)
    engine, saved = server.stage.engine, tmp_path / "talk.json"
    with Terminal(command("chat", server.url + "/v1/", "--temperature", "0.5"), chat_env(tmp_path)) as terminal:
        terminal.expect("demo at http://127.0.0.1:[0-9]+; /help")
        terminal.expect("> ")
        terminal.type("What is this?\n")
        terminal.expect("A title")
        terminal.expect("Hello bold ␛\\[31mred")  # the model's escape is shown, and does nothing
        terminal.expect("x = 1")
        terminal.expect("\n> ")
        assert "\x1b[1mbold\x1b[0m" in terminal.raw  # drawn as Markdown
        assert "\x1b[31mred" not in terminal.raw
        assert engine.requests[0].params.temperature == 0.5

        terminal.type("/system Be brief.\n")
        terminal.expect("The system prompt is set")
        terminal.type('"""first line\nsecond line\n"""\n')
        terminal.expect("A title")
        terminal.expect("\n> ")
        assert "Be brief." in prompt_of(server, tokenizer)
        assert "What is this?" in prompt_of(server, tokenizer)
        assert "first line\nsecond line\nassistant" in prompt_of(server, tokenizer)

        engine.pause_after = 5
        terminal.type("one \\\ntwo\n")
        wait_for(lambda: len(engine.requests) == 3)
        terminal.expect("A title")
        terminal.type(CTRL_C)
        terminal.expect("\\(stopped\\)")
        terminal.expect("\n> ")
        wait_for(lambda: len(engine.aborted) == 1)  # the server computes no further
        assert "one \ntwo\nassistant" in prompt_of(server, tokenizer)

        engine.pause_after = None
        terminal.type("half a line")
        terminal.expect("half a line")
        terminal.interrupt("Ctrl-D or /exit quits")
        terminal.type("/st")
        terminal.expect("/st")
        terminal.type(TAB)
        terminal.expect("ats")
        terminal.type("\n")
        terminal.expect("Last response \\(chatcmpl-")
        terminal.expect("first token after [0-9]+ ms")
        terminal.expect("This chat: 3 responses")

        type_commands(terminal, server, tokenizer, saved)
        terminal.expect("\n> ")  # a Ctrl-D before that is nobody's end of a line
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    messages = json.loads(saved.read_text())["messages"]
    assert [entry["role"] for entry in messages] == ["system"] + ["user", "assistant"] * 3
    assert messages[2]["content"] == REPLY
    history = tmp_path / "oarlock" / "chat_history"
    assert "What is this?" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_files_pastes_and_comparisons_and_what_is_kept_for_the_next_chat(make_server, tokenizer, tmp_path):
    server = make_server(REPLY)
    requests = server.stage.engine.requests
    notes, saved = tmp_path / "notes.txt", tmp_path / "talk.md"
    notes.write_text("first ```\nsecond\n")
    with Terminal(command("chat", server.url), chat_env(tmp_path)) as terminal:
        terminal.expect("> ")
        terminal.type(f"/attach {notes}\n")
        terminal.expect("notes.txt, [0-9]+ tokens, is sent with the next message")
        terminal.type("\x1b[200~/one\ntwo\n\x1b[201~")  # as a terminal sends what is pasted
        terminal.expect("two")
        assert not requests, "a newline that is pasted sends nothing"
        terminal.type("\n")
        terminal.expect("A title")
        terminal.expect("\n> ")
        assert "user\nnotes.txt:\n````\nfirst ```\nsecond\n````\n\n/one\ntwo\nassistant" in prompt_of(server, tokenizer)
        terminal.type("/attach\n/attach /nowhere\n/compare a b\n/compare sed=1 seed=2 x\n")
        for shown in ("No file is attached", "is not a file", "Name two settings", "Did you mean seed"):
            terminal.expect(shown)
        terminal.type("/compare seed=1 seed=2,temperature=0.5\n")
        terminal.expect("seed=1 +seed=2,temperature=0.5\n")
        terminal.expect("Hello bold ␛.+ Hello bold ␛")
        terminal.expect("seed=1: first token after .* tokens")
        terminal.expect("Both responses are the same. Neither is part")
        assert sorted((one.params.seed, one.params.temperature) for one in requests[1:]) == [(1, 1.0), (2, 0.5)]
        assert prompt_of(server, tokenizer).count("/one\ntwo") == 1, "the last question is asked again"
        terminal.type(f"/save {saved}\n")
        terminal.expect("2 messages are in")
        terminal.expect("\n> ")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert saved.read_text().startswith("## User\n\nnotes.txt:\n")
    assert saved.read_text().count("## Assistant") == 1
    kept = tmp_path / "oarlock" / "chat_history"
    assert kept.read_text().splitlines()[1] == "/one\\ntwo"
    kept.chmod(0o644)
    with Terminal(command("chat", server.url), chat_env(tmp_path)) as terminal:
        terminal.expect("> ")
        terminal.type("\x1b[A" * 7 + "\n")
        terminal.expect("A title")
        assert "user\n/one\ntwo\nassistant" in prompt_of(server, tokenizer)
        terminal.type("/exit\n")
        assert terminal.wait() == 0
    assert kept.stat().st_mode & 0o777 == 0o600


ANSWER = "# A title\n\nThese are more words than a narrow terminal has in one row, and the last of them is **end**."
STOPPED_AT = "last of them is"


@pytest.mark.parametrize(("columns", "typed"), [(60, ""), (24, ""), (90, "x" * 70), (41, "one\ntwo\nthree\n")])
def test_a_stopped_answer_is_on_the_screen_once(make_server, tokenizer, tmp_path, wait_for, columns, typed):
    shown = ANSWER[: ANSWER.index(STOPPED_AT) + len(STOPPED_AT)]
    server = make_server(ANSWER, pause_after=len(tokenizer.encode(shown, add_special_tokens=False)))
    with Terminal(command("chat", server.url), chat_env(tmp_path), columns=60) as terminal:
        terminal.expect("> ")
        terminal.type("Tell me.\n")
        terminal.expect(STOPPED_AT.replace(" ", r"\s+") + r"\s*\n")
        assert not terminal.is_echoing
        rows = ShownRows(60)
        rows.feed(seen := terminal.raw)
        terminal.resize(columns)
        rows.resize(columns)
        terminal.type(typed + CTRL_C)
        terminal.expect("\\(stopped\\)")
        terminal.expect("\n> ")
        wait_for(lambda: terminal.look(0.05) and terminal.raw.endswith("> ") and not terminal.is_echoing)  # readline's
        rows.feed(terminal.raw[len(seen) :])
        _, question, answer = rows.text.partition("> Tell me.\n")
        words = " ".join(answer.split())
        assert question and words == f"A title {' '.join(shown.split()[3:])} (stopped) >", rows.text
        assert len(server.stage.engine.requests) == 1, "what was typed before Ctrl-C is forgotten"
        terminal.type("/exit\n")
        assert terminal.wait() == 0


def test_a_line_typed_beside_an_answer_is_the_next_message(make_server, tokenizer, tmp_path, wait_for):
    server = make_server(ANSWER, delay_s=0.1)
    engine = server.stage.engine
    with Terminal(command("chat", server.url), chat_env(tmp_path), columns=60) as terminal:
        terminal.expect("> ")
        terminal.type("First.\n")
        terminal.expect("A title")
        engine.delay_s = 0.0
        terminal.type("Second.\n")
        terminal.expect("> Second")
        terminal.expect(r"end\.")
        terminal.expect("\n> ")
        terminal.type("/exit\n")
        assert terminal.wait() == 0
        assert terminal.is_echoing
        rows = ShownRows(60)
        rows.feed(terminal.raw)
    assert "user\nSecond.\nassistant" in prompt_of(server, tokenizer) and len(engine.requests) == 2
    assert (rows.text.count("A title"), rows.text.count("is end."), rows.text.count("Second.")) == (2, 2, 1), rows.text


def test_a_chat_gives_its_terminal_to_the_shell_while_it_is_stopped(make_server, tokenizer, tmp_path, wait_for):
    shown = ANSWER[: ANSWER.index(STOPPED_AT) + len(STOPPED_AT)]
    server = make_server(ANSWER, pause_after=len(tokenizer.encode(shown, add_special_tokens=False)))
    with Terminal(["sh", "-i"], chat_env(tmp_path, PS1="shell: "), columns=60) as terminal:
        terminal.expect("shell: ")
        terminal.type(shlex.join(command("chat", server.url)) + "\n")
        terminal.expect("\n> ")
        terminal.type("Tell me.\n")
        for again in (False, True):
            terminal.expect(STOPPED_AT.replace(" ", r"\s+") + r"\s*\n")
            assert not terminal.is_echoing
            terminal.type(CTRL_Z)
            terminal.expect("(?s)Stopped.*shell: ")
            assert terminal.is_echoing
            assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.rindex("\x1b[?25l"), "the cursor is shown"
            terminal.type(f"echo typed {again}\nfg\n")
            terminal.expect(f"\ntyped {again}\n")
        terminal.expect(STOPPED_AT.replace(" ", r"\s+") + r"\s*\n")
        assert not terminal.is_echoing
        server.stage.engine.resume.set()
        httpx.get(server.url + "/health")  # wakes the loop that the event belongs to
        terminal.expect(r"end\.")
        terminal.expect("\n> ")
        terminal.type("/exit\n")
        terminal.expect("shell: ")
        assert terminal.is_echoing
        terminal.type("exit\n")
        assert terminal.wait() == 0
    rows = ShownRows(60)
    rows.feed(terminal.raw)
    assert (rows.text.count("A title"), rows.text.count("These are"), rows.text.count("typed")) == (1, 1, 4), rows.text


def test_a_terminal_is_as_before_after_a_chat_that_is_ended(make_server, tmp_path):
    server = make_server(ANSWER, pause_after=3)
    with Terminal(command("chat", server.url), chat_env(tmp_path)) as terminal:
        terminal.expect("> ")
        terminal.type("First.\n")
        terminal.expect("A title")
        terminal.process.terminate()
        assert terminal.wait() == 128 + signal.SIGTERM
        assert terminal.is_echoing
        assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.rindex("\x1b[?25l"), "the cursor is shown again"


def test_a_server_that_dies_and_a_wrong_key(make_server, tmp_path):
    server = make_server("Hello.", api_key=("right",), die_after=1)
    with Terminal(command("chat", server.url), chat_env(tmp_path, OPENAI_API_KEY="right")) as terminal:
        terminal.expect("\n> |^> ")
        terminal.type("Hello?\n")
        terminal.expect("The response broke off: The engine has stopped")
        terminal.type("/save " + str(tmp_path / "none.json") + "\n")
        terminal.expect("0 messages are in")  # the failed one can be sent again
        terminal.type("/exit\n")
        assert terminal.wait() == 0
    wrong = piped("Hello?", server.url, env=chat_env(tmp_path, OPENAI_API_KEY="wrong"))
    assert wrong.returncode == 3
    assert "HTTP 401" in wrong.stderr and "fix: Set the environment variable OPENAI_API_KEY" in wrong.stderr


def piped(text: str, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command("chat", *arguments), input=text, env=env, capture_output=True, text=True, timeout=120)


def test_a_question_in_a_pipe(make_server, tokenizer, tmp_path):
    server = make_server(REPLY)
    answer = piped("Line one\nline two\n", server.url, "--max-tokens", "200", env=chat_env(tmp_path))
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, REPLY, "")
    assert "user\nLine one\nline two\nassistant" in prompt_of(server, tokenizer)
    cut = piped("Hello?", server.url, "--max-tokens", "3", env=chat_env(tmp_path))
    assert cut.returncode == 1
    assert cut.stdout.startswith("# A") and "token limit" in cut.stderr
    assert not os.path.exists(tmp_path / "oarlock")


def test_a_reader_that_leaves_early_is_no_error(make_server, tmp_path):
    server = make_server(lambda request: [72] * 200)
    chat = " ".join(command("chat", server.url))
    script = f"echo hello | {chat} | head -c 1; echo ${{PIPESTATUS[1]}}"
    result = subprocess.run(["bash", "-c", script], env=chat_env(tmp_path), capture_output=True, text=True, timeout=120)
    assert result.stderr == ""
    assert result.stdout.endswith(("1\n", "0\n"))
