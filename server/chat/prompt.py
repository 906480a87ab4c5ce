"""Renders the prompt of a chat request, and makes the grammar of its answer.

Also finds out whether the model thinks before it answers, and whether the prompt ends inside its thoughts. The grammar
holds forced calls, the caller's own constraint, or either; thoughts may come before.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from oarlock.engine.errors import RequestError
from oarlock.engine.types import Grammar
from oarlock.server.chat.message_parser import REASONING_FORMATS, THINK, AnswerShape, ReasoningFormat
from oarlock.server.chat.thinking import thinking_of
from oarlock.server.chat.tool_choice import ToolChoice, resolve_tool_choice
from oarlock.server.chat.tool_parsers.base import ToolFormat
from oarlock.server.chat.tool_parsers.grammar import (
    SpecialIds,
    delimited,
    delimiter,
    literal,
    pattern_text,
    schema_rule,
)
from oarlock.server.chat.tool_parsers.harmony import HARMONY, TURN, after_thoughts, final_head
from oarlock.server.chat.tool_parsers.registry import choose
from oarlock.server.endpoints.chat.schema import ChatMessage, ChatRequest, ToolCall
from oarlock.server.llm.chat_template import Rendering, text_parts
from oarlock.server.llm.tokenizer import Tokenizer

_CUT_HERE = "\ue0c7\ue0f1\ue0c7"  # added to a message to be continued: the prompt ends there (private use area)
_MAX_ADDED = 64 * 1024  # characters a template may add to four times its input
_AT_ONCE = 32 * 1024  # characters that the event loop prepares itself, in about 0.1 ms
_MESSAGE_SIZE = 256  # characters that take as long as what a message takes beside its text
_MAX_END = 256  # characters of the prompt's end in which `<think>` is looked for
_SHORT_ID_SIZE = 9  # letters and digits


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt, and what it implies for the answer."""

    text: str
    tool_choice: ToolChoice | None
    may_think: bool  # the answer may begin with thoughts
    is_thinking: bool  # the prompt ends inside them
    reasoning: ReasoningFormat = THINK  # how they are marked
    ignored: tuple[str, ...] = ()  # fields of the request that have no effect with this template
    harmony: str | None = None  # where answers are in Harmony: what the prompt's end holds of this one already

    @property
    def delimiters(self) -> tuple[str, ...]:
        """Delimiters that the answer's parsers look for: they stay in its text even where they are special tokens."""
        if self.harmony is not None:
            return HARMONY.delimiters
        calls = self.tool_choice.format.delimiters if self.tool_choice else ()
        return (*calls, *self.reasoning.tokens) if self.may_think or self.is_thinking else calls

    @property
    def shape(self) -> AnswerShape:
        """Parts that the answer may have, for its parser."""
        return AnswerShape(self.may_think, self.is_thinking, self.tool_choice, self.reasoning, self.harmony)


async def render_prompt(tokenizer: Tokenizer, request: ChatRequest) -> ChatPrompt:
    """The prompt of a request. Raises `RequestError`."""
    template = tokenizer.template
    tool_format = choose(template.source, template.parsers)
    choice = resolve_tool_choice(request, tool_format)
    takes = (True, True)  # messages of the role system, and turns of one role that follow each other
    if tool_format.write_into_messages is not None and template.exists:
        takes = await template.takes_system(), await template.takes_runs()
    as_parts = template.exists and await template.reads_parts()
    reasons = tool_format is HARMONY or _marks(tokenizer) is not None
    thinking = await thinking_of(template, request, reasons)
    size = sum(len(message.text) for message in request.messages)
    if size + len(request.messages) * _MESSAGE_SIZE <= _AT_ONCE:
        rendering = _prepare(tokenizer, request, tool_format, choice, takes, as_parts, thinking.variables)
    else:
        rendering = await tokenizer.run(
            lambda: _prepare(tokenizer, request, tool_format, choice, takes, as_parts, thinking.variables), size
        )
    text = await template.write(rendering)
    if request.continue_final_message:
        text = _cut(text)
    if tool_format is HARMONY:
        thinks = tokenizer.template.parsers.get("reasoning_parser") != "none"
        begun = text.rpartition(TURN)[2] if TURN in text else ""
        return ChatPrompt(text, choice, thinks, False, ignored=thinking.ignored, harmony=begun)
    return ChatPrompt(text, choice, *_thoughts(tokenizer, text, request), ignored=thinking.ignored)


