"""Rendering of a chat request's prompt, and the grammar of its response.

Also determines whether the model reasons before it responds and whether the prompt ends inside the reasoning. The
grammar covers forced calls, the caller's own constraint, or both as alternatives; reasoning may precede them.
"""

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

from oarlock.engine.errors import RequestError
from oarlock.engine.types import Grammar
from oarlock.server.chat.conversation import in_parts, template_messages
from oarlock.server.chat.detection import tool_format_of
from oarlock.server.chat.documents import check_documents
from oarlock.server.chat.message_parser import THINK, MessageShape, ReasoningFormat
from oarlock.server.chat.reasoning_detection import reasoning_format_of
from oarlock.server.chat.thinking import thinking_of
from oarlock.server.chat.tool_choice import RequestTools, resolve_tool_choice
from oarlock.server.chat.tool_parsers.base import ToolFormat
from oarlock.server.chat.tool_parsers.grammar import (
    SpecialIds,
    delimited,
    delimiter,
    literal,
    pattern_text,
    schema_rule,
)
from oarlock.server.chat.tool_parsers.harmony import HARMONY, TURN, after_reasoning, final_head
from oarlock.server.chat.turn_folding import Folding
from oarlock.server.chat.turn_trial import Outline, TurnTrial
from oarlock.server.llm.chat_template import ChatTemplate, Rendering
from oarlock.server.llm.tokenizer import Tokenizer
from oarlock.server.schemas.chat import ChatRequest

