"""Modules that adapters may update, and their memory in slots: of every family, and for each module alone."""

from pathlib import Path

import pytest
import torch

from oarlock.base.errors import StartupError
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.decoder_spec import tensors_of
from oarlock.workers.lora.adapter_file import Adapter
from oarlock.workers.lora.adapter_slots import AdapterSlots, slot_bytes
from oarlock.workers.lora.rank_adapter import read_adapter
from oarlock.workers.lora.target_modules import (
    EXPERTS,
    can_be_adapted,
    check_adapter,
    resolved_targets,
    target_of,
    targets_of,
)
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.models.registry import read_spec
from oarlock.workers.runner.memory_needs import adapter_slot_bytes
from oarlock.workers.weights.source import DummyWeights
from tests.golden.tiny_models import DESCRIBED, FAMILIES, MIXTURES, RECURRENT, make_tiny
from tests.unit.workers.lora.adapter_cases import halves, spec_of, write

RANK = 8
# Families whose linear layers are put together differently: shared experts, recurrent layers, inputs of each layer.
DIFFERENT = ("gemma4_text", "granitemoeshared", "nemotron_h", "qwen3_next")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in DIFFERENT else pytest.mark.soak)
        for name in dict.fromkeys((*DIFFERENT, *FAMILIES, *MIXTURES, *DESCRIBED, *RECURRENT))
    ],
)
def test_bytes_of_slots_are_known_before_for_each_module(tmp_path: Path, family: str) -> None:
    spec = read_spec(str(make_tiny(tmp_path, family)))
    adapted = [tensor for tensor in tensors_of(spec) if can_be_adapted(tensor)]
    of_experts = {tensor.name for tensor in adapted if tensor.expert is not None}
    assert of_experts == {one.name for one in adapted if target_of(one.name.removesuffix(".weight")) == EXPERTS}
    config = WorkerConfig("", device="cpu", dtype="bfloat16", max_loras=1, max_lora_rank=RANK)
    layouts = [(size, whole) for size in spec.tp_sizes for whole in {False, bool(of_experts)}]
    for size, whole in layouts:
        tp = TensorParallel(0, size, None)
        model = Decoder(spec, tp, torch.bfloat16, torch.device("cpu"), distributes_experts=whole)
        config = config.with_(tensor_parallel_size=size, enable_expert_parallel=whole)
        for targets in (None, *((target,) for target in targets_of(spec))):
            of_slot = slot_bytes(model, RANK, targets)
            assert adapter_slot_bytes(config.with_(lora_target_modules=targets), spec) == of_slot > 0


@pytest.mark.parametrize(("module", "outputs"), [("gate", 3), ("shared_expert_gate", 1)])
def test_routers_are_refused_by_name(tmp_path: Path, module: str, outputs: int) -> None:
    """PEFT's `all-linear` adapts them."""
    spec = spec_of("Qwen3NextForCausalLM")
    write(tmp_path, halves(f"model.layers.1.mlp.{module}", 8, outputs))
    with pytest.raises(StartupError, match=rf"updates model\.layers\.1\.mlp\.{module}, .* or merge the adapter"):
        check_adapter(Adapter.open(tmp_path, spec), spec, RANK, None)


def test_names_choose_modules() -> None:
    spec = spec_of("Qwen3NextForCausalLM")
    assert resolved_targets(["in_proj_ba", "experts", "q_proj"], spec) == (
        "in_proj_b", "in_proj_a", "experts", "q_proj"
    )  # fmt: skip
    for wrong in ("conv1d", "gate", "norm", "layers", "", "x" * 500):
        with pytest.raises(StartupError, match=r"no such module that adapters update\. Choose among embed_tokens, in"):
            resolved_targets(["q_proj", wrong], spec)
    with pytest.raises(StartupError, match="is empty"):
        resolved_targets([], spec)


def test_a_rank_refuses_an_adapter_of_modules_that_were_not_chosen(tmp_path: Path) -> None:
    """Also of a module that has memory, since a chosen module shares it."""
    model = Decoder(spec_of("LlamaForCausalLM"), TensorParallel.solo(), torch.float32, torch.device("cpu"))
    model.load(DummyWeights(0), lambda share: None)
    slots = AdapterSlots(model, 1, 4, ("q_proj",))
    assert {part.name for shard in slots.shards for part in shard.parts} == {
        f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(2) for part in "qkv"
    }
    chosen = halves("model.layers.1.self_attn.q_proj", 8, 8)
    write(tmp_path / "one", chosen)
    (pair,) = read_adapter(Adapter.open(tmp_path / "one", model.spec), slots).pairs.values()
    assert len(pair) == 1
    write(tmp_path / "two", chosen | halves("model.layers.1.self_attn.k_proj", 8, 4))
    with pytest.raises(StartupError, match="updates k_proj, and --lora-target-modules leaves it out"):
        read_adapter(Adapter.open(tmp_path / "two", model.spec), slots)
