"""The table of model classes is of the installed transformers, complete and enough; its judge finds planted errors."""

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest

from benchmarks.model_classes import table
from benchmarks.model_classes.outcome import OURS, THEIRS
from tests.house.rules import ROOT

LEAST_SERVED, LEAST_ON_TWO_RANKS = 102, 85  # of the causal classes
# Classes that transformers' code computes otherwise than a server needs, which a look must find before weights load.
REFUSED = (
    "Llama4ForCausalLM", "MiniMaxM3VLForCausalLM", "MiniMaxM3SparseForConditionalGeneration", "BartForCausalLM",
    "RobertaForCausalLM", "PaliGemmaForConditionalGeneration", "RwkvForCausalLM", "MambaForCausalLM",
    "FalconMambaForCausalLM", "JambaForCausalLM", "ZambaForCausalLM",
)  # fmt: skip


def test_the_table_is_of_the_installed_transformers():
    recorded, rows = table.read()
    assert recorded == version("transformers"), "run `make model-classes`, then `make model-classes ARGS=--write`"
    assert table.VERDICTS.read_text("utf-8") == table.verdicts(recorded, rows)


def test_enough_classes_are_served_and_the_known_wrong_ones_are_refused():
    _, rows = table.read()
    by_name = {row.name: row for row in rows}
    served = [row for row in rows if row.server is not None]
    assert len(served) >= LEAST_SERVED
    assert sum(row.codes[row.server].ranks > 1 for row in served) >= LEAST_ON_TWO_RANKS
    assert {name: by_name[name].verdict for name in REFUSED if "refused" not in by_name[name].verdict} == {}
    reasons = [row.verdict["refused"] for row in rows if "refused" in row.verdict]
    assert all(reason and "\n" not in reason and len(reason) < 300 for reason in reasons)
    assert [row.name for row in rows if OURS in row.codes and row.server is None] == [], "a page is wrong"


@pytest.mark.slow
def test_the_table_has_every_class_once():
    from benchmarks.model_classes.tiny import model_classes

    assert [row.name for row in table.read()[1]] == [one.name for one in model_classes()]


class _Planted:
    """A model whose steps have wrong positions from the second step on."""

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, batch, *others):
        moved = batch.positions + (batch.positions > 20)
        return self._model(replace(batch, positions=moved), *others)


@pytest.mark.slow
def test_the_judge_finds_positions_that_are_off_by_one():
    from benchmarks.model_classes.judge import judge
    from benchmarks.model_classes.tiny import ModelClass

    row = judge(ModelClass("BioGptForCausalLM", "biogpt"), _Planted)
    assert all("differ" in (run.fault or "") for code in row.codes.values() for run in code.runs.values()), row
    assert row.codes[THEIRS].runs


@pytest.mark.slow
def test_the_judge_finds_a_window_that_is_off_by_one():
    from benchmarks.model_classes.judge import judge
    from benchmarks.model_classes.tiny import ModelClass

    def narrowed(model):
        for layer, spec in getattr(model, "_layers", {}).items():
            model._layers[layer] = replace(spec, sliding_window=spec.sliding_window and spec.sliding_window - 1)
        return model

    row = judge(ModelClass("MinistralForCausalLM", "ministral"), narrowed)
    assert row.codes[OURS].ranks == 2, row
    assert all("differ" in (run.fault or "") for run in row.codes[THEIRS].runs.values()), row


@pytest.mark.soak
def test_a_part_of_the_classes_is_as_in_the_table():
    """Another part of them each day, as in continuous integration at night."""
    command = [sys.executable, "-m", "benchmarks.model_classes", "--shard", "today/12", "--workers", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
