"""Judges one class: each code serves its tiny model on one and two ranks, and is compared with the class's own results.

The same text is given as a whole, as a whole beside other sequences, in chunks beside others, and token by token. All
of them must be as exact as twice transformers' own error. Whether the bits of the first two are equal is recorded:
pages guarantee it, and classes whose own code multiplies matrices do not.
"""

import math
import random
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.model_classes.outcome import OURS, SIZES, THEIRS, Code, Row, Run
from benchmarks.model_classes.reference import LARGEST_OWN_ERROR, Truth, truth
from benchmarks.model_classes.serving import Refusal, looked_at, open_described, open_transformers
from benchmarks.model_classes.tiny import ModelClass, tiny_config, tiny_model
from oarlock.base.errors import StartupError
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.models.rank_model import RankModel
from tests.golden.paged_run import PagedRun, on_ranks

LENGTH = 40  # tokens: more than any window of the tiny models, and not a multiple of a block
_FIRST_ID, _LAST_ID = 3, 299  # tokens of the text; others may be special
_CUTS = {
    "in chunks": [7, 8, 20, 24, 31, LENGTH],
    "token by token": list(range(1, LENGTH + 1)),
}
_SEED = 7

Open = Callable[[Path, TensorParallel], RankModel]
Plant = Callable[[RankModel], RankModel]


def judge(one: ModelClass, plant: Plant = lambda model: model) -> Row:
    """Return the row of a class. `plant` may replace each model that was opened by a wrong one."""
    try:
        model = tiny_model(one, tiny_config(one), _SEED)
    except Exception as error:  # the classes' own code, which may raise anything
        return Row(one.name, one.model_type, {THEIRS: Code(f"no small model of it can be built ({_line(error)})")})
    with tempfile.TemporaryDirectory(prefix="oarlock-classes-") as folder:
        model.save_pretrained(folder)
        judged = _Judged(Path(folder), model)
        codes = {name: judged.code(open_model, plant) for name, open_model in _CODES.items()}
    return Row(one.name, one.model_type, {name: code for name, code in codes.items() if code is not None})


def text() -> list[int]:
    """Return the tokens that every class computes."""
    return random.Random(3).choices(range(_FIRST_ID, _LAST_ID + 1), k=LENGTH)


class _Judged:
    """One tiny checkpoint and its true results, which are computed if a code serves it."""

    def __init__(self, path: Path, model: PreTrainedModel) -> None:
        self._path, self._model = path, model
        self._truth: Truth | None = None

    def code(self, open_model: Open, plant: Plant) -> Code | None:
        """Return the results of one code; None: it has no page for the class."""
        runs: dict[int, Run] = {}
        for size in SIZES:
            try:
                runs[size] = self._run(open_model, size, plant)
            except Refusal as refusal:
                if not runs:
                    return None if refusal.has_no_page else Code(str(refusal))
                runs[size] = Run(fault=str(refusal))
        return Code(None, runs)

    def _run(self, open_model: Open, size: int, plant: Plant) -> Run:
        tokens = text()

        def work(tp: TensorParallel) -> dict[str, Tensor]:
            return _all_ways(plant(open_model(self._path, tp)), tokens)

        try:
            if open_model is open_transformers:
                looked_at(self._path, size)  # once, before ranks ask for it at the same time
            ranks = on_ranks(size, work)
        except Refusal:
            raise
        except StartupError as error:
            raise Refusal(error.cause) from error
        except Exception as error:
            return Run(fault=f"it fails ({_line(error)})")
        try:
            exact = self.truth(tokens)
        except Exception as error:
            return Run(fault=f"its own forward fails ({_line(error)})")
        run = _compared(ranks, exact)
        if open_model is open_described and run.fault is None and not run.same_bits:
            return replace(run, fault="other sequences of a batch change its bits")
        return run

    def truth(self, tokens: list[int]) -> Truth:
        """Return the class's own results."""
        if self._truth is None:
            self._truth = truth(self._model, tokens)
        return self._truth


def _all_ways(model: RankModel, tokens: list[int]) -> dict[str, Tensor]:
    """Return the logits [T, vocab] of one text, by the way in which it was given."""
    others = {8: tokens[5:16], 9: tokens[:3]}
    found = {
        "as a whole": PagedRun(model).step({0: tokens})[0],
        "beside others": PagedRun(model).step({8: others[8], 0: tokens, 9: others[9]})[0],
    }
    for way, cuts in _CUTS.items():
        run, rows, start = PagedRun(model), [], 0
        for number, end in enumerate(cuts):
            beside = {100 + number: tokens[: 3 + number]} if len(cuts) < LENGTH and number % 2 == 0 else {}
            rows.append(run.step({**beside, 0: tokens[start:end]})[0])
            start = end
        found[way] = torch.cat(rows)
    return found


def _compared(ranks: list[dict[str, Tensor]], exact: Truth) -> Run:
    """Return the largest error over all ways, and the first fault."""
    if not exact.own_error < LARGEST_OWN_ERROR * exact.largest:
        return Run(fault=f"transformers differs from itself in float64 by {exact.own_error / exact.largest:.1e}")
    errors = {way: exact.error(logits) for way, logits in ranks[0].items()}
    worst = max(errors.values())
    same_bits = torch.equal(ranks[0]["as a whole"], ranks[0]["beside others"])
    if not math.isfinite(worst):
        return Run(same_bits=same_bits, fault="its logits are not numbers")
    fault = None
    wrong = next((way for way, error in errors.items() if error > exact.bound), None)
    if wrong is not None:
        share = errors[wrong] / exact.largest
        fault = f"{wrong}, its logits differ from transformers' own by {share:.0e} of the largest"
    elif not all(torch.equal(ranks[0][way], other[way]) for other in ranks[1:] for way in errors):
        fault = "ranks disagree"
    return Run(round(worst / exact.own_error, 2), float(f"{worst / exact.largest:.1e}"), same_bits, fault)


def _line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    if not words:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        words = f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return f"{type(error).__name__}: {words[:160]}"


_CODES: dict[str, Open] = {OURS: open_described, THEIRS: open_transformers}