# appended to a message to be continued, to find the end of the prompt (private use area)
_CONTINUATION_MARK = "\ue0c7\ue0f1\ue0c7"
_MAX_ADDED = 64 * 1024  # characters that a template may add to four times its input
_MAX_INLINE_CHARACTERS = 32 * 1024  # larger inputs (in characters) are prepared on a thread, not on the event loop
_MESSAGE_SIZE = 256  # fixed cost of a message, as a number of text characters that take the same time
_MAX_END = 256  # characters at the end of the prompt that are searched for `<think>`


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt, and the properties of the response that follow from it."""

    text: str
    tool_choice: RequestTools | None
    may_think: bool  # the response may begin with reasoning
    is_thinking: bool  # the prompt ends inside the reasoning
    reasoning: ReasoningFormat = THINK  # tags around the reasoning
    ignored: tuple[str, ...] = ()  # fields of the request that have no effect with this template
    harmony: str | None = None  # Harmony only: the part of the assistant message that the prompt contains

    @property
    def delimiters(self) -> tuple[str, ...]:
        """Delimiters that the output parsers need; they stay in the text even if they are special tokens."""
        if self.harmony is not None:
            return HARMONY.delimiters
        calls = self.tool_choice.format.delimiters if self.tool_choice else ()
        thinks = self.may_think or self.is_thinking
        return (*calls, *self.reasoning.answer_tokens, *(self.reasoning.tokens if thinks else ()))

    @property
    def shape(self) -> MessageShape:
        """Parts that the response may have, for its parser."""
        return MessageShape(self.may_think, self.is_thinking, self.tool_choice, self.reasoning, self.harmony)


async def render_prompt(tokenizer: Tokenizer, request: ChatRequest) -> ChatPrompt:
    """Return the prompt of a request. Raises `RequestError` if the template or the request is not usable."""
    template = tokenizer.template
    tool_format = await tool_format_of(template)
    choice = resolve_tool_choice(request, tool_format)
    as_parts = template.exists and await template.reads_parts()
    marks = await reasoning_format_of(tokenizer)
    thinking = await thinking_of(template, request, tool_format is HARMONY or marks is not None)
    size = sum(len(message.text) for message in request.messages)
    is_small = size + len(request.messages) * _MESSAGE_SIZE <= _MAX_INLINE_CHARACTERS
    folding = Folding()
    if template.exists:
        outline_of = partial(Outline.of, request.messages)
        outline = outline_of() if is_small else await tokenizer.run(outline_of, size)
        has_tools, variables = choice is not None, thinking.variables
        trial = TurnTrial(template, tool_format, as_parts, has_tools, request.opens_assistant_turn, variables)
        folding = await trial.folding(outline)
    prepare = partial(_prepare, template, request, tool_format, choice, folding, as_parts, thinking.variables)
    rendering = prepare() if is_small else await tokenizer.run(prepare, size)
    text = await template.write(rendering)
    if request.documents:
        check_documents(request.documents, text)
    if request.continue_final_message:
        text = _cut(text)
    if tool_format is HARMONY:
        thinks = tokenizer.template.parsers.get("reasoning_parser") != "none"
        begun = text.rpartition(TURN)[2] if TURN in text else ""
        return ChatPrompt(text, choice, thinks, False, ignored=thinking.ignored, harmony=begun)
    return ChatPrompt(text, choice, *_reasoning_state(marks, text, request), ignored=thinking.ignored)


def _prepare(
    template: ChatTemplate,
    request: ChatRequest,
    tool_format: ToolFormat,
    choice: RequestTools | None,
    folding: Folding,
    as_parts: bool,
    variables: dict[str, Any],
) -> Rendering:
    tools = choice.for_template() if choice else None
    messages, tools = template_messages(
        request.messages, tools, tool_format, folding, has_developer="developer" in template.source
    )
    if request.continue_final_message:
        messages[-1] = {**messages[-1], "content": messages[-1]["content"] + _CONTINUATION_MARK}
    if as_parts:
        messages = in_parts(messages, request.messages)
    size = _size([messages, tools, request.documents, variables])
    most = 4 * size + _MAX_ADDED
    return template.prepare(
        messages,
        request.opens_assistant_turn,
        most,
        tools=tools,
        tools_variable=tool_format.tools_variable,
        documents=request.documents or None,
        variables=variables,
    )


def _size(value: Any) -> int:
    """Return the approximate number of characters of a JSON value when it is serialized."""
    if isinstance(value, dict):
        return sum(len(name) + 6 + _size(item) for name, item in value.items())
    if isinstance(value, list):
        return sum(2 + _size(item) for item in value)
    return len(value) + 2 if isinstance(value, str) else 5


def _cut(text: str) -> str:
    end = text.rfind(_CONTINUATION_MARK)
    if end < 0:
        message = (
            "This model's chat template does not render the last message unchanged, so that message "
            "cannot be continued."
        )
        raise RequestError(message, "continue_final_message")
    return text[:end]


def _reasoning_state(
    marks: ReasoningFormat | None, text: str, request: ChatRequest
) -> tuple[bool, bool, ReasoningFormat]:
    """Return (the response may begin with reasoning, the prompt ends inside reasoning, the tags around it)."""
    if marks is None:
        return False, False, THINK
    if request.continue_final_message:
        last = request.messages[-1].text
        return not last.strip(), last.rfind(marks.start) > last.rfind(marks.end), marks
    end = text[-_MAX_END:].rstrip()
    return not end.endswith((marks.start.rstrip(), marks.end)), end.endswith(marks.start.rstrip()), marks


def response_grammar(own: Grammar | None, prompt: ChatPrompt, special_ids: SpecialIds) -> Grammar | None:
    """Return the grammar for the response, None if any text is allowed; `own` is the caller's constraint.

    Raises `RequestError` if the constraint cannot be combined with the tools or the reasoning.
    """
    tools = prompt.tool_choice
    if tools is not None and tools.must_call:
        # JSON constraints apply only to the content
        if own is not None and own.kind not in ("json_schema", "json_object"):
            message = f"'{own.param}' cannot be combined with a tool_choice that forces a function call."
            raise RequestError(message, own.param)
        return _whole("calls", tools.call_rules(special_ids), prompt, special_ids, "tools")
    if own is None and tools is not None and tools.is_strict:
        body, rules = tools.format.optional_calls(special_ids)
        return _whole(body, f"{rules}\n{tools.call_rules(special_ids)}", prompt, special_ids, "tools")
    if own is None or not (tools or prompt.may_think or prompt.is_thinking or prompt.harmony is not None):
        return own
    rules = _rule("response", own)
    if prompt.harmony:  # the response continues a message that the prompt contains
        return Grammar("lark", f"start: response\n{rules}", own.param)
    if prompt.harmony is not None:
        rules = f"{_rule('text', own)}\nresponse: {final_head(special_ids)} text"
    if tools is None or not tools.format.is_parsed:
        return _whole("response", rules, prompt, special_ids, own.param)
    return _whole("(response | calls)", f"{rules}\n{tools.call_rules(special_ids)}", prompt, special_ids, own.param)


def _whole(body: str, rules: str, prompt: ChatPrompt, special_ids: SpecialIds, param: str) -> Grammar:
    """Return the grammar of a response `body`, preceded by optional reasoning if the model reasons."""
    if prompt.harmony is not None:
        body, before = after_reasoning(body, special_ids)
        return Grammar("lark", f"start: {body}\n{before}\n{rules}", param)
    if not (prompt.may_think or prompt.is_thinking):
        return Grammar("lark", f"start: {body}\n{rules}", param)
    marks = prompt.reasoning
    if marks.answer is not None:
        start, end = (delimiter(tag, special_ids) for tag in marks.answer_tokens)
        body = f"({start} lines {body} lines {end} | {body})"
    if marks.end in special_ids:  # a special token never occurs in plain text
        reasoning = f"reasoning: REASONING {delimiter(marks.end, special_ids)}\nREASONING: /(?s:.*)/"
    else:
        reasoning = f"reasoning[suffix={literal(marks.end)}]: /(?s:.*)/"
    opening = "" if prompt.is_thinking else f"{delimited(marks.start, marks.tokens, special_ids)} "
    before = f"{opening}reasoning lines" if prompt.is_thinking else f"({opening}reasoning lines)?"
    return Grammar("lark", f"start: {before} {body}\n{reasoning}\nlines: /\\n{{0,2}}/\n{rules}", param)


def _rule(name: str, own: Grammar) -> str:
    """Return the caller's constraint as a rule. Raises `RequestError` if it cannot be part of a larger grammar."""
    if own.kind == "json_schema":
        schema: Any = json.loads(own.text)
        return schema_rule(name, schema if isinstance(schema, dict) else {})
    if own.kind == "json_object":
        return schema_rule(name, {"type": "object"})
    if own.kind == "choice":
        return f"{name}: " + " | ".join(map(literal, json.loads(own.text)))
    if own.kind == "regex":
        return f"{name}: /{pattern_text(own.text)}/"
    message = "A grammar constraint cannot be combined with tools, or with a model that writes reasoning first."
    raise RequestError(message, own.param)
