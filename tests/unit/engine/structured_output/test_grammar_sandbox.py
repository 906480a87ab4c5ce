"""Time limit for a trial of a grammar: processor time counts, and not the time for which others have the processor."""

import time
from pathlib import Path

import pytest

from oarlock.engine.structured_output import sandbox
from oarlock.engine.types import Grammar


class Waiting:
    def compile(self, grammar: Grammar) -> None:
        time.sleep(1.5 * sandbox.DEADLINE_S)


class Endless:
    def compile(self, grammar: Grammar) -> None:
        while True:
            pass


def problem_with(compiler: object) -> str | None:
    trial = sandbox._try(compiler, Grammar("regex", "a"), lambda: None)  # type: ignore[arg-type]
    assert not trial.is_lost
    return trial.problem


@pytest.mark.slow
def test_a_trial_that_waits_for_the_processor_is_not_refused():
    assert problem_with(Waiting()) is None


@pytest.mark.slow
def test_a_trial_that_computes_for_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(sandbox, "_PATIENCE_S", 3600.0)  # so that nothing else ends it
    assert problem_with(Endless()) == sandbox.TOO_LONG


class EndlessAtFirst(Endless):
    def __init__(self, tried: Path) -> None:
        self.tried = tried

    def compile(self, grammar: Grammar) -> None:
        if not self.tried.exists():
            self.tried.touch()
            super().compile(grammar)


@pytest.mark.slow
def test_a_grammar_that_took_too_long_once_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "DEADLINE_S", 0.2)
    grammar = Grammar("regex", "a")
    for compiler, problem in ((EndlessAtFirst(tmp_path / "tried"), None), (Endless(), sandbox.TOO_LONG)):
        assert sandbox._check(compiler, grammar, lambda: None).problem == problem  # type: ignore[arg-type]
