"""The whole shard: the weights it reads, its reports, and that a token's numbers do not depend on others."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.workers.attention.backend import AttentionBackend, AttentionSpec, LayerKV
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.attention.reference import ReferenceBackend
from oarlock.workers.attention.torch_backend import TorchBackend
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.cpu import library
from oarlock.workers.model_files.checkpoint import SINGLE_FILE, Checkpoint
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.models.registry import read_spec
from oarlock.workers.preflight import preflight
from oarlock.workers.quantization.matmul import can_pack
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.weights.reader import WeightReader
from oarlock.workers.weights.source import DummyWeights
from tests.golden.paged_run import PagedRun, load_decoder, on_ranks
from tests.golden.tiny_models import FAMILIES, make_tiny

CPU = torch.device("cpu")


def edit(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors (double underscores stand for dots), or drop those given as None."""
    tensors = load_file(path / SINGLE_FILE)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, path / SINGLE_FILE)


def test_a_missing_tensor_fails_at_the_layer_that_wants_it(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, "qwen2")
    edit(path, model__layers__1__self_attn__k_proj__bias=None)
    with pytest.raises(StartupError, match=r"no tensor 'model\.layers\.1\.self_attn\.k_proj\.bias'"):
        load_decoder(path, TensorParallel.solo())


