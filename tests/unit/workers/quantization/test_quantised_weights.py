"""Every stored form: the ranks' parts, joined, are exactly the stored weight, at every number of ranks."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.embedding import vocab_shard
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.models.hf_fields import read_config
from oarlock.workers.models.hf_quantization import stored_quantization, weight_formats
from oarlock.workers.models.registry import read_spec
from oarlock.workers.preflight import preflight
from oarlock.workers.quantization.formats.checkpoint_formats import dequantised_formats
from oarlock.workers.quantization.fp8 import Fp8Weight
from oarlock.workers.quantization.grouped import GroupedWeight
from oarlock.workers.quantization.int8 import Int8Weight
from oarlock.workers.quantization.method import DenseWeight, LinearWeight, StackedWeight, WeightShard
from oarlock.workers.quantization.packed_integers import regroup
from oarlock.workers.quantization.weight_only import WeightOnly
from oarlock.workers.verify.dequantise import StoredTensors, dequantised
from oarlock.workers.weights.reader import WeightReader
from tests.golden.quantised import CASES, Quantised, write
from tests.golden.tiny_models import make_tiny
from tests.unit.workers.weights_in_memory import RecordingRank

# Inputs of down_proj: 96 for each of four ranks, which cuts groups of 64 and 128.
SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
OF_PRODUCTS = [name for name, case in CASES.items() if case.family is None]  # and not of experts alone


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Quantised]:
    @cache
    def made(name: str) -> Quantised:
        case, folder = CASES[name], tmp_path_factory.mktemp(name)
        return write(make_tiny(folder, "phi3" if case.fused else "qwen2", **SHAPE), folder, case)

    return made


def in_order(weight: LinearWeight, inputs: int) -> Tensor:
    """Any form's weight as numbers, each at its own input: float64 [N, K]."""
    if isinstance(weight, StackedWeight):
        return torch.cat([in_order(part, inputs) for part in weight.parts])
    if isinstance(weight, DenseWeight):
        return weight.tensor.double()
    if isinstance(weight, Int8Weight):
        return weight.values.double() * weight.scales.double().unsqueeze(1)
    if isinstance(weight, Fp8Weight):
        group = torch.arange(inputs) // weight.group
        return weight.values.double() * weight.scales.double()[:, group]
    assert isinstance(weight, GroupedWeight)
    numbers = weight.weight.dequantised().double()
    if weight.order is None:
        return numbers
    return torch.zeros(len(numbers), inputs, dtype=torch.float64).index_add_(1, weight.order, numbers)


def shards_of(decoder: Decoder) -> list[WeightShard]:
    layers = [(layer.attention.qkv, layer.attention.output, *layer.mlp.parts) for layer in decoder.layers]
    return [part.weight_shard for layer in layers for part in layer] + [vocab_shard(decoder.head)]


def from_ranks(path: Path, size: int, written_out_for: str | None = None) -> dict[str, Tensor]:
    """module -> the weight, of which each rank has loaded its part: float64 [N, K]. `written_out_for`: a device whose
    products would round inputs."""
    checkpoint = Checkpoint.open(path)
    formats = weight_formats("none", stored_quantization(path, read_config(path)), checkpoint)
    if written_out_for is not None:
        formats = dequantised_formats(formats, written_out_for)
    found: dict[str, Tensor] = {}
    for rank in range(size):
        tp = TensorParallel.solo() if size == 1 else RecordingRank(rank, size)
        decoder = Decoder(read_spec(str(path)), tp, torch.float32, torch.device("cpu"), formats)
        with WeightReader(checkpoint) as weights:
            for shard in shards_of(decoder):
                loaded = decoder.placement.load(shard, weights)
                assert written_out_for is None or isinstance(loaded, DenseWeight)
                numbers = in_order(loaded, shard.local_inputs)
                assert len(numbers) == shard.rows
                columns = slice(shard.first_input, shard.first_input + shard.local_inputs)
                *own_rows, _ = numbers.split([part.count for part in shard.parts] + [shard.padding])
                for part, own in zip(shard.parts, own_rows, strict=True):
                    whole = found.setdefault(part.name, torch.full((part.rows, shard.inputs), torch.nan).double())
                    whole[part.first : part.first + part.count, columns] = own
                assert not numbers[shard.rows - shard.padding :].any()
    return found


