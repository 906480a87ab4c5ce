"""The element-wise kernels of every level against float64, and the batch invariance of their rows."""

import pytest
import torch

from oarlock.workers.kernels.cpu import elementwise
from oarlock.workers.layers.rotary import neighbours_with_torch, rotate_with_torch

pytestmark = pytest.mark.usefixtures("level")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 896), (5, 100), (300, 128), (2, 3), (3, 6, 64), (70, 5, 80)], ids=str)
def test_norm_is_right_to_its_rounding(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[1:])
    exact = x.double()
    exact = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    wide = elementwise.rms_norm(x, weight, 1e-6, float32_output=True)
    torch.testing.assert_close(wide.double(), exact, atol=1e-9, rtol=1e-6)
    assert torch.equal(elementwise.rms_norm(x, weight, 1e-6), wide.to(dtype))


def test_norm_reads_rows_that_lie_apart() -> None:
    x, weight = torch.randn(4, 8, 64).bfloat16(), torch.randn(5, 64)
    part = x[:, :5]
    assert torch.equal(elementwise.rms_norm(part, weight, 1e-6), elementwise.rms_norm(part.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_a_broken_row_is_nan_and_disturbs_no_other(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 100).to(dtype), torch.ones(100)
    healthy = elementwise.rms_norm(x, weight, 1e-6)
    x[1, 70] = float("nan")
    out = elementwise.rms_norm(x, weight, 1e-6)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], healthy[[0, 2]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["same", "float32"])
@pytest.mark.parametrize(("width", "turned"), [(64, 64), (128, 32), (80, 80), (96, 72), (6, 2)])
def test_rotation_is_right_to_its_rounding(dtype: torch.dtype, wide: bool, width: int, turned: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(37, 6, width).to(torch.float32 if wide else dtype)[:, :4]
    angles = torch.randn(37, 1, turned // 2) * 9
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    ours = elementwise.rotate(x, cos, sin, dtype)
    exact = rotate_with_torch(x.double(), cos.double(), sin.double(), torch.float64)
    assert ours.is_contiguous() and ours.dtype == dtype
    torch.testing.assert_close(ours.double(), exact, atol=1e-6, rtol=torch.finfo(dtype).eps)
    assert torch.equal(ours[..., turned:], x[..., turned:].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["same", "float32"])
@pytest.mark.parametrize("pairs_neighbours", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("without", ["nothing", "rotation", "norm", "scale"])
@pytest.mark.parametrize(("width", "turned"), [(64, 64), (128, 32), (80, 72), (6, 2)])
def test_heads_are_rotated_normed_and_scaled_in_this_order(
    dtype: torch.dtype, wide: bool, pairs_neighbours: bool, without: str, width: int, turned: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(37, 6, width).to(torch.float32 if wide else dtype)[:, :5]
    angles = torch.randn(37, 1, turned // 2) * 9
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    weight, scale = torch.randn(5, width), torch.rand(37) + 0.5
    ours = elementwise.finish_heads(
        x,
        None if without == "rotation" else (cos, sin),
        None if without == "norm" else (weight, 1e-6),
        None if without == "scale" else scale,
        3,
        dtype,
        pairs_neighbours=pairs_neighbours,
    )
    exact = x.double()
    if without != "rotation":
        apply_rope = neighbours_with_torch if pairs_neighbours else rotate_with_torch
        exact = apply_rope(exact, cos.double(), sin.double(), torch.float64)
    if without != "norm":
        exact = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    if without != "scale":
        exact = torch.cat((exact[:, :3] * scale.double().view(-1, 1, 1), exact[:, 3:]), 1)
    assert ours.is_contiguous() and ours.dtype == dtype
    torch.testing.assert_close(ours.double(), exact, atol=2e-6, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 768), (5, 100), (300, 128), (2, 3)])
def test_a_gate_multiplies_by_its_sigmoid(dtype: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(0)
    x, gate = torch.randn(rows, width).to(dtype), (torch.randn(rows, width) * 4).to(dtype)
    exact = x.double() * torch.sigmoid(gate.double())
    ours = elementwise.gate_rows(x.clone(), gate)
    torch.testing.assert_close(ours.double(), exact, atol=1e-6, rtol=torch.finfo(dtype).eps)
    assert torch.equal(elementwise.gate_rows(x[:1].clone(), gate[:1]), ours[:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["same", "float32"])
@pytest.mark.parametrize(("rows", "width"), [(1, 768), (5, 100), (300, 128), (2, 3)])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_layer_norm_is_right_to_its_rounding(
    dtype: torch.dtype, wide: bool, rows: int, width: int, shifted: bool, scaled: bool
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(rows, width) * 3 + 5).to(torch.float32 if wide else dtype)
    weight, bias = torch.randn(width) if scaled else None, torch.randn(width) if shifted else None
    vectors = [None if vector is None else vector.double() for vector in (weight, bias)]
    exact = torch.nn.functional.layer_norm(x.double(), (width,), *vectors, 1e-6)
    ours = elementwise.layer_norm(x, weight, bias, 1e-6, dtype)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), exact, atol=2e-6, rtol=max(1e-6, torch.finfo(dtype).eps / 2 * 1.01))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["same", "float32"])
@pytest.mark.parametrize("form", ["none", "tanh"])
@pytest.mark.parametrize("gated", [False, True])
def test_gelu_is_right_to_its_rounding(dtype: torch.dtype, wide: bool, form: str, gated: bool) -> None:
    torch.manual_seed(0)
    x = (torch.randn(37, 102) * 3).to(torch.float32 if wide else dtype)
    ours = elementwise.gelu(x, dtype, gated=gated, is_tanh=form == "tanh")
    gate, up = x.double().chunk(2, 1) if gated else (x.double(), 1.0)
    exact = torch.nn.functional.gelu(gate, approximate=form) * up
    assert ours.dtype == dtype and ours.shape == exact.shape
    torch.testing.assert_close(ours.double(), exact, atol=4e-6, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 200])
def test_rows_do_not_depend_on_the_batch(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(300, 4, 64).to(dtype), torch.randn(4, 64)
    cos, sin = torch.randn(300, 1, 64), torch.randn(300, 1, 64)
    part = slice(50, 50 + rows)
    normed, turned = elementwise.rms_norm(x, weight, 1e-6), elementwise.rotate(x, cos, sin, dtype)
    assert torch.equal(elementwise.rms_norm(x[part], weight, 1e-6), normed[part])
    assert torch.equal(elementwise.rotate(x[part], cos[part], sin[part], dtype), turned[part])
    wide, bias = x.flatten(1)[:, :150].float().contiguous(), torch.randn(150)
    weight = torch.randn(150)
    whole = elementwise.layer_norm(wide, weight, bias, 1e-6, dtype), elementwise.gelu(wide, dtype, gated=True)
    some = wide[part].contiguous()
    assert torch.equal(elementwise.layer_norm(some, weight, bias, 1e-6, dtype), whole[0][part])
    assert torch.equal(elementwise.gelu(some, dtype, gated=True), whole[1][part])