def _prepare(
    tokenizer: Tokenizer,
    request: ChatRequest,
    tool_format: ToolFormat,
    choice: ToolChoice | None,
    takes: tuple[bool, bool],
    as_parts: bool,
    variables: dict[str, Any],
) -> Rendering:
    template = tokenizer.template
    messages = _messages(request.messages, tool_format, "developer" in template.source)
    tools = choice.for_template() if choice else None
    if tool_format.write_into_messages is not None:
        messages, tools = tool_format.write_into_messages(messages, tools, *takes), None
    if request.continue_final_message:
        messages[-1] = {**messages[-1], "content": messages[-1]["content"] + _CUT_HERE}
    if as_parts:
        messages = _in_parts(messages, request.messages)
    size = _size([messages, tools, variables])
    most = 4 * size + _MAX_ADDED
    return template.prepare(messages, request.opens_answer, most, tools=tools, variables=variables)


def _size(value: Any) -> int:
    """Characters in a value of JSON, about as many as it is written with."""
    if isinstance(value, dict):
        return sum(len(name) + 6 + _size(item) for name, item in value.items())
    if isinstance(value, list):
        return sum(2 + _size(item) for item in value)
    return len(value) + 2 if isinstance(value, str) else 5


def _cut(text: str) -> str:
    end = text.rfind(_CUT_HERE)
    if end < 0:
        message = "This model's chat template does not show the last message as it is, so it cannot be continued."
        raise RequestError(message, "continue_final_message")
    return text[:end]


def _thoughts(tokenizer: Tokenizer, text: str, request: ChatRequest) -> tuple[bool, bool, ReasoningFormat]:
    """Returns (the answer may begin with thoughts, the prompt ends inside thoughts, the marks around them)."""
    marks = _marks(tokenizer)
    if marks is None:
        return False, False, THINK
    if request.continue_final_message:
        last = request.messages[-1].text
        return not last.strip(), last.rfind(marks.start) > last.rfind(marks.end), marks
    end = text[-_MAX_END:].rstrip()
    return not end.endswith((marks.start.rstrip(), marks.end)), end.endswith(marks.start.rstrip()), marks


def _marks(tokenizer: Tokenizer) -> ReasoningFormat | None:
    """Marks of this model's thoughts: the operator's choice, else found in its template, else among its tokens."""
    template, token_to_id = tokenizer.template, tokenizer.backend.token_to_id
    name = template.parsers.get("reasoning_parser")
    if name is not None:
        return next((known for known in REASONING_FORMATS if name in (known.name, *known.aliases)), None)
    for known in REASONING_FORMATS:
        if known.start in template.source or known.end in template.source:
            return known
    return next(
        (known for known in REASONING_FORMATS if all(token_to_id(token) is not None for token in known.tokens)), None
    )


def _messages(given: list[ChatMessage], tool_format: ToolFormat, has_developer: bool) -> list[dict[str, Any]]:
    """The conversation in the form that Hugging Face templates are written for."""
    as_text = tool_format.text_arguments
    ids = _CallIds(tool_format)
    names: dict[str, str] = {}  # of called functions, by the call's id
    messages = []
    for message in given:
        role = "system" if message.role == "developer" and not has_developer else message.role
        written: dict[str, Any] = {"role": role, "content": message.text}
        name = message.name or names.get(message.tool_call_id or "")
        if name is not None:
            written["name"] = name
        if message.thoughts is not None and message.role == "assistant":
            written |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), message.thoughts)
        if message.tool_calls:
            names |= {call.id: call.function.name for call in message.tool_calls}
            written["tool_calls"] = [
                {
                    "id": ids.of_call(call),
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, as_text)},
                }
                for call in message.tool_calls
            ]
            if tool_format is HARMONY and message.thoughts and message.text:
                # Its template takes one of them before a call, and writes it as thoughts.
                both = f"{message.thoughts}\n{message.text}"
                written |= {"content": "", **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), both)}
        if message.tool_call_id is not None:
            written["tool_call_id"] = ids.of_result(message.tool_call_id)
        messages.append(written)
    return messages


def _in_parts(written: list[dict[str, Any]], given: list[ChatMessage]) -> list[dict[str, Any]]:
    """Give messages their contents as lists of parts: the caller's own where the texts are still theirs."""
    sources = given if len(given) == len(written) else [None] * len(written)
    found = []
    for message, source in zip(written, sources, strict=True):
        texts = [message["content"]] if message["content"] else []
        if source is not None and isinstance(source.content, list) and source.text == message["content"]:
            texts = [part.text or part.refusal for part in source.content]
        found.append({**message, "content": text_parts(*texts)})
    return found


