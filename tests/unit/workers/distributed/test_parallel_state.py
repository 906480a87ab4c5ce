"""In which order a device's sums are added."""

import pytest
import torch
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel


def test_sums_in_order_gather_the_parts_and_no_library_adds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    group, x = TensorParallel(0, 4, in_order=True), torch.empty((3, 5), dtype=torch.bfloat16, device="meta")
    gathered = []

    def gather(part: Tensor) -> Tensor:
        gathered.append(part)
        return part.expand(4, *part.shape)

    monkeypatch.setattr(group, "all_gather", gather)
    monkeypatch.setattr(group, "_device_all_reduce", lambda part: pytest.fail("a library adds"))
    total = group.all_reduce(x)
    assert len(gathered) == 1 and total.shape == x.shape and total.dtype == x.dtype
