"""Schemas of pydantic and zod: each compiles and allows its own values only, or is refused by its keyword."""

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import random
import uuid
from typing import Annotated, Any, Literal, Optional

import jsonschema
import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model

from oarlock.engine.structured_output.compiler import Compiler, GrammarError
from oarlock.engine.structured_output.json_schema import rewritten
from oarlock.engine.structured_output.matcher import GrammarMatcher
from oarlock.engine.types import Grammar
from tests.unit.engine.structured_output.grammar_fakes import DEMO_TOKENIZER, END, allowed, decode, encode, random_walk


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(DEMO_TOKENIZER)


@pytest.fixture
def matcher_of(compiler):
    return lambda schema: GrammarMatcher(compiler, compiler.compile(Grammar("json_schema", json.dumps(schema))), (END,))


def can_write(matcher: GrammarMatcher, value: Any) -> bool:
    """Whether the masks allow `value` as compact JSON."""
    is_over = False
    for token in encode(json.dumps(value, ensure_ascii=False, separators=(",", ":"))):
        if token not in allowed(matcher):
            return False
        is_over = matcher.accept((token,)) or matcher.only_end_is_left()
    return is_over or END in allowed(matcher)


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str
    friend: "Pet | None" = Field(None, description="a recursive union")


class Black(BaseModel):
    kind: Literal["cat"] = "cat"
    colour: Literal["black", "dark"] = "black"


class White(BaseModel):
    kind: Literal["cat"] = "cat"
    colour: Literal["white"] = "white"


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
Coloured = Annotated[Black | White, Field(discriminator="colour")]
Dog.model_rebuild()


class Owner(BaseModel):
    model_config = ConfigDict(extra="forbid")

    pet: Pet
    pets: list[Annotated[Coloured | Dog, Field(discriminator="kind")]] = []


class Tree(BaseModel):
    value: int
    left: Optional["Tree"] = Field(None, description="the smaller ones")
    others: dict[str, "Tree"] = {}


class Colour(enum.Enum):
    RED = "red"
    ONE = 1


class Side(enum.StrEnum):
    LEFT = "left"
    RIGHT = "right"


TYPES: dict[str, Any] = {
    "date": datetime.date,
    "datetime": datetime.datetime,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "uuid": uuid.UUID,
    "uuid4": pydantic.UUID4,
    "decimal": decimal.Decimal,
    "money": Annotated[decimal.Decimal, Field(max_digits=10, decimal_places=2)],
    "enum": Colour,
    "literal": Literal["a", 1, True, None],
    "keys: int": dict[int, str],
    "keys: literal": dict[Literal["a", "b"], int],
    "keys: enum": dict[Side, int],
    "keys: uuid": dict[uuid.UUID, int],
    "keys: date": dict[datetime.date, int],
    "keys: pattern": dict[Annotated[str, Field(pattern="^[a-z]+$")], int],
    "keys: length": dict[Annotated[str, Field(min_length=1, max_length=5)], int],
    "tuple": tuple[int, str],
    "list": Annotated[list[int], Field(min_length=1, max_length=3)],
    "string": Annotated[str, Field(min_length=1, max_length=10, pattern="^a")],
    "multiple": Annotated[int, Field(multiple_of=5)],
    "range": Annotated[float, Field(gt=0, lt=1)],
    "ip": ipaddress.IPv4Address | ipaddress.IPv6Address,
    "any ip": pydantic.IPvAnyAddress,
    "network": ipaddress.IPv4Network,
    "network 6": ipaddress.IPv6Network,
    "interface": ipaddress.IPv4Interface,
    "path": pathlib.Path,
    "bytes": bytes,
    "base64": pydantic.Base64Bytes,
    "secret": pydantic.SecretStr,
    "bytes size": pydantic.ByteSize,
    "json": pydantic.JsonValue,
    "optional": datetime.date | None,
}
PYDANTIC = {name: create_model("Made", x=(kind, ...)).model_json_schema() for name, kind in TYPES.items()}
PYDANTIC |= {model.__name__: model.model_json_schema() for model in (Owner, Tree, Dog)}
PYDANTIC["union at the root"] = TypeAdapter(Pet).json_schema()
PYDANTIC["union without discriminator"] = {**PYDANTIC["union at the root"], "discriminator": None}

