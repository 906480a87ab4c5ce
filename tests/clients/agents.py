"""Coding agents: one headless turn each, in which a tool is called and really runs, and a second turn for the cache.

An agent is started as `oarlock snippets` prints it, with the arguments of a headless turn added, in an empty directory
and an empty home, against the server of `scripted_model.py`. What it did is read from its own machine-readable output.
Its proxy is `Elsewhere`, so that an attempt to reach any other address is recorded and fails at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clients.elsewhere import Elsewhere
from tests.clients.environments import CACHE
from tests.clients.matrix import Client
from tests.clients.scripted_model import ANSWER, OUTPUT
from tests.clients.snippets import printed_snippet
from tests.e2e.running import RunningServer

Event = dict[str, Any]
_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "USER", "SHELL")  # the environment of an agent, beside what its entry adds
_QUESTIONS = ("Write the numbers to a file.", "Please write the numbers to a file again.")


@dataclass
class Turn:
    """One headless turn, as the agent reports it."""

    outputs: list[str] = field(default_factory=list)  # of the tools that ran
    answer: str = ""
    prompts: list[tuple[int, int]] = field(
        default_factory=list
    )  # (cached tokens, all tokens) of prompts, first to last
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Agent:
    """How one agent is run and read."""

    tool: str  # of `scripted_model.CALLS`
    arguments: str  # added to the last line of the snippet, with {question}
    read: Callable[[list[Event]], Turn]
    user_agent: str  # the beginning of it, by which the server's log names the client
    ignored: frozenset[str] = frozenset()  # parameters that it sends, and that have no effect here
    variables: tuple[tuple[str, str], ...] = ()
    settings: tuple[tuple[str, str], ...] = ()  # files of the home directory
    elsewhere: frozenset[str] = frozenset()  # other addresses that it asks for whatever its settings are
    cached_share: float = 0.8  # of the second session's first prompt


def read_claude_code(events: list[Event]) -> Turn:
    """Read the lines of `claude -p --output-format stream-json --verbose`."""
    turn = Turn()
    for event in events:
        if event["type"] == "assistant":
            usage = event["message"]["usage"]
            cached = usage.get("cache_read_input_tokens") or 0
            turn.prompts.append((cached, usage["input_tokens"] + cached))
        elif event["type"] == "user":
            results = [block for block in event["message"]["content"] if block["type"] == "tool_result"]
            turn.outputs += [result["content"] for result in results if not result.get("is_error")]
            turn.errors += [str(result["content"]) for result in results if result.get("is_error")]
        elif event["type"] == "result":
            turn.answer = event.get("result", "")
            if event["is_error"]:
                turn.errors.append(turn.answer)
    return turn


def read_qwen_code(events: list[Event]) -> Turn:
    """Read the lines of `qwen --output-format stream-json`: as Claude Code's, but input tokens include cached ones."""
    turn = read_claude_code(events)
    turn.prompts = [(cached, tokens - cached) for cached, tokens in turn.prompts]
    return turn


def read_codex(events: list[Event]) -> Turn:
    """Read the lines of `codex exec --json`, which count the tokens of all prompts of a turn together."""
    turn = Turn()
    for event in events:
        item = event.get("item", {})
        if event["type"] == "turn.completed":
            turn.prompts.append((event["usage"]["cached_input_tokens"], event["usage"]["input_tokens"]))
        elif event["type"] in ("error", "turn.failed"):
            turn.errors.append(json.dumps(event))
        elif event["type"] != "item.completed":
            continue
        elif item["type"] == "command_execution" and item["exit_code"] == 0:
            turn.outputs.append(item["aggregated_output"])
        elif item["type"] == "agent_message":
            turn.answer = item["text"]
        elif item["type"] == "error" and "Model metadata" not in item["message"]:
            turn.errors.append(item["message"])
    return turn


def read_opencode(events: list[Event]) -> Turn:
    """Read the lines of `opencode run --format json`."""
    turn = Turn()
    for event in events:
        part = event.get("part", {})
        if event["type"] == "error":
            turn.errors.append(json.dumps(event))
        elif event["type"] == "tool_use" and part["state"]["status"] == "completed":
            turn.outputs.append(part["state"]["output"])
        elif event["type"] == "text":
            turn.answer = part["text"]
        elif event["type"] == "step_finish":
            cached = part["tokens"]["cache"]["read"]
            turn.prompts.append((cached, part["tokens"]["input"] + cached))
    return turn


AGENTS: dict[str, Agent] = {
    "claude-code": Agent(
        "Bash",
        "-p {question} --output-format stream-json --verbose --allowedTools Bash",
        read_claude_code,
        "claude-cli/",
        ignored=frozenset({"context_management", "output_config.effort"}),
    ),
    "codex": Agent(
        "exec_command",
        "exec --json --skip-git-repo-check --sandbox workspace-write -c analytics.enabled=false "
        "-c check_for_update_on_startup=false --disable plugins --disable apps {question}",
        read_codex,
        "codex_exec/",
        ignored=frozenset({"tools.web_search"}),
    ),
    "opencode": Agent(
        "bash",
        "run --pure --format json {question}",
        read_opencode,
        "opencode/",
        variables=(
            ("OPENCODE_DISABLE_AUTOUPDATE", "1"),
            ("OPENCODE_DISABLE_MODELS_FETCH", "1"),
            ("npm_config_fetch_retries", "0"),
        ),
        elsewhere=frozenset({"CONNECT registry.npmjs.org:443"}),  # the types for plugins of its user
    ),
    "qwen-code": Agent(
        "run_shell_command",
        "--yolo -p {question} --output-format stream-json",
        read_qwen_code,
        "QwenCode/",
        settings=(
            (
                ".qwen/settings.json",
                '{"privacy": {"usageStatisticsEnabled": false}, "general": {"enableAutoUpdate": false}}',
            ),
        ),
        elsewhere=frozenset({"CONNECT registry.npmjs.org:443"}),  # whether there is a newer version
    ),
}


