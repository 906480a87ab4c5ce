"""A rank reads exactly its slices, into place, and holds little besides; noise behaves like a checkpoint."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from oarlock.base.errors import StartupError
from oarlock.workers.model_files.checkpoint import SINGLE_FILE, Checkpoint
from oarlock.workers.weights import reader as reader_module
from oarlock.workers.weights.reader import WeightReader
from oarlock.workers.weights.source import DummyWeights


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {"m": torch.randn(37, 12), "v": torch.randn(41)}


@pytest.fixture
def weights(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> WeightReader:
    save_file(tensors, tmp_path / SINGLE_FILE)
    return WeightReader(Checkpoint.open(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limit", [1, 100, 1 << 20])
def test_slices_arrive_whatever_the_piece_size(
    weights: WeightReader,
    tensors: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    limit: int,
) -> None:
    monkeypatch.setattr(reader_module, "CHUNK_BYTES", limit)
    rows, columns, part = (torch.empty(shape, dtype=dtype) for shape in ((10, 12), (37, 5), (9,)))
    weights.take("m", rows, shape=(37, 12), start=20)
    weights.take("m", columns, shape=(37, 12), dim=1, start=7)
    weights.take("v", part, shape=(41,), start=32)
    assert torch.equal(rows, tensors["m"][20:30].to(dtype))
    assert torch.equal(columns, tensors["m"][:, 7:].to(dtype))
    assert torch.equal(part, tensors["v"][32:].to(dtype))


def test_a_missing_tensor_is_named(weights: WeightReader) -> None:
    with pytest.raises(StartupError, match=r"no tensor 'q\.bias'"):
        weights.take("q.bias", torch.empty(3), shape=(3,))


def test_another_shape_is_named_with_both(weights: WeightReader) -> None:
    with pytest.raises(StartupError, match=r"'m' in model\.safetensors has shape \[37, 12\].*\[37, 13\]"):
        weights.take("m", torch.empty(37, 13), shape=(37, 13))


def test_a_slice_beyond_the_tensor_is_our_own_mistake(weights: WeightReader) -> None:
    with pytest.raises(AssertionError, match="leaves"):
        weights.take("m", torch.empty(10, 12), shape=(37, 12), start=30)


def test_leftovers_are_an_error_unless_ignorable(weights: WeightReader) -> None:
    weights.take("m", torch.empty(0, 12), shape=(37, 12))  # taking nothing of it is taking it
    with pytest.raises(StartupError, match=r"does not use: v\."):
        weights.finish(lambda name: False)
    weights.finish(lambda name: name == "v")


# Writes a checkpoint of 288 MB, mostly one row-parallel and one column-parallel matrix, and loads an eighth of it in a
# process of its own: in its peak, a whole matrix or the touched pages of the mapped file would show.
_MEASURE = """
import sys, torch
from pathlib import Path
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.weights.reader import WeightReader
def status(field):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(field)) / 1024
torch.set_num_threads(1)
shape, size = (9216, 8192), 8
torch.empty(8).copy_(torch.empty(8, dtype=torch.bfloat16))
before = status("VmRSS")
for dtype in (torch.bfloat16, torch.float32):
    with WeightReader(Checkpoint.open(Path(sys.argv[1]))) as weights:
        rows = torch.empty((shape[0] // size, shape[1]), dtype=dtype)
        columns = torch.empty((shape[0], shape[1] // size), dtype=dtype)
        weights.take("a", rows, shape=shape, start=3 * rows.shape[0])
        weights.take("b", columns, shape=shape, dim=1, start=3 * columns.shape[1])
    print(status("VmHWM") - before, (rows.nbytes + columns.nbytes) / 2**20)
    del rows, columns
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_the_shard_and_a_small_bound(tmp_path: Path) -> None:
    whole = torch.zeros(9216, 8192, dtype=torch.bfloat16)
    save_file({"a": whole, "b": whole.clone()}, tmp_path / SINGLE_FILE)
    root = Path(__file__).parents[4]
    command = [sys.executable, "-c", _MEASURE, str(tmp_path)]
    answer = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    lines = answer.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        peak, shard = map(float, line.split())
        assert peak < 1.05 * shard + 110, f"{peak:.0f} MB for a shard of {shard:.0f} MB"


def test_noise_shards_are_slices_of_the_same_tensor() -> None:
    whole = torch.empty(3000, 700)
    DummyWeights(5).take("model.w", whole, shape=whole.shape)
    for dim, start, count in ((0, 0, 1), (0, 1499, 1501), (1, 350, 350), (1, 699, 1)):
        part = torch.empty_like(whole.narrow(dim, start, count))
        DummyWeights(5).take("model.w", part, shape=whole.shape, dim=dim, start=start)
        assert torch.equal(part, whole.narrow(dim, start, count))


def test_noise_of_heads_is_cut_along_the_dimension_of_the_heads() -> None:
    """Kimi Linear stores one value for each head as [1, 1, heads, 1]."""
    whole, part = torch.empty(1, 1, 12, 1), torch.empty(1, 1, 4, 1)
    DummyWeights(5).take("model.rates", whole, shape=whole.shape)
    DummyWeights(5).take("model.rates", part, shape=whole.shape, dim=2, start=4)
    assert torch.equal(part, whole[:, :, 4:8]) and len(set(whole.flatten().tolist())) == 12


def test_noise_depends_on_seed_and_name_and_does_not_repeat() -> None:
    def draw(seed: int, name: str, *shape: int) -> torch.Tensor:
        out = torch.empty(shape)
        DummyWeights(seed).take(name, out, shape=shape)
        return out

    base = draw(1, "x.weight", 2000, 900)  # more elements than the pool holds
    assert torch.equal(base, draw(1, "x.weight", 2000, 900))
    assert not torch.equal(base, draw(2, "x.weight", 2000, 900))
    assert not torch.equal(base, draw(1, "y.weight", 2000, 900))
    assert len(base.unique(dim=0)) == 2000
    assert abs(base.std().item() - 0.02) < 1e-3 and abs(base.mean().item()) < 1e-4
    norm = draw(1, "model.norm.weight", 64)
    assert (norm - 1).abs().max() < 0.2


def test_a_file_that_is_cut_short_while_it_is_read_is_named(tmp_path: Path) -> None:
    save_file({"m": torch.randn(37, 12)}, tmp_path / SINGLE_FILE)
    checkpoint = Checkpoint.open(tmp_path)
    path = tmp_path / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:-5])
    into = torch.empty(37, 12)
    with WeightReader(checkpoint) as weights:
        with pytest.raises(StartupError, match=r"model\.safetensors ends at byte \d+, in the middle of tensor 'm'"):
            weights.take("m", into, shape=(37, 12))
        path.unlink()
        weights.close()
        with pytest.raises(StartupError, match=r"model\.safetensors cannot be opened: No such file"):
            weights.take("m", into, shape=(37, 12))


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    save_file({"m": torch.zeros(4, dtype=torch.complex64)}, tmp_path / SINGLE_FILE)
    with pytest.raises(StartupError, match="'m' is C64, which is not supported"):
        WeightReader(Checkpoint.open(tmp_path)).take("m", torch.empty(4), shape=(4,))
