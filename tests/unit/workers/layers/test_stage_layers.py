"""Which layers and tensors a pipeline stage holds."""

from dataclasses import replace
from pathlib import Path

import pytest

from oarlock.workers.config import StepCost, WorkerConfig, WorkerInfo
from oarlock.workers.layers.decoder_spec import is_in_stage, layers_of_stage, tensor_shapes
from oarlock.workers.models.registry import read_spec
from oarlock.workers.quantization.registry import NONE
from oarlock.workers.ranks.host_ranks import RankProgress
from oarlock.workers.ranks.multiproc_executor import first_stage_behind, joint_info
from oarlock.workers.runner.memory_needs import rank_weight_bytes, weight_bytes, weight_bytes_of_node
from tests.golden.tiny_models import make_tiny


@pytest.mark.parametrize("num_layers", [1, 4, 5, 7, 32])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_hold_all_layers_in_order_and_differ_by_one_at_most(num_layers: int, stages: int) -> None:
    parts = [layers_of_stage(num_layers, stage, stages) for stage in range(stages)]
    assert [layer for part in parts for layer in part] == list(range(num_layers))
    lengths = list(map(len, parts))
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_is_in_one_stage_but_a_tied_embedding(tmp_path: Path, tied: bool) -> None:
    spec = replace(read_spec(str(make_tiny(tmp_path, "llama", num_hidden_layers=5))), tie_word_embeddings=tied)
    parts = [tensor_shapes(spec, layers_of_stage(5, stage, 3)) for stage in range(3)]
    names = sorted(name for part in parts for name in part)
    assert names == sorted([*tensor_shapes(spec), *["model.embed_tokens.weight"] * tied])
    assert "model.embed_tokens.weight" in parts[0] and "model.norm.weight" in parts[2]
    assert not [name for name in parts[1] if not name.startswith("model.layers.")]


def test_a_tensor_belongs_to_its_layer_in_whatever_form_and_an_unknown_one_to_all(tmp_path: Path) -> None:
    spec = read_spec(str(make_tiny(tmp_path, "llama", num_hidden_layers=12)))
    first, last = range(6), range(6, 12)
    for name, where in {
        "model.layers.1.self_attn.qkv_proj.qweight": first,
        "model.layers.11.mlp.down_proj.weight_scale": last,
    }.items():
        assert [is_in_stage(spec, name, part) for part in (first, last)] == [where is first, where is last]
    for name in ("model.layers.12.mlp.up_proj.weight", "model.layers.x.weight", "model.other", "vision.weight"):
        assert is_in_stage(spec, name, last)
    assert is_in_stage(spec, "model.layers.12.mlp.up_proj.weight", first)


@pytest.mark.parametrize(
    ("ranks", "stages", "nodes"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2), (1, 4, 2), (2, 2, 4)]
)
def test_a_node_needs_memory_for_its_own_ranks(tmp_path: Path, ranks: int, stages: int, nodes: int) -> None:
    spec = read_spec(str(make_tiny(tmp_path, "qwen2", num_hidden_layers=5, tie_word_embeddings=True)))
    config = WorkerConfig("x", dtype="float32", tensor_parallel_size=ranks, pipeline_parallel_size=stages, nnodes=nodes)
    of_stage = [rank_weight_bytes(config, spec, NONE, stage) for stage in range(stages)]
    of_ranks = [of_stage[rank // ranks] for rank in range(ranks * stages)]
    each = len(of_ranks) // nodes
    most = max(sum(of_ranks[first : first + each]) for first in range(0, len(of_ranks), each))
    assert weight_bytes_of_node(config, spec, "float32", NONE) == most
    embedding = 4 * spec.vocab_size * spec.hidden_size
    whole = weight_bytes(spec, "float32") + embedding * (stages > 1)
    if ranks == 1:
        assert sum(of_stage) == whole
    else:
        assert whole < ranks * sum(of_stage) < 1.1 * whole, "norms are on every rank"


def info(**changes) -> WorkerInfo:
    one = WorkerInfo(100, 16, 64, 300, 2, "cpu", "bfloat16", "cpp", "Tiny", 5, 10, 20, 1.5)
    return replace(one, pipeline_parallel_size=2, **changes)


def test_ranks_report_the_slowest_and_largest_and_stages_add_up() -> None:
    first, last = StepCost(1.0, 0.5, 0.25, 9.0), StepCost(2.0, 0.25, 0.125, 0.5, 0.3, 0.1)
    joint = joint_info(
        {
            0: info(step_cost=first, num_blocks=90),
            1: info(step_cost=first, load_seconds=7.0),
            2: info(step_cost=last, weight_bytes_per_rank=30, kv_bytes_per_token_per_rank=10),
            3: info(step_cost=last, num_blocks=95),
        }
    )
    assert joint.step_cost == StepCost(3.0, 0.75, 0.375, 0.5, 0.3, 0.1)  # the first has no experts
    assert (joint.num_blocks, joint.load_seconds) == (90, 7.0)
    assert (joint.weight_bytes_per_rank, joint.kv_bytes_per_token_per_rank) == (30, 20)
    assert joint_info({0: info(step_cost=first), 1: info(), 2: info(), 3: info()}).step_cost is None


def test_stages_without_attention_do_not_hide_the_backends_of_others() -> None:
    for names, joint in (
        (("none", "cpp"), "cpp"),
        (("cpp", "reference, cpp"), "cpp, reference"),
        (("none", "none"), "none"),
    ):
        infos = {rank: info(attention_backend=name) for rank, name in enumerate(names)}
        assert joint_info(infos).attention_backend == joint


def test_the_first_of_stages_that_wait_for_each_other_is_examined() -> None:
    """By steps finished: whoever hangs in a stage holds up all stages behind it, and those ahead have finished more."""
    for finished, stage in {(4, 4, 4, 4): range(2), (5, 5, 4, 4): range(2, 4), (5, 4, 4, 4): range(2)}.items():
        places = [RankProgress(number, 9 - rank, 7) for rank, number in enumerate(finished)]
        assert first_stage_behind(places, 2) == stage
    assert first_stage_behind([RankProgress(5, 0, 0), RankProgress(4, 3, 9), RankProgress(4, 0, 0)], 1) == range(1, 2)
    assert first_stage_behind([RankProgress(5, 0, 0), RankProgress(4, 3, 9)], 2) == range(2)
