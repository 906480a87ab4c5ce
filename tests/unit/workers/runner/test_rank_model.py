"""The runner needs of a model only the methods and attributes of `RankModel`."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, AttentionSpec, KVSpec, LayerMemory
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.attention.rows_by_slot import RowsBySlot
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.distributed.pipeline_stage import PipelineStage
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.linear import RowParallelLinear
from oarlock.workers.layers.placement import Placement
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.models.rank_model import RankModel
from oarlock.workers.preflight import preflight
from oarlock.workers.runner import decoder_loading, step_building
from oarlock.workers.runner.eager_steps import EagerSteps
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.runner.trial_steps import SequenceChunk, greedy_step
from oarlock.workers.transformers_backend.class_description import AttentionCall, ClassDescription, ClassTensor
from oarlock.workers.weights.source import WeightSource
from tests.golden.tiny_models import make_tiny

NAMES = {name for name in vars(RankModel) if not name.startswith("_")}
PROMPT = [5, 17, 3, 3, 40, 8, 21, 60, 2]


class OnlyProtocol:
    """A `Decoder` of which only the members of `RankModel` can be used."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        assert name in NAMES, f"RankModel has no {name}"
        return getattr(self._decoder, name)

    def __call__(self, *inputs: Any) -> Tensor:
        return self._decoder(*inputs)

    def with_layers(self, layers: list[int]) -> "OnlyProtocol":
        return OnlyProtocol(self._decoder.with_layers(layers))


class WholeModel:
    """A `RankModel` that cannot run without some of its layers, which are attention to the embedding of tokens."""

    is_first = is_last = True
    why_not_prepared = why_not_captured = "another code computes the model"
    vocab_start = 0
    reference = None

    def __init__(
        self,
        spec: DecoderSpec,
        description: ClassDescription,
        config: WorkerConfig,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        formats: Any,
    ) -> None:
        self.spec, self.groups, self.stage = spec, spec.groups, range(spec.num_layers)
        self.placement = Placement(tp, dtype, device, formats)
        self.vocab_local, self.weight_bytes = spec.vocab_size, spec.num_parameters * dtype.itemsize
        self._heads = [
            AttentionSpec(call.layer, call.heads, call.kv_heads, call.key_width, 1.0) for call in description.attention
        ]

    def kv_specs(self, block_size: int, cache_dtype: str = "auto") -> list[KVSpec]:
        one, place = self._heads[0], self.placement
        sizes = len(self._heads), one.num_kv_heads, one.head_dim, block_size
        return [KVSpec(*sizes, place.dtype, place.device, cache_dtype)]

    def load(self, weights: WeightSource, on_progress: Callable[[float], None]) -> None:
        shape = self.spec.vocab_size, self.spec.hidden_size
        self._table = self.placement.empty(*shape)
        weights.take("embed.weight", self._table, shape=shape)
        self._table.mul_(50)
        on_progress(1.0)

    def stand_in(self, token_ids: Tensor) -> None:
        pass

    def __call__(
        self,
        batch: ForwardBatch,
        memory: list[LayerMemory],
        backends: Mapping[int, AttentionBackend],
        plans: Mapping[int, Any],
        hidden: Tensor | None = None,
    ) -> Tensor:
        assert hidden is None and len(memory) == len(self.stage)
        hidden = self._table[batch.token_ids]
        for layer, own in zip(self._heads, memory, strict=True):
            assert own.kv is not None
            heads = hidden.view(len(hidden), layer.num_heads, layer.head_dim)
            kept = heads[:, : layer.num_kv_heads].contiguous()
            backends[0].write(own.kv, kept, kept, batch)
            hidden = hidden + backends[0].attend(heads, own.kv, plans[0], layer).flip(1)
        return hidden

    def compute_logits(self, hidden: Tensor, adapters: RowsBySlot | None = None) -> Tensor:
        return hidden @ self._table.T

    def one_of_each_kind(self) -> list[int]:
        return list(self.stage)

    def with_layers(self, layers: list[int]) -> "WholeModel":
        assert layers == list(self.stage)
        return self

    def mixtures(self) -> tuple[()]:
        return ()

    def summed_outputs(self) -> list[RowParallelLinear]:
        raise AssertionError("bits depend on the number of ranks")

    def why_not_rank_invariant(self, memory: list[LayerMemory], backends: Mapping[int, AttentionBackend]) -> str:
        return "its ranks add up in an order of their own"


