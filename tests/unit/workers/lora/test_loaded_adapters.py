"""Adapters of one rank: read in the background, copied into slots, and forgotten."""

import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from oarlock.base.errors import StartupError
from oarlock.workers.adapters import AdapterError
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


def written(folder: Path) -> tuple[str, str]:
    """The digest and the directory of an adapter."""
    write(folder, halves("model.layers.1.self_attn.q_proj", 8, 8))
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

    def read(adapter: Adapter, slots: AdapterSlots) -> HostAdapter:
        change()
        return read_adapter(adapter, slots)

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
    once = FileReader.read

    def counted(reader: FileReader, path: Path, begin: int, into: torch.Tensor, name: str) -> Future[None]:
        read.append(name)
        return once(reader, path, begin, into, name)

    monkeypatch.setattr(FileReader, "read", counted)
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