@contextlib.contextmanager
def exercise(report: Callable[[str, str | None], None], what: str) -> Generator[None]:
    """Report `what` as done, or with the problem if the block raises."""
    try:
        yield
    except (AssertionError, subprocess.TimeoutExpired) as error:
        report(what, " ".join(str(error).split())[:700])
    else:
        report(what, None)


def try_agent(
    client: Client, command: list[str], server: RunningServer, report: Callable[[str, str | None], None]
) -> None:
    """Run both turns of an agent. `command`: its program. `report`: called with each exercise, and with its problem."""
    agent = AGENTS[client.snippet]
    with tempfile.TemporaryDirectory(dir=CACHE / client.name) as temporary, Elsewhere(server.port) as elsewhere:
        session = _Session(client, agent, Path(command[0]), server, Path(temporary), elsewhere)
        with exercise(report, f"`oarlock snippets --client {client.snippet}`, a headless turn: {agent.tool} runs"):
            session.turn(_QUESTIONS[0])
        with exercise(report, "a second session: most of its prompt comes from the prefix cache"):
            cached, tokens = session.turn(_QUESTIONS[1]).prompts[0]
            assert cached >= agent.cached_share * tokens, f"{cached} of {tokens} tokens were cached"
        with exercise(report, "no request is refused, and no other address is asked for"):
            assert not session.refused(), f"{session.refused()} requests were refused"
            others = set(elsewhere.asked) - agent.elsewhere
            assert not others, others
        if agent.ignored:
            with exercise(report, f"the log names what is ignored: {', '.join(sorted(agent.ignored))}"):
                missing = agent.ignored - session.ignored()
                assert not missing, f"not in the log: {missing}; there: {session.ignored()}"


@dataclass
class _Session:
    """Directories and counters of one agent while it is tried."""

    client: Client
    agent: Agent
    program: Path
    server: RunningServer
    directory: Path
    elsewhere: Elsewhere

    def __post_init__(self) -> None:
        self._refused_before = self._refusals()
        self._log_before = len(self.server.log)

    def turn(self, question: str) -> Turn:
        """Run one headless turn in an empty working directory, and check that its tool ran and its answer came."""
        work, home = self.directory / "work", self.directory / "home"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        for name, text in self.agent.settings:
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(text)
        home.mkdir(exist_ok=True)
        status, printed, complaints = self._run(question, work, home)
        turn = self.agent.read([json.loads(line) for line in printed.splitlines() if line.startswith("{")])
        excerpt = f"{complaints[-500:]}\n{printed[-500:]}"
        assert not turn.errors, turn.errors
        assert status == 0, f"status {status}: {excerpt}"
        assert len(turn.outputs) == 1 and OUTPUT in turn.outputs[0], f"tools that ran: {turn.outputs}: {excerpt}"
        written = work / f"{self.agent.tool}.txt"
        assert written.is_file() and written.read_text().strip() == OUTPUT, f"no {written.name}: {excerpt}"
        assert turn.answer.strip() == ANSWER, f"answer {turn.answer!r}: {excerpt}"
        return turn

    def _run(self, question: str, work: Path, home: Path) -> tuple[int, str, str]:
        """Run the snippet with the arguments of a headless turn; return status, standard output and errors."""
        snippet = printed_snippet(self.client.snippet, self.server.url).rstrip("\n")
        words = self.agent.arguments.format(question=shlex.quote(question))
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        env = kept | self.elsewhere.variables | {"HOME": str(home), **dict(self.agent.variables)}
        env["PATH"] = f"{self.program.parent}:{kept['PATH']}"
        process = subprocess.Popen(
            ["bash", "-e", "-c", f"{snippet} {words}\n"],
            cwd=work,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            printed, complaints = process.communicate(timeout=self.client.timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):  # also ends what the agent left running
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, printed, complaints

    def refused(self) -> int:
        """Return the number of requests of this agent that were refused or failed."""
        return self._refusals() - self._refused_before

    def _refusals(self) -> int:
        lines = self.server.client.get("/metrics").text.splitlines()
        counted = [line for line in lines if line.startswith("oarlock:http_responses") and 'status="2' not in line]
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in counted))

    def ignored(self) -> set[str]:
        """Return the parameters that the server's log names as ignored for this agent."""
        names: set[str] = set()
        for line in self.server.log[self._log_before :].splitlines():
            if "event=parameters_ignored" in line and f"agent={self.agent.user_agent}" in line.replace('"', ""):
                names.update(line.rsplit("names=", 1)[1].strip("'\"").split(","))
        return names