def _arguments(text: str, as_text: bool) -> Any:
    """Arguments of a call as an object, as most templates write the JSON themselves; broken ones stay text."""
    if as_text:
        return text or "{}"
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


class _CallIds:
    """The ids of calls and results as a format's templates write them, in the order of the conversation."""

    def __init__(self, tool_format: ToolFormat) -> None:
        self._format = tool_format
        self._known: dict[str, str] = {}  # the newest call of each id
        self._num_calls = 0

    def of_call(self, call: ToolCall) -> str:
        make = self._format.call_id
        written = self._written(call.id) if make is None else make(call.function.name, self._num_calls)
        self._num_calls += 1
        self._known[call.id] = written
        return written

    def of_result(self, call_id: str) -> str:
        return self._known.get(call_id) or self._written(call_id)

    def _written(self, call_id: str) -> str:
        return _short(call_id) if self._format.short_call_ids else call_id


def _short(call_id: str) -> str:
    """Call id in the form that Mistral's templates accept; an id in another form is replaced by its digest."""
    if len(call_id) == _SHORT_ID_SIZE and call_id.isalnum() and call_id.isascii():
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()[:_SHORT_ID_SIZE]


def answer_grammar(own: Grammar | None, prompt: ChatPrompt, special_ids: SpecialIds) -> Grammar | None:
    """Grammar that the answer must match, None if any text may come; `own` is the caller's constraint.

    Raises `RequestError`.
    """
    tools = prompt.tool_choice
    if tools is not None and tools.must_call:
        if own is not None and own.kind not in ("json_schema", "json_object"):  # those bind only the content
            message = f"'{own.param}' cannot be combined with a tool_choice that makes the model call a function."
            raise RequestError(message, own.param)
        return _whole("calls", tools.call_rules(special_ids), prompt, special_ids, "tools")
    if own is None and tools is not None and tools.is_strict:
        body, rules = tools.format.optional_calls(special_ids)
        return _whole(body, f"{rules}\n{tools.call_rules(special_ids)}", prompt, special_ids, "tools")
    if own is None or not (tools or prompt.may_think or prompt.is_thinking or prompt.harmony is not None):
        return own
    rules = _rule("answer", own)
    if prompt.harmony:  # the answer has begun, and is continued
        return Grammar("lark", f"start: answer\n{rules}", own.param)
    if prompt.harmony is not None:
        rules = f"{_rule('text', own)}\nanswer: {final_head(special_ids)} text"
    if tools is None or not tools.format.is_parsed:
        return _whole("answer", rules, prompt, special_ids, own.param)
    return _whole("(answer | calls)", f"{rules}\n{tools.call_rules(special_ids)}", prompt, special_ids, own.param)


def _whole(body: str, rules: str, prompt: ChatPrompt, special_ids: SpecialIds, param: str) -> Grammar:
    """The grammar of an answer that is `body`; before it a model that thinks may finish its thoughts."""
    if prompt.harmony is not None:
        body, before = after_thoughts(body, special_ids)
        return Grammar("lark", f"start: {body}\n{before}\n{rules}", param)
    if not (prompt.may_think or prompt.is_thinking):
        return Grammar("lark", f"start: {body}\n{rules}", param)
    marks = prompt.reasoning
    if marks.end in special_ids:  # a special token is never part of a text
        thoughts = f"thoughts: THOUGHTS {delimiter(marks.end, special_ids)}\nTHOUGHTS: /(?s:.*)/"
    else:
        thoughts = f"thoughts[suffix={literal(marks.end)}]: /(?s:.*)/"
    opening = "" if prompt.is_thinking else f"{delimited(marks.start, marks.tokens, special_ids)} "
    before = f"{opening}thoughts lines" if prompt.is_thinking else f"({opening}thoughts lines)?"
    return Grammar("lark", f"start: {before} {body}\n{thoughts}\nlines: /\\n{{0,2}}/\n{rules}", param)


def _rule(name: str, own: Grammar) -> str:
    """The caller's constraint as a rule. Raises `RequestError` for one that cannot be part of a grammar."""
    if own.kind == "json_schema":
        schema: Any = json.loads(own.text)
        return schema_rule(name, schema if isinstance(schema, dict) else {})
    if own.kind == "json_object":
        return schema_rule(name, {"type": "object"})
    if own.kind == "choice":
        return f"{name}: " + " | ".join(map(literal, json.loads(own.text)))
    if own.kind == "regex":
        return f"{name}: /{pattern_text(own.text)}/"
    message = "A grammar of the caller's own cannot be combined with tools, nor with a model that thinks first."
    raise RequestError(message, own.param)
