"""Processor time of masks: the bound of one, of those of a step, and of a client; and panics of the library."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from oarlock.engine.errors import BrokenGrammarError, MaskPostponedError
from oarlock.engine.structured_output import matcher
from oarlock.engine.structured_output.compiler import Compiler, GrammarError
from oarlock.engine.structured_output.mask_costs import FAST_S, PER_TOKEN_S, RESERVE_S, MaskCosts
from oarlock.engine.structured_output.matcher import GrammarMatcher, MaskBatch
from oarlock.engine.types import Grammar
from tests.unit.engine.structured_output.grammar_fakes import DEMO_TOKENIZER, END, NUM_IDS, allowed, encode

AMBIGUOUS = "start: s\ns: s s | /./ | "
HOSTILE = [
    Grammar("lark", AMBIGUOUS),
    Grammar("lark", "start: s\ns: s s s | s s | /./ | "),
    Grammar("ebnf", 'root ::= s\ns ::= s s | . | ""'),
    Grammar("lark", "start: a\na: b a | b\nb: c b | c\nc: a c | /[a-z ]/ | "),
    Grammar("regex", "(.*a.{40}b)*(.*c.{30}d)*"),
    Grammar("json_schema", json.dumps({"type": "array", "items": {"pattern": "^(.*a.{40}b)*(.*c.{30}d)*$"}})),
]
HONEST = [
    Grammar("ebnf", "root ::= line+\nline ::= [a-zA-Z ,.;:!?0-9]+ [\\n]"),
    Grammar(
        "ebnf", "root ::= " + " | ".join(f'"choice {n} of many" " " tail' for n in range(400)) + "\ntail ::= [a-z]+"
    ),
    Grammar("lark", "start: " + " | ".join(f'"tool{n}" /[a-z]+/ ";"' for n in range(500))),
]


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(DEMO_TOKENIZER)


def rows_of(compiler: Compiler, grammar: Grammar, count: int, text: str = ""):
    compiled, batch = compiler.compile(grammar), []
    for _ in range(count):
        one = GrammarMatcher(compiler, compiled, (END,))
        for token in encode(text):
            one.accept((token,))
        batch.append((one, (), np.empty((1, NUM_IDS // 32), np.uint32)))
    return batch


@pytest.mark.slow
@pytest.mark.parametrize("grammar", HOSTILE, ids=lambda grammar: grammar.kind)
def test_no_token_of_a_hostile_grammar_takes_long(compiler: Compiler, grammar: Grammar) -> None:
    """The longest took over two seconds. It ends by an error, or goes on in short masks."""
    one, most_s = rows_of(compiler, grammar, 1)[0][0], 0.0
    draw = np.random.default_rng(1)
    try:
        for _ in range(60):
            begun_s = time.thread_time()
            ids = sorted(allowed(one) - {END})
            if not ids or one.accept((int(draw.choice(ids)),)):
                break
            most_s = max(most_s, time.thread_time() - begun_s)
    except BrokenGrammarError as error:
        assert "\n" not in str(error)
    assert most_s < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("grammar", HONEST, ids=["prose", "alternatives", "tools"])
def test_grammars_of_many_characters_or_alternatives_are_within_the_limits(compiler: Compiler, grammar) -> None:
    one, draw = rows_of(compiler, grammar, 1)[0][0], np.random.default_rng(1)
    for _ in range(30):
        ids = sorted(allowed(one) - {END})
        if not ids or one.accept((int(draw.choice(ids)),)):
            break


@pytest.mark.parametrize("num_grammars", [1, 3])
def test_the_masks_of_one_step_are_postponed_when_its_time_is_over(
    compiler: Compiler, monkeypatch, num_grammars
) -> None:
    batch = [row for _ in range(num_grammars) for row in rows_of(compiler, Grammar("lark", AMBIGUOUS), 6)]
    monkeypatch.setattr(matcher, "STEP_S", 0.01)
    fill = GrammarMatcher.finish_masks

    def slow(self, *arguments):
        until_s = time.thread_time() + 0.02
        while time.thread_time() < until_s:
            pass
        return fill(self, *arguments)

    monkeypatch.setattr(GrammarMatcher, "finish_masks", slow)
    found = MaskBatch().fill_masks(batch)
    postponed = [isinstance(result, MaskPostponedError) for result in found]
    assert not postponed[0] and postponed[-1] and found.count(None) + sum(postponed) == len(batch)
    assert all(row[0].expected_s > FAST_S for row, late in zip(batch, postponed, strict=True) if not late)
    # The next step measures each by itself, and begins with at least one.
    found = MaskBatch().fill_masks(batch)
    assert None in found and any(isinstance(result, MaskPostponedError) for result in found)


def test_tokens_of_a_slow_grammar_are_consumed_with_the_next_mask(compiler: Compiler, monkeypatch) -> None:
    grammar = Grammar("lark", 'start: "yes" | "yesterday"')
    fast, late = (rows_of(compiler, grammar, 1)[0][0] for _ in range(2))
    late.note_slow(1.0)
    for token in encode("yes"):
        fast.accept((token,))
        assert late.accept((token,)) is False
    assert allowed(fast) == allowed(late)
    late.note_slow(1.0)
    ids = encode("terday")
    for token in ids:
        late.accept((token,))
    with pytest.raises(MaskPostponedError):
        late.fill_within(0.0, (), np.empty((1, NUM_IDS // 32), np.uint32))
    assert late.only_end_is_left(), "as long as it may take"


def test_a_client_pays_for_its_masks_with_one_grammar() -> None:
    costs = MaskCosts()
    for _ in range(round(RESERVE_S / PER_TOKEN_S) - 1):
        costs.charge(2 * PER_TOKEN_S, "greedy")
    with pytest.raises(BrokenGrammarError, match="50 ms per token"):
        for _ in range(2):
            costs.charge(2 * PER_TOKEN_S, "greedy")
    for _ in range(1000):
        costs.charge(0.9 * PER_TOKEN_S, "another")
        costs.charge(FAST_S / 2, "greedy")


def test_a_grammar_is_slow_by_processor_time_and_expected_by_the_clock() -> None:
    costs = MaskCosts()
    for _ in range(20):
        costs.expect(0.0001, 0.1)
    assert costs.expected_s == 0.0, "others had the processor"
    costs.expect(0.03, 0.06)
    assert 0.06 <= costs.expected_s < 0.1
    for _ in range(30):
        costs.expect(0.0001, 0.0001)
    assert costs.expected_s == 0.0


class PanicException(BaseException):
    """The class of the same name that PyO3 raises."""


def panic(*_):
    raise PanicException("called `Option::unwrap()` on a `None` value")


@pytest.mark.parametrize("method", ["consume_tokens", "unsafe_compute_mask_ptr", "is_error"])
def test_a_panic_of_the_library_fails_its_request_alone(compiler: Compiler, method: str) -> None:
    batch = rows_of(compiler, Grammar("regex", "[a-z]+"), 3)
    broken = batch[1][0]
    real = broken.matcher
    names = ("consume_tokens", "unsafe_compute_mask_ptr", "is_error", "is_stopped", "get_error")
    fake = SimpleNamespace(**{name: getattr(real, name) for name in names})
    setattr(fake, method, panic)
    broken.matcher = fake
    if method == "consume_tokens":
        with pytest.raises(BrokenGrammarError, match="unwrap"):
            broken.accept(encode("a"))
    else:
        found = MaskBatch().fill_masks(batch)
        assert found[0] is found[2] is None and isinstance(found[1], BrokenGrammarError)


def test_a_panic_of_the_parallel_library_call_fails_only_the_grammar_that_causes_it(compiler, monkeypatch) -> None:
    batch = [rows_of(compiler, Grammar("regex", f"[a-z]+{number}"), 1)[0] for number in range(3)]
    masks = MaskBatch()
    monkeypatch.setattr(masks, "_computed", panic)
    assert masks.fill_masks(batch) == [None, None, None]


def test_a_panic_while_compiling_is_a_refusal(compiler: Compiler, monkeypatch) -> None:
    monkeypatch.setattr(compiler, "matcher", panic)
    with pytest.raises(GrammarError, match="unwrap"):
        compiler.compile(Grammar("regex", "a"))
