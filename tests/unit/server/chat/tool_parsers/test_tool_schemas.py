"""Schemas of tools as pydantic and zod write them: calls can be bound to them in every format."""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from oarlock.engine.structured_output.compiler import Compiler
from oarlock.server.chat.prompt import ChatPrompt, response_grammar
from oarlock.server.chat.tool_choice import resolve_tool_choice
from oarlock.server.chat.tool_parsers.registry import FORMATS
from oarlock.server.schemas.chat import ChatRequest
from tests.unit.engine.structured_output.grammar_fakes import DEMO_TOKENIZER


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    friends: list[Cat] = []


class Union(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


PARAMETERS = {
    "a discriminated union": Union.model_json_schema(),
    "a record": {
        "type": "object",
        "properties": {
            "r": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}}
        },
        "required": ["r"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(DEMO_TOKENIZER)


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda tool_format: tool_format.name)
@pytest.mark.parametrize("name", PARAMETERS)
def test_calls_can_be_bound_to_schemas_of_clients(compiler, tool_format, name):
    tools = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS[name]}}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}
    choice = resolve_tool_choice(ChatRequest.model_validate(body), tool_format)
    grammar = response_grammar(None, ChatPrompt("x", choice, False, False), {})
    assert grammar is not None
    compiler.compile(grammar)
