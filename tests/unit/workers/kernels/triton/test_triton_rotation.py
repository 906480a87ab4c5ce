"""The fused Triton kernel against the separate operations: head norm, rotation, and the write of keys and values."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed")

from oarlock.workers.attention.backend import KVSpec
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.attention.triton_backend import TritonBackend
from oarlock.workers.layers.rotary import neighbours_with_torch, rotate_with_torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-6

pytestmark = pytest.mark.slow


def batch_of(slots: torch.Tensor) -> ForwardBatch:
    """A step that only says where keys and values are written."""
    batch = object.__new__(ForwardBatch)
    batch.num_tokens, batch.slots = len(slots), {0: slots}
    return batch


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "rotary", "block", "normed"),
    [
        (4, 2, 64, 64, 16, False),
        (4, 2, 64, 64, 16, True),
        (3, 1, 80, 32, 48, True),
        (2, 2, 96, 96, 8, False),
        (8, 1, 128, 64, 32, True),
        (1, 1, 256, 256, 16, True),
    ],
)
def test_one_kernel_matches_three_operations(heads, kv_heads, width, rotary, block, normed, dtype):
    rows, blocks = 5, 4
    draw = torch.Generator().manual_seed(width + rotary)
    wide = torch.randn(rows, heads + 2 * kv_heads + 1, width, generator=draw).to(DEVICE, dtype)
    qkv = wide[:, : heads + 2 * kv_heads]  # rows lie further apart than they are long
    angles = torch.randn(rows, 1, rotary // 2, generator=draw, dtype=torch.float32).to(DEVICE)
    cos, sin = (torch.cat(both, -1) for both in ((angles.cos(), angles.cos()), (-angles.sin(), angles.sin())))
    weight = torch.randn(heads + kv_heads, width, generator=draw).to(DEVICE)
    slots = torch.randperm(blocks * block, generator=draw)[:rows].to(DEVICE)
    spec = KVSpec(1, kv_heads, width, block, dtype, DEVICE)

    apart = TritonBackend(spec)
    (separate,) = apart.allocate(blocks)
    qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
    if normed:
        qk = F.rms_norm(qk.float(), (width,), None, EPS).mul_(weight)
    qk = rotate_with_torch(qk, cos, sin, dtype)
    apart.write(separate, qk[:, heads:], v, batch_of(slots))

    fused = TritonBackend(spec)
    (together,) = fused.allocate(blocks)
    q = fused.rotate_and_write(together, qkv, (weight, EPS) if normed else None, cos, sin, batch_of(slots))

    one_rounding = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    keys = fused.stored_keys(together, batch_of(slots))
    for ours, wanted in ((q, qk[:, :heads]), (together.k, separate.k), (keys, qk[:, heads:])):
        torch.testing.assert_close(ours, wanted, atol=4e-6, rtol=one_rounding)
    assert torch.equal(together.v, separate.v)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize(("norm", "scaled"), [("last", True), ("last", False), ("first", True), (None, True)])
def test_norms_after_the_rotation_neighbours_and_scaled_queries(norm, scaled, neighbours, dtype):
    rows, heads, kv_heads, width, rotary = 5, 3, 2, 80, 32
    draw = torch.Generator().manual_seed(3)
    qkv = torch.randn(rows, heads + 2 * kv_heads, width, generator=draw).to(DEVICE, dtype)
    angles = torch.randn(rows, 1, rotary // 2, generator=draw, dtype=torch.float32).to(DEVICE)
    cos, sin = (torch.cat(both, -1) for both in ((angles.cos(), angles.cos()), (-angles.sin(), angles.sin())))
    weight, scale = torch.randn(heads + kv_heads, width, generator=draw).to(DEVICE), torch.rand(rows, generator=draw)
    scale = scale.to(DEVICE) if scaled else None
    slots = torch.randperm(64, generator=draw)[:rows].to(DEVICE)
    backend = TritonBackend(KVSpec(1, kv_heads, width, 16, dtype, DEVICE))
    separate, together = (backend.allocate(4)[0] for _ in range(2))
    wide = qkv[:, : heads + kv_heads].double()
    if norm == "first":
        wide = F.rms_norm(wide, (width,), None, EPS) * weight
    wide = (neighbours_with_torch if neighbours else rotate_with_torch)(wide, cos.double(), sin.double(), torch.float64)
    if norm == "last":
        wide = F.rms_norm(wide, (width,), None, EPS) * weight
    if scale is not None:
        wide[:, :heads] *= scale.double().view(-1, 1, 1)
    backend.write(separate, wide[:, heads:].to(dtype), qkv[:, heads + kv_heads :], batch_of(slots))
    q = backend.rotate_and_write(
        together, qkv, (weight, EPS) if norm else None, cos, sin, batch_of(slots), norms_last=norm == "last",
        pairs_neighbours=neighbours, query_scale=scale,
    )  # fmt: skip
    one_rounding = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for ours, wanted in ((q, wide[:, :heads].to(dtype)), (together.k, separate.k)):
        torch.testing.assert_close(ours, wanted, atol=4e-6, rtol=one_rounding)
    assert torch.equal(together.v, separate.v)
