"""The grammar of a chat answer: forced calls, the caller's own constraint, or either; thoughts may come before."""

import json
from typing import Any

from oarlock.engine.errors import RequestError
from oarlock.engine.sampling_params import Grammar
from oarlock.server.chat.prompt import ChatPrompt
from oarlock.server.chat.tool_parsers.grammar import (
    SpecialIds,
    delimited,
    delimiter,
    literal,
    pattern_text,
    schema_rule,
)
from oarlock.server.chat.tool_parsers.harmony import after_thoughts, final_head


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
