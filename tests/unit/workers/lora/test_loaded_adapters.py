"""Adapters of one rank: read in the background, copied into slots, and forgotten."""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import F_SETLEASE, F_UNLCK, F_WRLCK, fcntl
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from oarlock.base import watched_reads
from oarlock.base.errors import StartupError
from oarlock.base.watched_reads import STALL_S, OnRead
from oarlock.workers.adapters import STALLED, AdapterError
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.lora.adapter_file import Adapter
from oarlock.workers.lora.adapter_slots import AdapterSlots, HostAdapter
from oarlock.workers.lora.loaded_adapters import LoadedAdapters
from oarlock.workers.lora.rank_adapter import read_adapter
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.weights.reader import FileReader
from oarlock.workers.weights.source import DummyWeights
from tests.unit.workers.lora.adapter_cases import halves, spec_of, write


@pytest.fixture
def model() -> Decoder:
    model = Decoder(spec_of("LlamaForCausalLM"), TensorParallel.solo(), torch.float32, torch.device("cpu"))
    model.load(DummyWeights(0), lambda share: None)
    return model


def written(folder: Path, layer: int = 1) -> tuple[str, str]:
    """The digest and the directory of an adapter."""
    write(folder, halves(f"model.layers.{layer}.self_attn.q_proj", 8, 8))
    return Adapter.open(folder, spec_of("LlamaForCausalLM")).digest, str(folder)


