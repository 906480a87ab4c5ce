"""Results of sampling on a device for the rows of a step, and the step's output made from a copy of them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.protocol import MAX_LOGPROBS, StepMetadata, StepOutput
from oarlock.workers.sampling.drafts import num_accepted


@dataclass(frozen=True, slots=True)
class DeviceOutputs:
    """Results of R rows, at least as many as the step has of logits. The last four are written if it wants logprobs."""

    tokens: Tensor  # int32 [R]   sampled, or scored
    states: Tensor  # int32 [R]   `StepOutput.finite`
    logprobs: Tensor  # float32 [R]
    ranks: Tensor  # int32 [R]
    top_ids: Tensor  # int32 [R, MAX_LOGPROBS]
    top_logprobs: Tensor  # float32 [R, MAX_LOGPROBS]

    @staticmethod
    def empty(rows: int, device: torch.device) -> "DeviceOutputs":
        """Allocates new tensors."""
        types = {"<i4": torch.int32, "<f4": torch.float32}
        columns = {name: torch.empty(shape, dtype=types[dtype], device=device) for name, dtype, shape in sections(rows)}
        return DeviceOutputs(**columns)

    def on_host(self) -> dict[str, np.ndarray]:
        """Copies the results to the host. Waits for the device."""
        return {column.name: getattr(self, column.name).cpu().numpy() for column in fields(self)}


def sections(rows: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of the outputs of `rows` rows. The first two are all that a step without logprobs has."""
    return [
        ("tokens", "<i4", (rows,)),
        ("states", "<i4", (rows,)),
        ("logprobs", "<f4", (rows,)),
        ("ranks", "<i4", (rows,)),
        ("top_ids", "<i4", (rows, MAX_LOGPROBS)),
        ("top_logprobs", "<f4", (rows, MAX_LOGPROBS)),
    ]


def output_of(step: StepMetadata, found: Mapping[str, np.ndarray]) -> StepOutput:
    """The output of `step` from arrays of the names and shapes of `sections`, which it copies."""
    rows = len(step.logits_indices)
    out = StepOutput(step.step_id, found["tokens"][:rows].copy(), found["states"][:rows].astype(np.uint8))
    if ((step.num_logprobs >= 0) | (step.target_ids >= 0)).any():
        most = max(0, step.max_num_logprobs)
        out.logprobs, out.ranks = found["logprobs"][:rows].copy(), found["ranks"][:rows].copy()
        out.top_ids, out.top_logprobs = (found[name][:rows, :most].copy() for name in ("top_ids", "top_logprobs"))
    if len(step.num_drafts):
        out.num_accepted = num_accepted(step, torch.from_numpy(out.token_ids)).numpy()
    return out