def started(config: WorkerConfig) -> ModelRunner:
    runner = ModelRunner(config, TensorParallel.solo())
    runner.load(lambda share: None)
    runner.allocate(runner.num_blocks_that_fit())
    return runner


def next_tokens(runner: ModelRunner, cut: int = 0) -> list[int]:
    """Return the most likely token after each token of the prompt. The tokens before `cut` are a step by themselves."""
    found: list[int] = []
    for start, stop in ((0, cut), (cut, len(PROMPT))):
        if start < stop:
            chunk = SequenceChunk(PROMPT[start:stop], start, [1])
            output = runner.execute(greedy_step([chunk], runner.config.block_size, range(stop - start)))
            assert output is not None
            found += output.token_ids.tolist()
    return found


@pytest.mark.slow
def test_a_decoder_is_used_by_the_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny(tmp_path, "qwen2_moe", head_dim=16, decoder_sparse_step=1)
    asked = WorkerConfig(str(path), device="cpu", max_model_len=64, kv_cache_bytes=1 << 20, num_threads=1)
    config = preflight(asked)
    expected = started(config)
    monkeypatch.setattr(decoder_loading, "Decoder", lambda *values, **names: OnlyProtocol(Decoder(*values, **names)))
    runner = started(config)
    assert isinstance(runner.model, OnlyProtocol)
    assert next_tokens(runner) == next_tokens(expected)
    assert runner.rank_invariance.rank_invariant == expected.rank_invariance.rank_invariant
    assert "rows that crowd" in runner.invariance.reason or not expected.invariance.batch_invariant
    assert runner.time_steps().fixed_s >= 0 and runner.info().weight_bytes_per_rank == expected.model.weight_bytes


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A runner of a class that other code computes, with a description that preflight has resolved."""
    description = ClassDescription(
        "WholeForCausalLM",
        "whole",
        layers=2,
        vocab_size=64,
        hidden_size=64,
        longest_length=64,
        is_tied=True,
        attention=tuple(AttentionCall(layer, "", 4, 2, 16, 16, 1.0, None, None, False) for layer in range(2)),
        tensors=(ClassTensor("embed.weight", (64, 64), "embedding"),),
    )
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps({"architectures": [description.architecture]}), "utf-8")
    config = WorkerConfig(
        str(directory), device="cpu", dtype="float32", load_format="dummy", max_model_len=64, max_num_seqs=2,
        max_num_batched_tokens=64, block_size=16, kv_cache_bytes=1 << 20, num_threads=1, attention_backend="torch",
        served_class=description.encoded(),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        module = SimpleNamespace(TransformersModel=WholeModel)
        patch.setitem(sys.modules, "oarlock.workers.transformers_backend.model", module)
        return started(config)


def test_a_model_that_runs_only_as_a_whole_is_tested_and_timed(whole: ModelRunner) -> None:
    assert isinstance(whole.model, WholeModel) and whole.spec.served_by == "transformers"
    assert next_tokens(whole, cut=4) == next_tokens(whole) != PROMPT
    assert "ways" in whole.invariance.reason or "differ" in whole.invariance.reason
    assert not whole.rank_invariance.rank_invariant
    assert whole.rank_invariance.reason == "its ranks add up in an order of their own"
    assert whole.time_steps().fixed_s >= 0
    info = whole.info()
    assert (info.architecture, info.num_parameters, info.attention_backend) == ("WholeForCausalLM", 64 * 64, "torch")


@pytest.mark.parametrize("reason", [None, "its code reads lengths on the host"])
def test_a_model_that_graphs_cannot_contain_has_eager_steps_on_a_device(
    whole: ModelRunner, monkeypatch: pytest.MonkeyPatch, reason: str | None
) -> None:
    monkeypatch.setattr(step_building.availability, "can_serve", lambda device: True)
    monkeypatch.setattr(step_building, "device_steps", lambda *_: None)
    monkeypatch.setattr(whole.model, "why_not_captured", reason)
    steps = step_building.build_steps(whole.config, whole.model, whole.backends, PipelineStage.solo(), answers=True)
    assert steps is None if reason is None else isinstance(steps, EagerSteps)