_A, _B = {"a": {"type": "string"}}, {"b": {"type": "number"}}
ZOD: dict[str, dict[str, Any]] = {
    "record": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    "record of an enum": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["a", "b"]},
        "additionalProperties": {"type": "number"},
        "required": ["a"],
    },
    "record of a pattern": {"type": "object", "propertyNames": {"type": "string", "pattern": "^[a-z]+$"}},
    "loose record": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
    "email": {
        "type": "string",
        "format": "email",
        "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    },
    "duration": {
        "type": "string",
        "format": "duration",
        "pattern": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
    },
    "time": {"type": "string", "format": "time", "pattern": r"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?$"},
    "cuid": {"type": "string", "format": "cuid", "pattern": r"^[cC][^\s-]{8,}$"},
    "jwt": {"type": "string", "format": "jwt"},
    "password": {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{6,}$"},
    "hostname": {"type": "string", "pattern": r"^(?=.{1,9}\.?$)[a-z]+(?:\.[a-z]+)*\.?$"},
    "float32": {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
    "uint64": {"type": "integer", "minimum": 0, "maximum": 18446744073709551615},
    "never": {"type": "object", "properties": {"a": {"not": {}}, **_B}, "required": ["b"]},
    "strict": {"type": "object", "properties": _A, "unevaluatedProperties": False},
    "intersection": {
        "allOf": [
            {"type": "object", "properties": _A, "required": ["a"]},
            {"type": "object", "properties": _B, "required": ["b"]},
        ],
        "unevaluatedProperties": False,
    },
    "tagged": {
        "oneOf": [
            {"type": "object", "properties": {"t": {"type": "string", "const": "a"}, **_A}, "required": ["t"]},
            {"type": "object", "properties": {"t": {"type": "string", "const": "b"}, **_B}, "required": ["t"]},
            {"type": "null"},
        ]
    },
    "set of one": {"type": "array", "items": {"type": "integer"}, "maxItems": 1, "uniqueItems": True},
    "integer of OpenAPI": {"type": ["integer", "null"], "format": "int64"},
    "text of OpenAPI": {"type": "string", "format": "password"},
}
SCHEMAS = {**PYDANTIC, **{f"zod: {name}": schema for name, schema in ZOD.items()}}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_of_clients_compile_and_allow_only_their_own_values(matcher_of, name):
    schema, validator = SCHEMAS[name], jsonschema.Draft202012Validator(SCHEMAS[name])
    matcher = matcher_of(schema)
    for seed in range(4):
        ids, is_over = random_walk(matcher, random.Random(seed), most=80)
        if is_over:
            validator.validate(json.loads(decode(ids)))
        matcher = matcher_of(schema)


WRITTEN: list[tuple[str, list[Any], list[Any]]] = [
    ("union at the root", [{"kind": "cat"}, {"kind": "dog", "name": "x"}], [{}, {"lives": 1}, {"kind": "cow"}]),
    ("union without discriminator", [{"kind": "cat", "lives": 1}], [{"lives": 1}, {"kind": "dog"}]),
    (
        "Owner",
        [
            {"pet": {"kind": "dog", "name": "x", "friend": {"kind": "cat"}}},
            {"pet": {"kind": "cat"}, "pets": [{"kind": "cat", "colour": "dark"}, {"kind": "dog", "name": "y"}]},
        ],
        [{"pet": {"lives": 1}}, {"pet": {"kind": "cat"}, "pets": [{"kind": "cat"}]}, {"pet": {"name": "x"}}],
    ),
    ("Tree", [{"value": 1, "left": {"value": 2}, "others": {"a": {"value": 3}}}], [{"left": None}]),
    ("uuid4", [{"x": "0e8df1a6-6a4f-4f9a-9c7e-1f2d3c4b5a69"}], [{"x": "0e8df1a6-6a4f-1f9a-9c7e-1f2d3c4b5a69"}]),
    ("keys: enum", [{"x": {}}, {"x": {"left": 1, "right": 2}}], [{"x": {"up": 1}}]),
    ("keys: length", [{"x": {"ab": 1, "c": 2}}], [{"x": {"": 1}}, {"x": {"abcdef": 1}}]),
    ("keys: date", [{"x": {"2024-02-28": 1}}], [{"x": {"2024-02-30": 1}}]),
    ("keys: uuid", [{"x": {"0e8df1a6-6a4f-4f9a-9c7e-1f2d3c4b5a69": 1}}], [{"x": {"a": 1}}]),
    ("network", [{"x": "10.0.0.0/8"}, {"x": "10.1.2.3/32"}], [{"x": "10.0.0.1/8"}]),
    ("network 6", [{"x": "2001:db8::/32"}], [{"x": "2001:db8::/16"}]),
    ("base64", [{"x": "aGk="}], [{"x": "aGk"}]),
    ("secret", [{"x": "any"}], [{"x": 1}]),
    ("zod: record", [{}, {"any name": 1.5}], [{"a": "b"}]),
    ("zod: record of an enum", [{"a": 1}, {"a": 1, "b": 2}], [{}, {"a": 1, "c": 2}]),
    ("zod: record of a pattern", [{"ab": [1]}], [{"A": 1}]),
    ("zod: email", ["a.b+c@d-e.org"], [".a@b.org", "a..b@c.org", "a.@b.org", "a@b"]),
    ("zod: duration", ["P1DT2H", "P3W", "PT0.5S"], ["P", "P1", "P1DT"]),
    ("zod: time", ["10:15", "10:15:30.5"], ["25:00", "10:15Z"]),
    ("zod: password", ["abcD3e"], ["abcdef", "abcDef", "aB3"]),
    ("zod: hostname", ["ab.cd"], ["abcdefgh.ijk"]),
    ("zod: float32", [1.5, -3], ["1"]),
    ("zod: never", [{"b": 1}], [{"a": 1, "b": 1}]),
    ("zod: strict", [{"a": "x"}, {}], [{"b": 1}]),
    ("zod: intersection", [{"a": "x", "b": 1}], [{"a": "x"}, {"a": "x", "b": 1, "c": 1}]),
    ("zod: tagged", [{"t": "a"}, {"t": "b", "b": 1}, None], [{"a": "x"}]),
]


@pytest.mark.parametrize(("name", "good", "bad"), WRITTEN, ids=[name for name, _, _ in WRITTEN])
def test_rewritten_schemas_allow_their_intended_values(matcher_of, name, good, bad):
    for value in good:
        jsonschema.validate(value, SCHEMAS[name])
    assert [value for value in (*good, *bad) if can_write(matcher_of(SCHEMAS[name]), value)] == good


REFUSED = [
    ({"type": "array", "uniqueItems": True}, "the schema has 'uniqueItems', which cannot be enforced"),
    (create_model("Made", x=(set[int], ...)).model_json_schema(), "the schema at properties.x has 'uniqueItems'"),
    ({"properties": {"a": {"not": {"type": "string"}}}}, "the schema at properties.a has 'not'"),
    ({"type": "object", "if": {}, "then": {}}, "has 'if', which cannot be enforced during generation; use anyOf"),
    ({"type": "array", "contains": {"type": "string"}}, "has 'contains'"),
    ({"dependentRequired": {"a": ["b"]}, "type": "object"}, "has 'dependentRequired'"),
    ({"type": "object", "propertyNames": {"type": "number"}}, "has 'propertyNames'"),
    ({"type": "object", "propertyNames": {"pattern": "a", "maxLength": 3}}, "give one expression"),
    ({"anyOf": [{"oneOf": [{"type": "integer"}, {"type": "number"}]}]}, "at anyOf[0] has a oneOf whose branches may"),
    ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "a oneOf whose branches may both match; use anyOf"),
    ({"items": {"format": "regex", "type": "string"}}, "at items has the unknown format 'regex'"),
    ({"properties": {"a": {"type": "string", "pattern": "a(?!b)"}}}, "at properties.a has a pattern with look-around"),
    ({"type": "string", "pattern": "^(?=a)b|c$"}, "look-around"),
    ({"not": {}}, "no value matches the schema"),
    ({"type": [{}], "oneOf": [5]}, "type"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_keywords_that_cannot_be_enforced_are_refused_with_their_place(compiler, schema, reason):
    with pytest.raises(GrammarError) as refusal:
        compiler.compile(Grammar("json_schema", json.dumps(schema)))
    assert reason in str(refusal.value) and len(str(refusal.value)) < 320


def test_schemas_inside_a_grammar_are_rewritten_too(compiler):
    union = json.dumps(PYDANTIC["union at the root"])
    text = f'start: "%json {{" /\\/%json \\{{/ value // %json {{"oneOf": []}}\nvalue: %json {union}'
    matcher = GrammarMatcher(compiler, compiler.compile(Grammar("lark", text)), (END,))
    assert all(
        token in allowed(matcher) and matcher.accept((token,)) is not None for token in encode("%json {/%json {")
    )
    assert can_write(matcher, {"kind": "cat"})
    with pytest.raises(GrammarError, match="has 'uniqueItems'"):
        compiler.compile(Grammar("lark", 'start: %json {"type": "array", "uniqueItems": true}'))


def test_a_schema_of_known_keywords_stays_as_it_is():
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"enum": [1, {"not": {}}]}}}
    assert rewritten(schema) == schema
