"""EBNF against its definition: the texts that each construct allows, and the constructs that are refused by name."""

import pytest

from oarlock.engine.structured_output.compiler import Compiler, GrammarError
from oarlock.engine.structured_output.matcher import GrammarMatcher
from oarlock.engine.types import Grammar
from tests.unit.engine.structured_output.grammar_fakes import DEMO_TOKENIZER, END, allowed, encode


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(DEMO_TOKENIZER)


def can_write(compiler: Compiler, grammar: str, text: str) -> bool:
    """Whether the masks allow each token of `text`, and its end after it."""
    matcher = GrammarMatcher(compiler, compiler.compile(Grammar("ebnf", grammar)), (END,))
    is_over = False
    for token in encode(text):
        if token not in allowed(matcher):
            return False
        is_over = matcher.accept((token,)) or matcher.only_end_is_left()
    return is_over or END in allowed(matcher)


JSON = r"""
# Of llama.cpp's page about grammars, in its layout: bodies of several lines, comments, nested groups.
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4})
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""

GRAMMARS = [
    ('root ::= "yes" | "no" [0-9]+', ["yes", "no1", "no12"], ["no", "yes1"]),
    # A rule that ends where another begins: no rule takes more than leaves the rest possible.
    ('root ::= name "b"\nname ::= [a-z]+', ["ab", "aab", "bb"], ["b", "a"]),
    ('root ::= "a" "b" "d" | "ab" "c"', ["abd", "abc"], ["ab", "abdc"]),
    ('root ::= "true" | [a-z]+ "x"', ["true", "trux", "truex"], ["tru"]),
    ('root ::= [a-z]+ "=" | "ab" "c"', ["ab=", "abc", "abc="], ["ab"]),
    ('root ::= line line\nline ::= [a-z]* "\\n"?', ["ab\ncd", "abcd", "ab\ncd\n"], ["1"]),
    # Layout.
    ('root ::= "a"\n  | "b"\n# more\n  | other\nother\n ::= "c"', ["a", "b", "c"], ["d"]),
    ('root ::= ("a"\n"b")', ["ab"], ["a"]),
    ('root ::= a-b a_b A.b\na-b ::= "1"\na_b ::= "2"\nA.b ::= "3"', ["123"], ["12"]),
    ('root ::= start\nstart ::= "a"', ["a"], []),
    ('root ::= "#" [#] # not this', ["##"], ["#"]),
    # Repetition.
    ('root ::= "ab"{2} [c]{1,2} ("d"){0} "e"{2,}', ["ababcee", "ababcceee"], ["abcee", "ababce", "ababcdee"]),
    ('root ::= ("a"+)+ "b"? ( )', ["a", "aab"], ["b"]),
    ('root ::= "" | "+" | "-"', ["+", "-"], ["+-"]),
    ('root ::= sum\nsum ::= sum "+" digit | digit\ndigit ::= [0-9]', ["1", "1+2+3"], ["1+"]),
    # Characters.
    (r'root ::= "\x41\u00fc\U0001F600\n\t\"\\\/" "." [.]', ['Aü😀\n\t"\\/..'], []),
    (r"root ::= [\x30-\x39] [\u0041-\u0043] [-+*/] [+\-*] [a-] [\]\[^]", ["0A/-a]", "9C-*-^"], ["aA/-a]", "0A/,a]"]),
    ("root ::= [^a-c\\n] [^] .", ["d\n\n", "zab"], ["aab", "\nab"]),
    (JSON, ['{}', '{"a": [1, -2.5, {"b": "c\\u00fcd"}], "e":null}', "{ }\n  "], ["[]", "{,}", '{"a"}', '{"a": 01}']),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "good", "bad"), GRAMMARS)
def test_texts_of_the_grammar_can_be_written_and_no_others(compiler, grammar, good, bad):
    assert [text for text in (*good, *bad) if can_write(compiler, grammar, text)] == good


REFUSED = [
    ('begin ::= "a"', "no rule 'root'"),
    ("root ::= foo", "line 1, column 10: the rule 'foo' is not defined"),
    ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule 'root' is defined twice"),
    ('root ::= "a', "line 1, column 10: cannot read"),
    ('root ::= ("a"', "not closed"),
    ('root ::= "a")', "expected the name of a rule"),
    ('root ::= "a" ::= "b"', "line 1, column 14"),
    ('start: "a"', "cannot read"),
    ("root ::=", "only the empty text"),
    ('root ::= "a"++', "two operators"),
    ('root ::= "a"{,3}', "cannot read"),
    ('root ::= "a"{3,2}', "a maximum of 2, below its minimum of 3"),
    ('root ::= "a"{1000000}', "more than 100000 repetitions"),
    ("root ::= []", "matches nothing"),
    ("root ::= [z-a]", "ends before it begins"),
    (r"root ::= [\d]", r"the escape \d is not supported; write out"),
    (r'root ::= "\x4"', "needs 2 hexadecimal digits"),
    (r'root ::= "\x41F"', r"ambiguous; write \u0041"),
    (r'root ::= "\uD800"', "is not a character"),
    ('root ::= TagDispatch(("<a>", b))\nb ::= "c"', "TagDispatch is not supported"),
    ("root ::= Token(5)", "Token is not supported"),
    ("root ::= <[1000]>", "write its text in quotes"),
    ("root ::= !<think>", "write its text in quotes"),
    ('root ::= "a" (= "b")', "look-ahead"),
    ('root[temperature=0.7] ::= "a"', "rule option [temperature=0.7]"),
    ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "recursion"),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_constructs_that_cannot_be_translated_are_refused_by_name(compiler, grammar, reason):
    with pytest.raises(GrammarError) as refusal:
        compiler.compile(Grammar("ebnf", grammar))
    text = str(refusal.value)
    assert reason in text and "\n" not in text and len(text) < 320
