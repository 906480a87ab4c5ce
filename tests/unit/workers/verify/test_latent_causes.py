"""A planted fault of latent attention is named: the operation, the ranks, and the wrong operand."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from oarlock.workers.attention.cpp import CppBackend
from oarlock.workers.layers import latent_attention
from oarlock.workers.layers.latent_attention import LatentAttention
from oarlock.workers.layers.rotary import rotate_neighbours
from tests.golden import mutations_of_latents as of_latents
from tests.golden.mutations import with_init
from tests.golden.tiny_models import make_tiny
from tests.unit.workers.verify.cases import VerifyCase, altered, reconfigured
from tests.unit.workers.verify.faults import SIZE, Damage, columns, rows

pytestmark = pytest.mark.slow
Plant = Callable[[pytest.MonkeyPatch], None]
INSIDE = "model.layers.1.self_attn"
FIRST = "model.layers.0.self_attn"
# The C++ kernel of attention takes these widths, in blocks of 16 tokens.
SHAPE = {"num_hidden_layers": 2, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "moe_intermediate_size": 64}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> VerifyCase:
    folder = tmp_path_factory.mktemp("latent")
    model = make_tiny(folder, "deepseek_v3", seed=5, **SHAPE)
    return VerifyCase(model, folder / "verify", block_size=16)


def rotated_by(function: Callable[..., Tensor]) -> Plant:
    """Rotate queries and keys otherwise."""
    return lambda patch: patch.setattr(latent_attention, "rotate_neighbours", function)


def backwards(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    return rotate_neighbours(x, cos, -sin, dtype)


def without_factor(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    half = cos.shape[-1] // 2
    factor = (cos[..., :half].square() + sin[..., :half].square()).sqrt().repeat(1, 1, 2)
    return rotate_neighbours(x, cos / factor, sin / factor, dtype)


ON_ALL = "layer 0 on ranks 0, 1"
Q, K, ATTENTION = f"rotary embedding of q in {ON_ALL}", f"rotary embedding of k in {ON_ALL}", f"attention of {ON_ALL}"
KEYS = f"{FIRST}.kv_b_proj.weight: the matrices of keys on ranks 0, 1"
FAULTS: list[tuple[Plant, str]] = [
    (partial(of_latents.values_from_the_wrong_half, backend=CppBackend), f"{ATTENTION}: values are the last 32 "
     "elements of rows, not the first"),
    (of_latents.first_elements_of_queries_rotated, f"{Q}: it rotates elements 0 to 15 of the "
     "projection, not the last 16"),
    (of_latents.key_of_the_latent_rotated, f"{K}: it rotates elements 0 to 15 of the projection, not the last 16"),
    (rotated_by(latent_attention.rotate), f"{Q}: it pairs two halves in place of neighbours"),
    (rotated_by(backwards), f"{Q}: it rotates backwards"),
    (rotated_by(without_factor), f"{Q}: its factor of 1.05 is left out"),
    (rotated_by(lambda x, cos, sin, dtype: x), f"{Q}: left out"),
    (of_latents.heads_of_the_next_rank, f"{KEYS}, heads 0, 1, 2, 3 (its head 0 has the matrix of head 4)"),
    (of_latents.halves_of_matrices_exchanged, f"{KEYS}, which are read from the rows of the other kind of matrices"),
    (of_latents.scale_without_mscale, f"{ATTENTION}: the scale of scores is 0.189, not 0.248 (YaRN's factor is left "
     "out)"),
    (of_latents.latent_not_normed, f"{FIRST}.kv_a_layernorm: left out on ranks 0, 1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("plant", "cause"),
    [pytest.param(*fault, marks=pytest.mark.soak if at % 9 else ()) for at, fault in enumerate(FAULTS)],
)
def test_a_fault_of_latent_attention_is_named(
    case: VerifyCase, monkeypatch: pytest.MonkeyPatch, plant: Plant, cause: str
) -> None:
    plant(monkeypatch)
    comparison, causes = case.run(SIZE)
    assert not comparison.ok and cause in causes[0], causes


def scaled(patch: pytest.MonkeyPatch, factor: float) -> None:
    """Multiply the scale of scores."""
    with_init(patch, LatentAttention, "spec", lambda one: replace(one.spec, scale=one.spec.scale * factor))


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 1.0,
        "mscale_all_dim": 0.7}  # fmt: skip
OTHER_ANGLES = "of 8 turn by other angles (the base or the scaling of frequencies, or positions)"
SETTINGS: list[tuple[str, float, dict[str, float], str]] = [
    ("float32", 1.02, {}, "the scale of scores is 0.253, not 0.248"),
    ("float32", 1.0, {"rope_theta": 1.1e4}, OTHER_ANGLES),
    ("float32", 1.0, {"mscale": 1.02, "mscale_all_dim": 0.714}, "its factor is 1.055, not 1.054"),
    ("bfloat16", 1.04, {}, "the scale of scores is 0.2579, not 0.248"),
    ("bfloat16", 1.0, {"beta_fast": 1, "beta_slow": 32}, OTHER_ANGLES),
]


@pytest.mark.parametrize(("dtype", "factor", "changes", "cause"), SETTINGS)
@pytest.mark.soak
def test_a_setting_that_is_slightly_wrong_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, factor: float, changes: dict[str, float], cause: str
) -> None:
    model = make_tiny(tmp_path, "deepseek_v3", seed=5, dtype=getattr(torch, dtype), **SHAPE)
    case = VerifyCase(model, tmp_path / "verify", dtype, block_size=16)
    scaled(monkeypatch, factor)
    comparison, causes = case.run(1, reconfigured(model, tmp_path / "other", rope_parameters=YARN | changes))
    assert not comparison.ok and cause in causes[0], causes


# Heads have 12 rows of keys and 20 of values in kv_b_proj, and 28 rows in q_b_proj. Rank 1 begins with head 4.
WEIGHTS: list[tuple[str, Damage, str]] = [
    ("q_a_proj", rows(0, 4), "q_a_proj.weight: rows from 0 to 3 on ranks 0, 1"),
    ("q_a_layernorm", rows(0, 4), "q_a_layernorm: its weight on ranks 0, 1"),
    ("q_b_proj", rows(112, 224), "q_b_proj.weight: the rows of rank 1"),
    ("kv_a_proj_with_mqa", rows(32, 48), "kv_a_proj_with_mqa.weight: rows from 32 to 47 on ranks 0, 1"),
    ("kv_a_proj_with_mqa", rows(7, 8), "kv_a_proj_with_mqa.weight: row 7 on ranks 0, 1"),
    ("kv_a_proj_with_mqa", rows(0, 48), "kv_a_proj_with_mqa.weight on ranks 0, 1"),
    ("kv_a_layernorm", rows(0, 32, 2.0), "kv_a_layernorm: its results on ranks 0, 1 are 2 times the right ones"),
    ("kv_a_layernorm", rows(3, 4), "kv_a_layernorm: its weight on ranks 0, 1"),
    ("kv_b_proj", rows(160, 172), "kv_b_proj.weight: the matrices of keys on rank 1, head 5"),
    ("kv_b_proj", rows(12, 32), "kv_b_proj.weight: the matrices of values on rank 0, head 0"),
    ("o_proj", columns(80, 160), "o_proj.weight: the columns of rank 1"),
]


@pytest.mark.parametrize(
    ("module", "damage", "cause"),
    [pytest.param(*one, marks=pytest.mark.soak if at not in (1, 8) else ()) for at, one in enumerate(WEIGHTS)],
)
def test_a_damaged_tensor_of_latent_attention_is_named(
    case: VerifyCase, tmp_path: Path, module: str, damage: Damage, cause: str
) -> None:
    comparison, causes = case.run(SIZE, altered(case.model, tmp_path / "copy", f"{INSIDE}.{module}.weight", damage))
    assert not comparison.ok
    assert [one.startswith(f"{INSIDE}.{cause}") for one in causes] == [True], causes


@pytest.mark.soak
def test_a_damaged_correction_of_a_router_is_named(case: VerifyCase, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    _, causes = case.run(SIZE, altered(case.model, tmp_path / "copy", name, lambda bias: bias.flip(0) + 0.1))
    assert causes[0].startswith("router of layer 1 on ranks 0, 1: other experts are chosen (mlp.gate.e_score"), causes


def test_ranks_with_different_latents_are_named(case: VerifyCase, monkeypatch: pytest.MonkeyPatch) -> None:
    of_latents.latent_of_other_bits_on_the_last_rank(monkeypatch)
    comparison, causes = case.run(SIZE)
    assert all(row.wrong_ranks == () for row in comparison.rows)
    assert causes == ["layer 0, latent: rank 1 has other bits than rank 0, although each computes all of it from equal "
                      "inputs"]  # fmt: skip


@pytest.mark.parametrize("size", [1, pytest.param(4, marks=pytest.mark.soak)])
def test_nothing_is_found_in_right_latent_attention(case: VerifyCase, size: int) -> None:
    """The served layers run as one call, which is compared as well."""
    comparison, causes = case.run(size)
    assert comparison.ok and causes == []
    assert comparison.halves is not None and comparison.halves.why_not is None