def ended(adapters: LoadedAdapters) -> dict[str, str | None]:
    """The next results of preparations, within seconds."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if found := adapters.ready():
            return dict(found)
        time.sleep(0.001)
    raise TimeoutError("nothing was prepared")


def test_an_adapter_is_prepared_put_and_dropped(model: Decoder, tmp_path: Path) -> None:
    digest, directory = written(tmp_path / "one")
    slots = AdapterSlots(model, 2, 4)
    adapters = LoadedAdapters(slots)
    adapters.prepare(digest, directory)
    assert ended(adapters) == {digest: None} and adapters.ready() == {}
    adapters.put(digest, 2)
    assert slots.digests == {2: digest}
    used = [pairs for pairs in slots.pairs if pairs.used]
    assert [pairs.shard.parts[0].name for pairs in used] == ["model.layers.1.self_attn.q_proj"]
    assert used[0].a[1].any() and not used[0].a[0].any()
    adapters.put(digest, 1)  # it is in one slot at a time
    assert slots.digests == {1: digest} and not used[0].a[1].any()
    adapters.drop(digest)
    assert slots.digests == {} and not any(pairs.a.any() or pairs.used for pairs in slots.pairs)
    with pytest.raises(AdapterError, match="never prepared"):
        adapters.put(digest, 1)
    adapters.close()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_files_that_changed_are_not_loaded(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    digest, directory = written(tmp_path / "one")

    def change() -> None:
        write(tmp_path / "one", halves("model.layers.0.self_attn.q_proj", 8, 8))

    def read(adapter: Adapter, slots: AdapterSlots, on_read: OnRead) -> HostAdapter:
        change()
        return read_adapter(adapter, slots, on_read)

    if when == "before":
        change()
    else:
        monkeypatch.setattr("oarlock.workers.lora.loaded_adapters.read_adapter", read)
    adapters = LoadedAdapters(AdapterSlots(model, 1, 4))
    adapters.prepare(digest, directory)
    (reason,) = ended(adapters).values()
    assert reason is not None and "have changed" in reason
    with pytest.raises(AdapterError):
        adapters.put(digest, 1)
    adapters.close()


def test_a_tensor_that_experts_share_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, module, count = spec_of("Qwen3MoeForCausalLM"), "model.layers.1.mlp.experts", 3
    shapes = halves(module, 6, 8, 2 * count) | halves(f"{module}.base_layer", 8, 12, 2 * count)
    write(tmp_path / "one", shapes, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    model = Decoder(spec, TensorParallel.solo(), torch.float32, torch.device("cpu"))
    model.load(DummyWeights(0), lambda share: None)
    read: list[str] = []
    once = FileReader.fill

    def counted(reader: FileReader, path: Path, begin: int, into: torch.Tensor, name: str, on_read: OnRead) -> None:
        read.append(name)
        once(reader, path, begin, into, name, on_read)

    monkeypatch.setattr(FileReader, "fill", counted)
    host = read_adapter(Adapter.open(tmp_path / "one", spec), AdapterSlots(model, 1, 4))
    assert sorted(read) == sorted(shapes) and host.pairs


def test_a_rank_above_the_slots_is_refused(model: Decoder, tmp_path: Path) -> None:
    _, directory = written(tmp_path / "one")
    with pytest.raises(StartupError, match="--max-lora-rank 2"):
        read_adapter(Adapter.open(Path(directory), model.spec), AdapterSlots(model, 1, 1))


def test_a_rank_without_experts_takes_adapters_of_experts(tmp_path: Path) -> None:
    spec = spec_of("Qwen3MoeForCausalLM", num_experts=1, num_experts_per_tok=1)
    write(tmp_path / "one", halves("model.layers.0.mlp.experts.0.up_proj", 8, 6))
    adapter, found = Adapter.open(tmp_path / "one", spec), []
    for rank in range(2):
        model = Decoder(spec, TensorParallel(rank, 2), torch.float32, torch.device("cpu"), distributes_experts=True)
        model.load(DummyWeights(0), lambda share: None)
        slots = AdapterSlots(model, 2, 4)
        slots.put(read_adapter(adapter, slots), 2)
        found.append(any(pairs.used for pairs in slots.pairs))
        slots.clear(2)
        assert not any(pairs.used for pairs in slots.pairs)
    assert found == [True, False]


def test_a_value_that_is_not_finite_is_refused(model: Decoder, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    shapes = halves("model.layers.1.self_attn.q_proj", 8, 8)
    tensors = write(folder, shapes)
    name = next(iter(shapes))
    file = folder / "adapter_model.safetensors"
    data = file.read_bytes()
    stored = tensors[name].numpy().tobytes()
    assert data.count(stored) == 1
    file.write_bytes(data.replace(stored, b"\x00\x00\xc0\x7f" + stored[4:]))  # the first value is NaN
    with pytest.raises(StartupError, match="NaN"):
        read_adapter(Adapter.open(folder, model.spec), AdapterSlots(model, 1, 4))


@contextmanager
def leased(file: Path) -> Iterator[Callable[[], bool]]:
    """A lease, because of which the kernel blocks other threads as they open the file, up to 45 seconds.

    Yields whether a read has made all its progress.
    """
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    with file.open("r+b") as held:
        fcntl(held, F_SETLEASE, F_WRLCK)
        try:
            yield lambda: True  # a read makes none before
        finally:
            fcntl(held, F_SETLEASE, F_UNLCK)
            signal.signal(signal.SIGIO, before)


@contextmanager
def slow_reader(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bool]]:
    """A disk that is silent in the middle of the adapter. Yields whether a read has come there."""
    begun, responds, fill = threading.Event(), threading.Event(), FileReader.fill

    def blocked(reader: FileReader, path: Path, begin: int, into: torch.Tensor, name: str, on_read: OnRead) -> None:
        if path.parent == file.parent:
            begun.set()
            assert responds.wait(30)
        fill(reader, path, begin, into, name, on_read)

    with monkeypatch.context() as patch:
        patch.setattr(FileReader, "fill", blocked)
        yield partial(begun.wait, 10)
        responds.set()


def await_threads(count: int) -> None:
    """Wait until `count` threads read files."""
    until = time.monotonic() + 10
    while sum(thread.name == "files" for thread in threading.enumerate()) != count:
        assert time.monotonic() < until, "a thread stays"
        time.sleep(0.001)


@pytest.mark.parametrize("kind", ["at the settings, by the kernel", "at a tensor"])
def test_an_adapter_on_a_hung_disk_delays_no_other(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its late end does no harm, and then it can be loaded."""
    clock = SimpleNamespace(now_s=1.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(watched_reads, "time", clock)
    hung, good = written(tmp_path / "hung"), written(tmp_path / "good", 0)
    settings = tmp_path / "hung" / "adapter_config.json"
    disk = leased(settings) if "kernel" in kind else slow_reader(settings, monkeypatch)
    slots = AdapterSlots(model, 1, 4)
    adapters = LoadedAdapters(slots)
    with disk as is_silent:
        adapters.prepare(*hung)
        adapters.prepare(*good)
        assert is_silent() and adapters.ready() == {}
        clock.now_s += 1.0
        assert ended(adapters) == {good[0]: None} and gc.isenabled()
        adapters.put(good[0], 1)
        clock.now_s += STALL_S - 1.0
        assert ended(adapters) == {hung[0]: STALLED} and adapters.prepared == [good[0]]
        adapters.prepare(*hung)  # its thread is still blocked
        assert ended(adapters) == {hung[0]: STALLED}
        await_threads(1)
        with pytest.raises(AdapterError, match="never prepared"):
            adapters.put(hung[0], 1)
    await_threads(0)
    assert adapters.ready() == {} and slots.digests == {1: good[0]} and adapters.prepared == [good[0]]
    adapters.prepare(*hung)
    assert ended(adapters) == {hung[0]: None}
    adapters.put(hung[0], 1)
    assert slots.digests == {1: hung[0]}
    adapters.close()
