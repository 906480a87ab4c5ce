"""Table of the scalar sampling parameters of a request, from which server, engine and workers derive their parts.

Each row gives the field of requests with its range, its error texts and its description in the OpenAPI document, the
field of the engine's `SamplingParams`, the column of a step, and the column on a device. A row names the stage in which
it acts, and a stage the files that compute it: in C++, with torch's operations, in Triton's language.
`tests/unit/workers/test_sampling_parameters.py` fails if a file does not use a parameter. Imports numpy, not
torch.

The order of operations, for every row of logits and every number of ranks:

    1. bias      added to the raw logits; -inf bans an id
    2. penalties of earlier ids: repetition divides logits above 0 and multiplies the others (prompt and output),
                 then frequency and presence are subtracted (output only)
    3. mask      bans every id that is not in it
    4. greedy    if temperature is 0 or top-k is 1: the largest logit, the lowest id among equals. Otherwise:
    5. temperature   logits are divided by it
    6. floors    keep tokens whose logit reaches a bound. min-p: tokens at least min_p times as likely as the likeliest.
                 top-n-sigma: tokens whose logit after step 3 is at most n standard deviations below the largest
                 (dividing by the temperature keeps the same tokens); the deviation is over all logits except -inf,
                 as in llama.cpp
    7. top-k     keeps the k likeliest of these tokens
    8. top-p     keeps the shortest prefix of them, likeliest first, that has top_p of their probability
    9. noise     keyed by (seed, position, id) is added; the largest wins, which samples from the softmax of the
                 remaining tokens
"""

from dataclasses import dataclass, field, fields
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

STEP_FORMAT = 5  # format of a step's bytes, which recordings contain; increased with each change of an array
_INT32_MAX = 2**31 - 1

# Stage -> its files in C++, torch and Triton.
STAGES = {
    "penalties": ("csrc/sampling/logits_processors.h", "logits_processors.py", "processors.py"),
    "temperature": ("csrc/sampling/sample_row.h", "top_k_top_p.py", "choose.py"),
    "floors": ("csrc/sampling/sample_row.h", "logits_shard.py", "choose.py"),
    "top-k": ("csrc/sampling/sample_row.h", "top_k_top_p.py", "filters.py"),
    "top-p": ("csrc/sampling/sample_row.h", "top_k_top_p.py", "filters.py"),
}


class Parameter(NamedTuple):
    """A row of the table."""

    name: str  # field of requests and of `SamplingParams`
    default: float  # default of requests; an int if the parameter is one
    low: float
    high: float
    off: float  # value in a row of logits that does not use it; of the temperature, 0: greedy
    stage: str
    needs: str  # input other than an id's own logit: "largest", "vocabulary", "history", or nothing
    column: str  # column of a step
    is_model_default: bool  # a checkpoint's generation_config.json may have another default
    text: str  # the description in the OpenAPI document

    @property
    def dtype(self) -> str:
        """Dtype of the column."""
        return "<i4" if isinstance(self.default, int) else "<f4"


def _row(
    default: float, low: float, high: float, off: float, stage: str, text: str,
    *, needs: str = "", column: str = "", of_model: bool = False,
) -> Any:  # fmt: skip
    row = Parameter("", default, low, high, off, stage, needs, column, of_model, text)
    return field(default=default, metadata={"row": row})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarParams:
    """The table, as the fields of one request."""

    temperature: float = _row(1.0, 0, 2, 0.0, "temperature", "0: greedy decoding", of_model=True)
    top_p: float = _row(
        1.0, 0, 1, 1.0, "top-p", "keep the most likely tokens whose probabilities add up to this value; 0: greedy",
        needs="vocabulary", of_model=True,
    )  # fmt: skip
    top_k: int = _row(
        0, -1, _INT32_MAX, 0, "top-k", "number of most likely tokens to keep; -1, 0, or more than the vocabulary: off",
        needs="vocabulary", of_model=True,
    )  # fmt: skip
    min_p: float = _row(
        0.0, 0, 1, 0.0, "floors", "keep tokens with at least this probability, relative to the most likely token",
        needs="largest", of_model=True,
    )  # fmt: skip
    top_n_sigma: float = _row(
        0.0, -1, 100, 0.0, "floors",
        "keep tokens whose logit is at most this many standard deviations of all logits below the largest; "
        "0 and below: off",
        needs="vocabulary",
    )  # fmt: skip
    presence_penalty: float = _row(
        0.0, -2, 2, 0.0, "penalties", "subtracted once from the logit of each token that the completion contains",
        needs="history", column="presence",
    )  # fmt: skip
    frequency_penalty: float = _row(
        0.0, -2, 2, 0.0, "penalties", "subtracted from a token's logit for each time that the completion contains it",
        needs="history", column="frequency",
    )  # fmt: skip
    repetition_penalty: float = _row(
        1.0, 0.01, 100, 1.0, "penalties",
        "divides positive logits of tokens in the prompt or completion, multiplies negative logits",
        needs="history", column="repetition", of_model=True,
    )  # fmt: skip

    @classmethod
    def table(cls) -> tuple[Parameter, ...]:
        """Return the rows, in the order of a request's fields."""
        return PARAMETERS


def _named(name: str, row: Parameter) -> Parameter:
    return row._replace(name=name, column=row.column or name)


PARAMETERS = tuple(_named(one.name, one.metadata["row"]) for one in fields(ScalarParams))
# Columns over the rows with penalties, in the order in which they act; a step stores them in this order.
PENALTIES = tuple(row for row in reversed(PARAMETERS) if row.stage == "penalties")
ROWS = tuple(row for row in PARAMETERS if row.stage != "penalties")  # columns over all rows of logits
FLOORS = tuple(row for row in ROWS if row.stage == "floors")
ROW_NAMES, PENALTY_NAMES = (tuple(row.column for row in rows) for rows in (ROWS, PENALTIES))

Column = TypeVar("Column")


@dataclass(slots=True, kw_only=True)
class RowColumns(Generic[Column]):
    """The columns `ROWS`, each with an entry for each of L rows of logits."""

    temperature: Column  # float32   0: greedy
    top_p: Column  # float32   1: off
    top_k: Column  # int32   0: off
    min_p: Column  # float32   0: off
    top_n_sigma: Column  # float32   0 and below: off


def columns_off(rows: int) -> dict[str, Any]:
    """Return the columns `ROWS` of rows that are sampled greedily and without any option."""
    return {row.column: np.full(rows, row.off, row.dtype) for row in ROWS}


def have_floor(columns: RowColumns[np.ndarray]) -> np.ndarray:
    """Return which rows have a floor: bool [L]."""
    found = np.zeros(len(columns.temperature), bool)
    for row in FLOORS:
        found |= getattr(columns, row.column) > row.off
    return found