def by_part(weights: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fused weights in their parts, as long as those that the ranks have."""
    parts = dict(weights)
    for name in weights:
        above, _, module = name.rpartition(".")
        for fused, names in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
            if module == fused:
                names = [f"{above}.{part}" for part in names]
                parts |= dict(zip(names, parts.pop(name).split([len(found[part]) for part in names]), strict=True))
    return parts


@pytest.mark.parametrize("name", OF_PRODUCTS)
def test_the_ranks_have_the_stored_numbers(quantised: Callable[[str], Quantised], name: str) -> None:
    made = quantised(name)
    for size in (1, 2, 4):
        found = from_ranks(made.path, size)
        expected = by_part(made.weights, found)
        assert expected
        for module, weight in expected.items():
            assert torch.equal(found[module].float(), weight.float()), f"{module} at {size} ranks"


WRITTEN_OUT = {"gptq-4-64-asym": "cpu", "gptq-8-32-asym-act": "cpu", "gptq-4-32-fused": "cpu", "awq-64-fused": "cpu",
               "packed-4-32-asym-act": "cpu", "packed-8-channel": "cpu", "integers-channel-asym": "cpu",
               "integers-tensor": "cpu", "floats-channel": "cuda", "fp8-tensor": "cuda"}  # fmt: skip


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_written_out_weights_are_the_stored_numbers(
    quantised: Callable[[str], Quantised], name: str, size: int
) -> None:
    """Parts with inputs in orders of their own make one weight, too."""
    made = quantised(name)
    found = from_ranks(made.path, size, WRITTEN_OUT[name])
    for module, weight in by_part(made.weights, found).items():
        assert torch.equal(found[module].float(), weight.float()), f"{module} at {size} ranks"


@pytest.mark.parametrize("name", OF_PRODUCTS)
def test_the_plain_reader_has_them_too(quantised: Callable[[str], Quantised], name: str) -> None:
    made = quantised(name)
    stored = StoredTensors(made.path)
    for module, weight in made.weights.items():
        found = dequantised(stored, module)
        assert found.dtype == torch.float64 and torch.equal(found, weight), module
    for left in CASES[name].left:
        module = next(m for m in (f"model.layers.{left}", f"model.{left}") if m not in made.weights)
        assert dequantised(stored, module).dim() == 2


def tensors_of(weight: LinearWeight) -> list[Tensor]:
    """Tensors of a weight on a device."""
    if isinstance(weight, StackedWeight):
        return [tensor for part in weight.parts for tensor in tensors_of(part)]
    if isinstance(weight, DenseWeight):
        return [weight.tensor]
    assert isinstance(weight, WeightOnly)
    stored = weight.stored
    return [
        part for part in (stored.values, stored.scales, stored.zeros, stored.factors, weight.order) if part is not None
    ]


@pytest.mark.parametrize(
    ("name", "rounded"), [*((name, "none") for name in OF_PRODUCTS), ("nf4", "int8"), ("nf4", "int4")]
)
def test_all_of_it_comes_to_the_device(quantised: Callable[[str], Quantised], name: str, rounded: str) -> None:
    """On the device of no numbers, where no tensor of the CPU can be mixed in. `rounded`: of a plain checkpoint."""
    path = quantised(name).path if rounded == "none" else quantised(name).meaning
    checkpoint = Checkpoint.open(path)
    formats = weight_formats(rounded, stored_quantization(path, read_config(path)), checkpoint)
    decoder = Decoder(read_spec(str(path)), TensorParallel.solo(), torch.float16, torch.device("meta"), formats)
    with WeightReader(checkpoint, check_finite=False) as weights:
        for shard in shards_of(decoder):
            assert all(tensor.is_meta for tensor in tensors_of(decoder.placement.load(shard, weights)))


@pytest.mark.parametrize("name", OF_PRODUCTS)
def test_preflight_accepts_it_and_names_it(quantised: Callable[[str], Quantised], name: str) -> None:
    config = preflight(WorkerConfig(str(quantised(name).path), device="cpu"))
    assert config.quantization == CASES[name].settings["quant_method"]
    assert preflight(config) == config


@pytest.mark.parametrize(("inputs", "size", "slices"), [(96, 32, 4), (96, 96, 4), (192, 64, 8), (256, 32, 1)])
@pytest.mark.parametrize("mixed", [False, True])
def test_inputs_are_regrouped_alike_by_all_ranks(inputs: int, size: int, slices: int, mixed: bool) -> None:
    """Whatever does not divide: each rank's pieces are those that one rank has at the same place."""
    groups = torch.arange(inputs) // size
    if mixed:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(0))]
    whole = regroup(groups, slices, slice(0, inputs))
    assert whole.group % 16 == 0
    per_slice = len(whole.group_of) // slices
    for ranks in (1, 2, 4, 8):
        if slices % ranks:
            continue
        for rank in range(ranks):
            here = slice(rank * inputs // ranks, (rank + 1) * inputs // ranks)
            mine = regroup(groups, slices, here)
            pieces = slice(rank * slices // ranks * per_slice, (rank + 1) * slices // ranks * per_slice)
            assert mine.group == whole.group and torch.equal(mine.group_of, whole.group_of[pieces])
            own = torch.arange(inputs // ranks) if mine.inputs is None else mine.inputs
            there = torch.ones(len(own), dtype=torch.bool) if mine.filled_up is None else ~mine.filled_up
            assert torch.equal(own[there].sort().values, torch.arange(inputs // ranks)), "each input once"
            stored = groups[here][own]
            assert torch.equal(stored[there], mine.group_of.repeat_interleave(mine.group)[: len(own)][there])
            if whole.inputs is not None:
                expected = whole.inputs.view(slices, -1)[rank * slices // ranks : (rank + 1) * slices // ranks]
                assert torch.equal(own, (expected - here.start).flatten())
                length = len(own) * ranks // slices
                assert torch.equal(own // (inputs // slices), torch.arange(len(own)) // length), "each in its slice"
