"""Self-test of a model that other code than ours computes: its ranks are compared with the class's own forward.

One prompt is computed in the ways in which requests are: whole, in chunks beside another sequence, token by token, and
from a saved state if the model has any. Each way must give, after the first layers, what the class's own uncached
forward gives there with the same weights, and at the end what the prompt gives as a whole, up to rounding.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.workers.attention.backend import AttentionBackend, LayerMemory
from oarlock.workers.config import WorkerConfig
from oarlock.workers.models.class_reference import ClassReference, errors, largest, least_distance
from oarlock.workers.models.rank_model import RankModel
from oarlock.workers.runner.invariance import InvarianceTest
from oarlock.workers.runner.trial_steps import SequenceChunk

DECODED = 16  # tokens that are computed one by one
ROUNDINGS = 4  # results may differ by this many times the distance that rounding alone makes
# Rounding of the class's own forward, as a multiple of the dtype's, if that forward could not run.
_ASSUMED_ROUNDING = 4
# Distances that quantization on load, and a quantized cache of keys and values, may add: somewhat more than they add in
# tiny random models, whose weights are harder to round than trained ones (int8 0.05, int4 0.7; int8 0.01, fp8 0.07).
OF_QUANTIZATION = {"int8": 0.1, "int4": 0.9}
OF_CACHE = {"int8": 0.05, "fp8": 0.15, "fp8_e4m3": 0.15}
_LARGEST_LIMIT = 1.1  # the distance of unrelated results is about 1.4

_FIRST, _ALL = "the first layers", "all layers"  # places where results are compared

logger = logging.getLogger("oarlock.runner")

Way = tuple[Tensor, Tensor | None]  # results of the model and of its first layers: [T, hidden] and [T, width]


@dataclass(frozen=True, slots=True)
class Limits:
    """Distances that are rounding."""

    first: float  # after the first layers, from the class's own forward
    all: float  # after all layers, from the prompt as a whole


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison of the test."""

    name: str
    found: float  # distance
    limit: float

    @property
    def is_right(self) -> bool:
        return self.found <= self.limit


class ClassTrial(InvarianceTest):
    """Steps that compute parts of the prompt, and record the result of the first layers if there is a reference."""

    reference: ClassReference | None = None
    width = 0  # values of a token in that result; 0: nothing is recorded

    def _run(self, parts: list[SequenceChunk], *, as_captured: bool = False) -> list[Tensor]:
        """Return the hidden states of one step for each part, and behind them the recorded values: float32
        [tokens, hidden + width]."""
        assert self.reference is not None
        with self.reference.recorded() as recorded:
            hidden = super()._run(parts, as_captured=as_captured)
        if not recorded:
            return [part.float() for part in hidden]
        rows = recorded[0].float().split([len(part) for part in hidden])
        self.width = rows[0].shape[1]
        return [torch.cat([part.float(), row], 1) for part, row in zip(hidden, rows, strict=True)]

    def separate(self, result: Tensor) -> Way:
        """Return the hidden states and the recorded values of a way."""
        if not self.width:
            return result, None
        return result[:, : -self.width], result[:, -self.width :]


def check_class(
    model: RankModel,
    reference: ClassReference,
    memory: list[LayerMemory],
    backends: Mapping[int, AttentionBackend],
    config: WorkerConfig,
    num_blocks: Sequence[int],
) -> None:
    """Compare the ranks' results with `reference`, unless a success is remembered; log and remember a success.

    Every rank must call this at the same point. It overwrites the first blocks and slots of `memory`, which has
    `num_blocks` of each group. Raise `StartupError` on every rank if a result is wrong.
    """
    place, started = model.placement, time.monotonic()
    tp = place.tp
    if not float(tp.all_reduce(torch.tensor([float(reference.is_wanted)], device=place.device))):
        return
    assert config.max_model_len is not None, "preflight resolves the context length"
    pages = [(num_blocks[group] - 1) * config.block_size for group in backends]
    length = min(len(reference.prompt), config.max_model_len, model.spec.longest_length, *pages)
    trial = ClassTrial(model, memory, backends, config.block_size, length, config.max_model_len, reference.prompt)
    trial.reference = reference
    compared = _agreed(compare(trial, reference, config), model)
    _log(model, reference, compared, time.monotonic() - started)
    wrong = next((one for one in compared if not one.is_right), None)
    if wrong is not None:
        raise _refusal(model, reference, wrong)
    reference.remember({one.name: one.found for one in compared})


