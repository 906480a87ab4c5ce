"""A chat with one server: what is asked, what was answered, and the figures of both."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from oarlock.server.cli.chat.answer import Answer, ask
from oarlock.server.cli.chat.conversation import Conversation
from oarlock.server.cli.chat.screen import PlainScreen, Screen
from oarlock.server.cli.remote import Remote, ServerError


@dataclass(slots=True)
class Totals:
    """Totals over all answers of this chat."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class Session:
    """One chat with a server. `runner`: its loop runs the requests, and turns Ctrl-C into their cancellation."""

    remote: Remote
    model: str
    screen: Screen | PlainScreen
    runner: asyncio.Runner
    sampling: dict[str, Any] = field(default_factory=dict)
    conversation: Conversation = field(default_factory=Conversation)
    last: Answer | None = None
    totals: Totals = field(default_factory=Totals)

    def ask(self, text: str) -> Answer | None:
        """Send a message and show its answer. None where it failed: then the conversation is as it was before."""
        conversation, answer, problem = self.conversation, Answer(), None
        conversation.messages.append({"role": "user", "content": text})
        fields = {"model": self.model, "messages": conversation.as_messages(), **self.sampling}
        try:
            self.runner.run(self._show(fields, answer))
        except ServerError as error:
            problem = error
        except BaseException:  # a second Ctrl-C, or a signal that ends the chat
            conversation.messages.pop()
            raise
        finally:
            self.screen.end()
        if problem is not None:
            conversation.messages.pop()
            says_fix = problem.status in (None, 401, 403)
            self.screen.problem(f"{problem.cause} {problem.fix}" if says_fix else problem.cause)
            return None
        if answer.is_stopped and not answer.text:
            conversation.messages.pop()
        else:
            conversation.messages.append({"role": "assistant", "content": answer.text})
        self._count(answer)
        for notice in notices(answer):
            self.screen.notice(notice)
        return answer

    async def _show(self, fields: dict[str, Any], answer: Answer) -> None:
        self.screen.begin()
        await ask(self.remote, fields, self.screen, answer)

    def models(self) -> list[str]:
        """The names that the server lists now. Raises `ServerError`."""
        return self.runner.run(self.remote.models())

    def _count(self, answer: Answer) -> None:
        self.last = answer
        totals, usage = self.totals, answer.usage or {}
        totals.answers += 1
        totals.prompt_tokens += usage.get("prompt_tokens") or 0
        totals.cached_tokens += _cached(usage)
        totals.output_tokens += answer.output_tokens


def notices(answer: Answer) -> list[str]:
    """Notices about how an answer ended."""
    found = []
    if answer.is_stopped:
        found.append("(stopped)" if answer.text else "(stopped before the first word; the message was taken back)")
    if answer.finish_reason == "length":
        found.append("(ended by the limit of tokens)")
    if answer.tools:
        found.append(f"(asks for tools, which a chat does not run: {', '.join(answer.tools)})")
    return found


def figures(session: Session) -> str:
    """Figures that `/stats` shows."""
    last, totals = session.last, session.totals
    if last is None:
        return f"No answer yet. Model {session.model} at {session.remote.url}."
    usage, speed = last.usage or {}, last.tokens_per_s
    parts = [] if last.ttft_s is None else [f"first token after {1e3 * last.ttft_s:.0f} ms"]
    parts += [] if speed is None else [f"then {speed:.1f} tokens/s"]
    parts.append(f"{last.output_tokens} tokens" + (", counted by chunks" if last.usage is None else ""))
    if usage.get("prompt_tokens"):
        parts.append(f"of a prompt of {usage['prompt_tokens']} tokens {_cached(usage)} were cached")
    return (
        f"Last answer ({last.request_id}): {', '.join(parts)}.\n"
        f"This chat: {totals.answers} answers, {totals.prompt_tokens} prompt tokens, {totals.cached_tokens} of them "
        f"cached, {totals.output_tokens} tokens generated. Model {session.model} at {session.remote.url}."
    )


def _cached(usage: dict[str, Any]) -> int:
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
