"""Grammars against their definition: what a mask allows at each token, when a text is complete, what is refused."""

import json
import math
import random

import jsonschema
import numpy as np
import pytest

from oarlock.engine.errors import BrokenGrammarError
from oarlock.engine.structured_output import mask_costs
from oarlock.engine.structured_output.compiler import MAX_OBJECT_DEPTH, Compiler, GrammarError
from oarlock.engine.structured_output.matcher import MAX_DIGITS, GrammarMatcher
from oarlock.engine.types import Grammar
from tests.unit.engine.structured_output.grammar_fakes import (
    DEMO_TOKENIZER,
    END,
    NUM_IDS,
    allowed,
    decode,
    encode,
    random_walk,
)


@pytest.fixture(autouse=True)
def _all_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every grammar for a fast one, however busy the machine is: a slow one consumes its tokens later."""
    monkeypatch.setattr(mask_costs, "FAST_S", math.inf)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(DEMO_TOKENIZER)


@pytest.fixture
def matcher_for(compiler):
    return lambda grammar, end_ids=(END,): GrammarMatcher(compiler, compiler.compile(grammar), end_ids)


def schema(value) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


GRAMMARS = [
    (Grammar("choice", '["yes","no","yes, but"]'), ["yes", "no", "yes, but"], ["ye", "yesno", "maybe", ""]),
    (
        Grammar("choice", r'["a\"b","x\ny","ü😀","back\\slash","/re/"]'),
        ['a"b', "x\ny", "ü😀", "back\\slash", "/re/"],
        ["a"],
    ),
    (Grammar("regex", r"[A-Z][a-z]+ \d{3}"), ["Abc 123"], ["abc 123", "Abc 12", "Abc 1234"]),
    (Grammar("regex", r"^(a|b)$"), ["a", "b"], ["ab", "c"]),
    (Grammar("lark", 'start: "<" name ">"\nname: /[a-z]+/'), ["<abc>"], ["<>", "abc", "<abc"]),
    (Grammar("ebnf", 'root ::= "yes" | "no" [0-9]+'), ["yes", "no12"], ["no", "yes1"]),
    (Grammar("lark", 'start: "f(" args ")"\nargs: %json {"type": "integer"}'), ["f(12)"], ["f()", "f(a)"]),
    (Grammar("json_object", ""), ["{}", '{"a":[1,{"b":null}],"c":-1.5}'], ["[]", '{"a": 1}', "{}\n", '{"a":1,}', ""]),
    (schema({"type": "array", "items": {"type": "boolean"}, "minItems": 1}), ["[true,false]"], ["[]", "[true, false]"]),
    (schema({}), ['"x"', "1", "{}", "[1]"], ["x", " 1"]),
    (
        schema(
            {"properties": {"b": {"type": "integer"}, "a": {"enum": ["x"]}}, "required": ["b", "a"], "type": "object"}
        ),
        ['{"b":1,"a":"x"}'],
        ['{"a":"x","b":1}', '{"b":1}', '{"b":1,"a":"y"}', '{"b":01,"a":"x"}'],
    ),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), GRAMMARS)
def test_texts_that_match_can_be_written_and_no_others(matcher_for, grammar, good, bad):
    for text in [*good, *bad]:
        matcher, fits = matcher_for(grammar), True
        for token in encode(text):
            if token not in allowed(matcher):
                fits = False
                break
            is_over = matcher.accept((token,)) or matcher.only_end_is_left()
        else:
            fits = is_over or END in allowed(matcher) if text else END in allowed(matcher)
        assert fits == (text in good), text


SCHEMAS = [
    {
        "type": "object",
        "properties": {"n": {"type": "number"}, "s": {"type": "string", "maxLength": 8}},
        "required": ["n"],
    },
    {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "maxItems": 4},
    {
        "$defs": {"node": {"type": "object", "properties": {"v": {"const": 1}, "next": {"$ref": "#/$defs/node"}}}},
        "$ref": "#/$defs/node",
    },
    {"type": "string", "pattern": "^[a-c]{2,5}$"},
    {"enum": ["a", 1, None, {"k": [True]}]},
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": 3, "maximum": 17}, "maxProperties": 3},
]


@pytest.mark.parametrize("wanted", SCHEMAS)
def test_whatever_is_drawn_from_the_masks_matches_the_schema(matcher_for, wanted):
    finished = 0
    for seed in range(12):
        matcher = matcher_for(schema(wanted))
        ids, is_over = random_walk(matcher, random.Random(seed), most=120)
        if is_over:
            finished += 1
            jsonschema.validate(json.loads(decode(ids)), wanted)
    assert finished >= 4


def test_numbers_come_to_an_end(matcher_for):
    """A model that always prefers digits and exponents still ends the number."""
    for wanted, text in ((({"type": "number"}), "["), ({"type": "integer"}, "[")):
        matcher = matcher_for(schema({"type": "array", "items": wanted, "minItems": 1, "maxItems": 1}))
        matcher.accept(encode(text))
        written, is_over = "", False
        while not is_over:
            ids = allowed(matcher)
            token = max(ids, key=lambda i: (decode([i])[:1] in tuple("0123456789"), decode([i])[:1] in ("e", "E"), -i))
            written += decode([token])
            is_over = matcher.accept((token,)) or matcher.only_end_is_left()
            assert len(written) < 3 * MAX_DIGITS
        assert "e" not in written.lower() and abs(json.loads("[" + written)[0]) < 1e30


def test_digits_in_strings_are_not_counted(matcher_for):
    matcher = matcher_for(schema({"type": "string"}))
    matcher.accept(encode('"' + "1" * 60))
    assert encode("1")[0] in allowed(matcher)


def test_digits_that_the_schema_requires_are_not_bounded(matcher_for):
    matcher, written = matcher_for(schema({"const": 10**28})), 0
    while END not in (ids := allowed(matcher)):
        (token,) = ids
        written += len(decode([token]))
        if matcher.accept((token,)):
            break
    assert written == 29 > MAX_DIGITS


def test_an_object_is_not_nested_without_end(matcher_for):
    matcher = matcher_for(Grammar("json_object", ""))
    matcher.accept(encode('{"a":' + "[" * (MAX_OBJECT_DEPTH - 1)))
    assert encode("[")[0] not in allowed(matcher) and encode("1")[0] in allowed(matcher)


def test_ends_match_the_sequence(matcher_for):
    assert allowed(matcher_for(Grammar("regex", "a*"), (7, 9))) >= {7, 9}
    assert END not in allowed(matcher_for(Grammar("regex", "a*"), (7, 9)))
    matcher = matcher_for(Grammar("regex", "a{2}"), ())
    a = encode("a")[0]
    assert not matcher.accept((a,)) and END not in allowed(matcher)
    assert matcher.accept((a,)), "it ends although nothing may end it"
    late = matcher_for(Grammar("regex", "a(b|(?:))"), ())
    assert not late.accept((a,)), "more may follow, so it goes on"


def test_a_sequence_ends_without_an_end_token_if_its_grammar_allows_only_the_end(matcher_for):
    """A bare number ends at its last digit, whether or not the caller lets it end sooner."""
    for end_ids in ((), (END,)):
        matcher = matcher_for(schema({"type": "integer"}), end_ids)
        mask = np.empty((1, NUM_IDS // 32), np.uint32)
        for token in encode("7" * MAX_DIGITS):
            assert matcher.fill_masks((), mask) is None and not matcher.only_end_is_left()
            assert not matcher.accept((token,)), "that shows with the next mask"
        assert matcher.fill_masks((), mask) == 0 and matcher.only_end_is_left()


def test_masks_are_written_again_the_same_and_fill_every_word(matcher_for):
    matcher = matcher_for(Grammar("json_object", ""))
    for num_words in (NUM_IDS // 32, NUM_IDS // 32 + 9):
        masks = [np.full((1, num_words), fill, np.uint32) for fill in (0, 0xFFFFFFFF)]
        for mask in masks:
            matcher.fill_masks((), mask)
        assert (masks[0] == masks[1]).all() and masks[0].any()
        assert not masks[0][:, NUM_IDS // 32 :].any(), "ids beyond the tokenizer's are never allowed"
    small = np.full((1, 10), 0xFFFFFFFF, np.uint32)
    matcher.fill_masks((), small)
    assert (small == masks[0][:, :10]).all()


def test_a_token_that_is_not_allowed_breaks_the_state(matcher_for):
    matcher = matcher_for(Grammar("choice", '["yes"]'))
    with pytest.raises(BrokenGrammarError):
        matcher.accept(encode("no"))


def test_a_full_cache_is_renewed_for_all_that_share_it(compiler):
    """This expression needs hundreds of states for every token: later sequences must not find the cache full."""
    compiled = compiler.compile(Grammar("regex", "[a-z ]*a[a-z ]{200}"))
    first = compiled.matcher
    matchers = [GrammarMatcher(compiler, compiled, ()) for _ in range(3)]
    for seed, matcher in enumerate(matchers):
        ids, _ = random_walk(matcher, random.Random(seed), most=200)
        assert len(ids) == 200
    assert compiled.matcher is not first, "the case is too small to fill it"
    assert len(allowed(GrammarMatcher(compiler, compiled, (END,)))) > 100


REFUSED = [
    (Grammar("regex", "((("), "unclosed group"),
    (Grammar("regex", r"(a)\1"), "backreferences"),
    (Grammar("regex", "a{0}"), "no text matches it, or only the empty text"),
    (schema({"type": "foo"}), "the schema has the type 'foo'; use string"),
    (
        schema({"properties": {"a": {"type": "array", "items": {"anyOf": [{}, {"type": ["null", "text"]}]}}}}),
        "the schema at properties.a.items.anyOf[1] has the type 'text'",
    ),
    (schema({"$ref": "#"}), "no text"),
    (schema({"$ref": "http://127.0.0.1/x"}), "not present"),
    (schema({"minimum": 3, "maximum": 2, "type": "integer"}), "minimum"),
    (schema({"not": {"type": "string"}}), "not"),
    (Grammar("json_schema", "{"), ""),
    (Grammar("lark", 'begin: "a"'), "start"),
    (Grammar("lark", "start: " + "(" * 5000), "nested"),
    (Grammar("ebnf", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000), "recursion"),
    (Grammar("choice", "[]"), ""),
    (Grammar("poem", "a"), "poem"),
]


@pytest.mark.parametrize(("grammar", "reason"), REFUSED)
def test_a_bad_grammar_is_refused_with_one_short_line(compiler, grammar, reason):
    with pytest.raises(GrammarError) as refusal:
        compiler.compile(grammar)
    text = str(refusal.value)
    assert reason in text and text and "\n" not in text and len(text) < 320


def test_a_tokenizer_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in ("tokenizer.json", "missing.json"):
        with pytest.raises(ValueError):
            Compiler(tmp_path / name)


def test_a_tokenizer_file_cannot_name_another(tmp_path):
    (tmp_path / "tokenizer.json").write_text(str(DEMO_TOKENIZER))
    with pytest.raises(ValueError, match="is not a JSON object"):
        Compiler(tmp_path / "tokenizer.json")
