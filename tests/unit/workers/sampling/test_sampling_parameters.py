"""The table of sampling parameters: a row is accepted everywhere, named by its stage's files, used on every path.

A parameter that a path accepts and does not use would give the same tokens as without it.
"""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from oarlock.engine.types import SamplingParams
from oarlock.server.offline.inputs import SamplingParams as OfflineParams
from oarlock.server.schemas.generation import SamplingFields
from oarlock.workers.kernels.cpu import library
from oarlock.workers.protocol import StepMetadata, StepOutput
from oarlock.workers.runner.trial_steps import null_step
from oarlock.workers.sampling.columns import SamplingColumns
from oarlock.workers.sampling_parameters import PARAMETERS, PENALTY_NAMES, ROW_NAMES, STAGES, Parameter, columns_off
from tests.unit.workers.kernels.triton.test_triton_sampling import sampled as with_triton
from tests.unit.workers.sampling_cases import Penalties, sample_with, step_of

ROOT = Path(__file__).parents[4]
ROWS, VOCAB = 24, 1000
USED = {
    "temperature": 0.5, "top_p": 0.3, "top_k": 3, "min_p": 0.5, "top_n_sigma": 1.0, "presence_penalty": 2.0,
    "frequency_penalty": 2.0, "repetition_penalty": 3.0,
}  # fmt: skip
named = pytest.mark.parametrize("row", PARAMETERS, ids=lambda row: row.name)


@named
def test_a_parameter_is_a_field_of_every_floor(row: Parameter) -> None:
    assert row.low <= row.off <= row.high and row.low <= row.default <= row.high and row.text
    assert SamplingFields.model_fields[row.name].default == row.default == getattr(SamplingParams(), row.name)
    assert row.name in {field.name for field in fields(OfflineParams)}
    step = null_step(2, 2, 2, 16)
    assert getattr(step, row.column).dtype == row.dtype and row.column in SamplingColumns.__dataclass_fields__
    assert (row.column in PENALTY_NAMES) != (row.column in ROW_NAMES)
    if row.column in ROW_NAMES:
        np.testing.assert_array_equal(getattr(step, row.column), columns_off(2)[row.column])


@named
def test_the_files_of_its_stage_name_a_parameter(row: Parameter) -> None:
    kernels = ROOT / "workers/kernels"
    for folder, name in zip(
        (kernels / "cpu", ROOT / "workers/sampling", kernels / "triton/sampling"), STAGES[row.stage], strict=True
    ):
        assert row.column in (folder / name).read_text(), f"{name} does not name {row.column}"


def with_kernels(logits: Tensor, step: StepMetadata) -> StepOutput:
    return sample_with(logits, step)


def with_ranks(logits: Tensor, step: StepMetadata) -> StepOutput:
    return sample_with(logits, step, 2)


def with_torch(logits: Tensor, step: StepMetadata) -> StepOutput:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "why_not", lambda *_: "torch alone")
        return sample_with(logits, step)


@named
@pytest.mark.parametrize(
    ("sample", "rows"),
    [
        (with_kernels, ROWS),
        (with_ranks, ROWS),
        (with_torch, ROWS),
        pytest.param(with_triton, 8, marks=pytest.mark.slow),  # its interpreter takes seconds
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_every_path_uses_a_parameter(
    row: Parameter, sample: Callable[[Tensor, StepMetadata], StepOutput], rows: int
) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)).expand(rows, VOCAB).contiguous()

    def tokens(value: float) -> list[int]:
        if row.stage == "penalties":
            of_row = Penalties(dict.fromkeys(range(VOCAB // 2), 1), **{row.column: value})
            return sample(logits, step_of(rows, penalties=dict.fromkeys(range(rows), of_row))).token_ids.tolist()
        return sample(logits, step_of(rows, **{row.column: value})).token_ids.tolist()

    off = 1.0 if row.name == "temperature" else row.off
    assert tokens(USED[row.name]) != tokens(off)