def limits_of(model: RankModel, reference: ClassReference, config: WorkerConfig, rows: slice) -> Limits:
    """Return the limits for the tokens `rows`, of a model in its dtype and formats."""
    least, expected = least_distance(model.placement.dtype), reference.expected
    rounding = _ASSUMED_ROUNDING * least if expected is None else largest(expected.rounding[rows], reference.share)
    limit, share = ROUNDINGS * rounding + least, 1.0
    if expected is not None:
        share = expected.all_layers / expected.layers
    of_cache = OF_CACHE.get(config.kv_cache_dtype, 0.0)
    first = limit + OF_QUANTIZATION.get(config.quantization, 0.0) + of_cache
    return Limits(min(first, _LARGEST_LIMIT), min(share * limit + of_cache, _LARGEST_LIMIT))


def compare(trial: ClassTrial, reference: ClassReference, config: WorkerConfig) -> list[Comparison]:
    """Compute the prompt in every way, and return all comparisons.

    Without `reference.expected`, as on every rank but the first, no comparison with the class's own forward is made.
    """
    count, expected = len(trial.prompt), reference.expected
    whole, first = trial.separate(trial.whole())
    ways: dict[str, Callable[[], Tensor]] = {
        "in chunks beside another sequence": lambda: trial.in_chunks(others=1),
        "token by token": lambda: trial.decoded(DECODED, 1),
    }
    if trial.kinds.has_states and count > 23:
        ways["from a saved state"] = trial.from_checkpoint
    results = {"as a whole": (whole, first)} | {name: trial.separate(way()) for name, way in ways.items()}
    found = []
    for name, (last, layers) in results.items():
        rows = slice(max(0, count - DECODED) if name == "token by token" else 0, count)
        limits, gap = limits_of(trial.model, reference, config, rows), 0.0
        if expected is not None and layers is not None:
            gap = largest(errors(layers[rows].cpu(), expected.hidden[rows]), reference.share)
        found.append(Comparison(f"{_FIRST}: {name}", gap, limits.first))
        if name != "as a whole":
            gap = largest(errors(last[rows], whole[rows]), reference.share)
            found.append(Comparison(f"{_ALL}: {name}", gap, limits.all))
    return found


def _agreed(compared: list[Comparison], model: RankModel) -> list[Comparison]:
    """Return the first rank's comparisons on every rank: the others have no reference, and other limits."""
    place = model.placement
    own = [value for one in compared for value in (min(one.found, 1e30), one.limit)]
    given = torch.tensor(own if place.tp.rank == 0 else [0.0] * len(own), device=place.device)
    numbers = place.tp.all_reduce(given).view(-1, 2).tolist()
    return [Comparison(one.name, *pair) for one, pair in zip(compared, numbers, strict=True)]


def _log(model: RankModel, reference: ClassReference, compared: list[Comparison], seconds: float) -> None:
    if model.placement.tp.rank == 0:
        expected = reference.expected
        layers, all_layers = (0, model.spec.num_layers) if expected is None else (expected.layers, expected.all_layers)
        made = [one for one in compared if layers or not one.name.startswith(_FIRST)]
        found = ", ".join(f"{one.name} {one.found:.1e} (limit {one.limit:.1e})" for one in made)
        name = model.spec.architecture
        values = name, layers, all_layers, found, seconds
        logger.info("event=class_self_test class=%s layers=%d of=%d distances=%r seconds=%.1f", *values)


def _refusal(model: RankModel, reference: ClassReference, wrong: Comparison) -> StartupError:
    """Return the error for a result that is wrong. It is the same on every rank, except for the number of layers."""
    place, _, way = wrong.name.partition(": ")
    after = place if reference.expected is None or place == _ALL else f"layer {reference.expected.layers}"
    other = "the class's own forward" if place == _FIRST else "the same prompt as a whole"
    by = f"{wrong.found:.2g}" if wrong.found < 1e30 else "values that are not finite"
    return StartupError(
        f"transformers' code for {model.spec.architecture} gives wrong results here: a prompt {way} differs after "
        f"{after} from {other} by {by}, and rounding explains {wrong.limit:.2g}.",
        "Use another model or a described family: `oarlock models --supported` lists all architectures. If it is a "
        "described one, leave --model-impl out.",
    )