def test_a_tensor_without_a_place_is_an_error(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, "llama")
    edit(path, model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    with pytest.raises(StartupError, match=r"does not use: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_decoder(path, TensorParallel.solo())


@pytest.mark.parametrize(
    ("family", "missing", "foreign"),
    [
        ("gemma2", "model.layers.1.post_feedforward_layernorm.weight", "model.layers.0.self_attn.q_norm.weight"),
        ("gemma3_text", "model.layers.2.self_attn.k_norm.weight", "model.layers.0.self_attn.q_proj.bias"),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_proj.weight"),
    ],
)
def test_before_a_rank_starts_a_family_knows_its_tensors(
    tmp_path: Path, family: str, missing: str, foreign: str
) -> None:
    """A fused tensor that is missing is missed as its first part."""
    path = make_tiny(tmp_path, family)
    config = WorkerConfig(str(path), device="cpu")
    preflight(config)
    edit(path, **{foreign: torch.zeros(24)})
    with pytest.raises(StartupError, match=f"holds tensor '{re.escape(foreign)}', which .* does not use"):
        preflight(config)
    edit(path, **{foreign: None, missing: None})
    with pytest.raises(StartupError, match=re.escape(missing.replace("qkv_proj", "q_proj"))):
        preflight(config)


def test_longrope_is_loaded_for_the_length_it_serves(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    path = make_tiny(tmp_path, "phi3", original_max_position_embeddings=64,
                     rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors})  # fmt: skip
    config = WorkerConfig(str(path), device="cpu")
    assert preflight(config).max_model_len == 64
    for length, stretched in ((64, False), (65, True), (512, True)):
        runner = ModelRunner(preflight(config.with_(max_model_len=length)), TensorParallel.solo())
        assert runner.spec.attentions[0].rope.stretched is stretched
    with pytest.raises(StartupError, match="513 is more than the model's 512 positions"):
        preflight(config.with_(max_model_len=513))


def test_harmless_leftovers_load(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, "qwen2", tie_word_embeddings=True)
    embedding = load_file(path / SINGLE_FILE)["model.embed_tokens.weight"]
    edit(path, lm_head__weight=embedding, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4))
    load_decoder(path, TensorParallel.solo())


@pytest.mark.parametrize(
    ("family", "ahead"),
    [("glm4_moe", "model.layers.3.eh_proj.weight"), ("ernie4_5_moe", "model.mtp_block.0.norm.weight")],
)
def test_multi_token_prediction_weights_stay_unused(tmp_path: Path, family: str, ahead: str) -> None:
    """GLM-4.5 has it as layers beyond its own, which the configuration counts."""
    path = make_tiny(tmp_path, family)
    edit(path, **{ahead: torch.zeros(4)})
    preflight(WorkerConfig(str(path), device="cpu"))
    load_decoder(path, TensorParallel.solo())
    edit(path, **{"model.layers.4.eh_proj.weight": torch.zeros(4)})
    with pytest.raises(StartupError, match=r"does not use: model\.layers\.4\.eh_proj"):
        load_decoder(path, TensorParallel.solo())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_and_sharded_files_load_like_separate_ones(tmp_path: Path, family: str) -> None:
    tokens = list(range(20))
    plain = make_tiny(tmp_path, family)
    shards = make_tiny(tmp_path, family, max_shard_size="100KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    fused = make_tiny(tmp_path, family)
    tensors = load_file(fused / SINGLE_FILE)
    for layer in range(3):
        for whole, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            for kind in ("weight", "bias"):
                names = [f"model.layers.{layer}.{whole.split('.')[0]}.{part}_proj.{kind}" for part in parts]
                if names[0] in tensors:
                    tensors[f"model.layers.{layer}.{whole}.{kind}"] = torch.cat([tensors.pop(n) for n in names])
    save_file(tensors, fused / SINGLE_FILE)
    size = (2, 8)[FAMILIES.index(family) % 2]
    texts = [
        on_ranks(size, lambda tp, path=path: PagedRun(load_decoder(path, tp)).step({0: tokens})[0])[0]
        for path in (plain, shards, fused)
    ]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


def test_adapters_and_encoders_inside_a_checkpoint_stay_unread(tmp_path: Path) -> None:
    """Phi-4 multimodal as Microsoft stores it."""
    plain = make_tiny(tmp_path, "phi4_multimodal")
    other = make_tiny(tmp_path, "phi4_multimodal")
    tensors, stored = load_file(plain / SINGLE_FILE), {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if ".layers." in name and module.endswith("_proj") and "extend" not in name:
            stored[f"{module}.base_layer.{kind}"] = tensor
            for part, shape in (("A", (4, tensor.shape[1])), ("B", (tensor.shape[0], 4))):
                stored[f"{module}.lora_{part}.vision.weight"] = torch.ones(shape)
        else:
            stored[name] = tensor
    save_file(stored, other / SINGLE_FILE)
    config = json.loads((other / "config.json").read_text()) | {"architectures": ["Phi4MMForCausalLM"]}
    (other / "config.json").write_text(json.dumps(config))
    texts = [
        on_ranks(2, lambda tp, path=path: PagedRun(load_decoder(path, tp)).step({0: list(range(20))})[0])[0]
        for path in (plain, other)
    ]
    assert torch.equal(*texts)


@pytest.mark.parametrize("tied", [False, True])
def test_reported_sizes_match_the_memory_in_use(tmp_path: Path, tied: bool) -> None:
    path = make_tiny(tmp_path, "qwen2", tie_word_embeddings=tied)
    spec = read_spec(str(path))
    one = load_decoder(path, TensorParallel.solo())
    assert one.num_parameters == spec.num_parameters
    copies = tied and library.why_not() is not None and can_pack(torch.float32, "cpu")  # oneDNN's form of the head
    second_form = spec.vocab_size * spec.hidden_size if copies else 0
    assert one.weight_bytes == 4 * (spec.num_parameters + second_form)
    halves = [Decoder(spec, TensorParallel(rank, 2), torch.bfloat16, CPU) for rank in range(2)]
    head = spec.vocab_size * spec.hidden_size if tied else 0  # counted until it is known to share its memory
    assert halves[0].weight_bytes < 0.55 * 2 * (spec.num_parameters + head)
    assert [half.vocab_start for half in halves] == [0, 160] and halves[1].vocab_local == 160
    (kv,) = halves[1].kv_specs(16)
    assert (kv.num_layers, kv.num_kv_heads, kv.head_dim, kv.block_size, kv.dtype) == (3, 2, 8, 16, torch.bfloat16)
    eighth = Decoder(spec, TensorParallel(7, 8), torch.float32, CPU)  # more ranks than KV heads
    assert eighth.kv_specs(16)[0].num_kv_heads == 1


def test_progress_rises_to_one(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, "qwen3")
    heard: list[float] = []
    decoder = Decoder(read_spec(str(path)), TensorParallel.solo(), torch.float32, CPU)
    with WeightReader(Checkpoint.open(path)) as weights:
        decoder.load(weights, heard.append)
    assert heard == sorted(heard) and heard[-1] == 1.0 and heard[0] < 0.5 and len(heard) > 10


@pytest.mark.slow
def test_noise_gives_the_same_model_at_every_number_of_ranks(tmp_path: Path) -> None:
    spec = read_spec(str(make_tiny(tmp_path, "qwen2", tie_word_embeddings=True, vocab_size=303)))

    def logits(tp: TensorParallel) -> torch.Tensor:
        decoder = Decoder(spec, tp, torch.float32, CPU)
        decoder.load(DummyWeights(3), lambda share: None)
        return PagedRun(decoder).step({0: list(range(30))})[0]

    whole = on_ranks(1, logits)[0]
    assert whole.std() > 1e-3
    for size in (2, 4, 8):
        torch.testing.assert_close(on_ranks(size, logits)[0], whole, rtol=1e-4, atol=1e-5)


class SelfBackend(ReferenceBackend):
    """A token attends only to itself, without arithmetic, so that differences come from the rest of the model."""

    def attend(self, q: Tensor, kv: LayerKV, plan: Any, layer: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        own = kv.v.flatten(0, 1)[self.batch.slots[self.spec.group]]
        return own.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1).flatten(1)

    def prepare(self, batch: ForwardBatch) -> list:
        self.batch = batch
        return []


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(SelfBackend, torch.float32), (SelfBackend, torch.bfloat16), (TorchBackend, torch.bfloat16)],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2"])
def test_a_tokens_logits_do_not_depend_on_the_batch(
    tmp_path: Path, family: str, backend: type[AttentionBackend], dtype: torch.dtype
) -> None:
    """Bit by bit: alone or among others, in one piece or in chunks."""
    if not can_pack(dtype, "cpu"):
        pytest.skip(f"this processor packs no {dtype}")
    path = make_tiny(tmp_path, family, hidden_size=288, intermediate_size=608, head_dim=32)
    decoder = load_decoder(path, TensorParallel.solo(), dtype)
    tokens = [(7 * index) % 300 for index in range(40)]
    with torch.inference_mode():
        alone = PagedRun(decoder, backend).step({0: tokens})[0]
        crowd = PagedRun(decoder, backend)
        pieces = []
        for number, (start, end) in enumerate(((0, 13), (13, 14), (14, 31), (31, 32), (32, 40))):
            others = {10 * number + other: tokens[other : other + 9 * other] for other in range(1, 4)}
            pieces.append(crowd.step({**others, 0: tokens[start:end]})[0])
        assert torch.equal(torch.cat(pieces), alone)
