"""A checkpoint with a NaN or an infinity is refused by the tensor's name, by the rank that reads that slice."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oarlock.base.errors import StartupError
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.model_files.checkpoint import SINGLE_FILE, Checkpoint
from oarlock.workers.preflight import preflight
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.weights import reader as reader_module
from oarlock.workers.weights.reader import WeightReader, first_not_finite
from tests.golden.tiny_models import make_tiny

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", BAD)
def test_one_bad_element_anywhere_is_found(dtype: torch.dtype, value: float) -> None:
    for index in [(0, 0), (3, 7), (40, 12), (40, 0)]:
        x = torch.randn(41, 13).to(dtype)
        assert first_not_finite(x) is None
        x[index] = value
        assert first_not_finite(x) == index


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_numbers_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    x = torch.full((50, 3), torch.finfo(dtype).max, dtype=dtype)
    assert not math.isfinite(float(x.sum()))  # the shortcut alone would be wrong here
    assert first_not_finite(x) is None
    x[17, 1] = math.inf
    assert first_not_finite(x) == (17, 1)


def test_the_two_infinities_do_not_cancel() -> None:
    x = torch.zeros(10)
    x[3], x[5] = math.inf, -math.inf
    assert first_not_finite(x) == (3,)


def reader_of(folder: Path, tensors: dict[str, torch.Tensor], **options: bool) -> WeightReader:
    save_file(tensors, folder / SINGLE_FILE)
    return WeightReader(Checkpoint.open(folder), **options)


@pytest.mark.parametrize("limit", [1, 1 << 20])
@pytest.mark.parametrize(("value", "said"), list(zip(BAD, ["NaN", "inf", "-inf"], strict=True)))
def test_the_reader_names_tensor_file_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, value: float, said: str
) -> None:
    monkeypatch.setattr(reader_module, "CHUNK_BYTES", limit)
    matrix, vector = torch.randn(37, 12), torch.randn(41)
    matrix[25, 9] = vector[40] = value
    weights = reader_of(tmp_path, {"m": matrix, "v": vector})
    with pytest.raises(StartupError) as caught:
        weights.take("m", torch.empty(10, 12), shape=(37, 12), start=20)
    assert f"tensor 'm' holds {said} at [25, 9]" in caught.value.cause
    assert SINGLE_FILE in caught.value.cause and caught.value.fix and caught.value.exit_code == 3
    with pytest.raises(StartupError, match=rf"'m' holds {said} at \[25, 9\]"):
        weights.take("m", torch.empty(37, 6, dtype=torch.bfloat16), shape=(37, 12), dim=1, start=6)
    with pytest.raises(StartupError, match=rf"'v' holds {said} at \[40\]"):
        weights.take("v", torch.empty(9), shape=(41,), start=32)


def test_a_rank_checks_its_own_slice(tmp_path: Path) -> None:
    matrix = torch.randn(8, 12)
    matrix[5, 9] = math.nan
    weights = reader_of(tmp_path, {"m": matrix})
    weights.take("m", torch.empty(4, 12), shape=(8, 12), start=0)
    weights.take("m", torch.empty(8, 6), shape=(8, 12), dim=1, start=0)
    with pytest.raises(StartupError):
        weights.take("m", torch.empty(4, 12), shape=(8, 12), start=4)


def test_a_number_too_large_for_the_dtype_says_that(tmp_path: Path) -> None:
    matrix = torch.randn(8, 12)
    matrix[5, 9] = 1e6
    weights = reader_of(tmp_path, {"m": matrix})
    weights.take("m", torch.empty(8, 12), shape=(8, 12))
    with pytest.raises(StartupError, match=r"holds 1e\+06 at \[5, 9\], which is too large for float16") as caught:
        weights.take("m", torch.empty(8, 12, dtype=torch.float16), shape=(8, 12))
    assert "--dtype" in caught.value.fix


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    into = torch.empty(3)
    reader_of(tmp_path, {"v": torch.tensor([1.0, math.nan, 2.0])}, check_finite=False).take("v", into, shape=(3,))
    assert into.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.2.self_attn.o_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.2.input_layernorm.weight",
        "model.norm.weight",
    ],
)
def test_a_model_with_it_does_not_load(tmp_path: Path, name: str) -> None:
    path = make_tiny(tmp_path, "qwen2")
    weights = load_file(path / SINGLE_FILE)
    weights[name].view(-1)[-1] = math.nan
    save_file(weights, path / SINGLE_FILE, metadata={"format": "pt"})
    config = preflight(WorkerConfig(str(path), device="cpu", max_model_len=64, num_threads=1))
    with pytest.raises(StartupError, match=f"{name}' holds NaN"):
        ModelRunner(config, TensorParallel.solo()).load(lambda share: None)
    ModelRunner(config.with_(check_weights=False), TensorParallel.solo()).load(lambda share: None)
