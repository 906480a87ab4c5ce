"""Products of Triton's interpreter with the same bits for every row, as on a device; numpy's have not everywhere."""

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def multiply_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add up in float64, where the order of a sum is lost when it is rounded."""

    def create_dot(builder: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object) -> TensorHandle:
        sums = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return TensorHandle(sums.astype(d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
