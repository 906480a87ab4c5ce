"""Pieces of a choice's text, token by token."""

import pytest

from oarlock.engine.types import Request, SamplingParams, TokenEvent
from oarlock.server.llm.detokenizer import StopStrings
from oarlock.server.llm.output_processor import ChoiceOutput


class Letters:
    """A tokenizer, and its detokenizer, whose ids are characters."""

    def detokenizer(self, *_):
        return self

    def push(self, ids):
        return "".join(map(chr, ids))

    def flush(self):
        return ""


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, "x"), (2, "xx"), (3, "xxx")])
def test_a_stop_string_ends_the_first_token_after_min_tokens(min_tokens, text):
    request = Request(1, (5,), SamplingParams(max_tokens=9, min_tokens=min_tokens))
    choice = ChoiceOutput(0, request, Letters(), StopStrings(["x"]))
    delta = choice.push(TokenEvent(1, tuple(map(ord, "xxxxx"))))
    assert (delta.text, delta.num_tokens, delta.finish_reason, delta.stop_reason) == (text, min_tokens + 1, "stop", "x")
