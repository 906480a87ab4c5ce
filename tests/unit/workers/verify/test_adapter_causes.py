"""A planted fault of an adapter is named: the module, the rank and the kind of fault."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oarlock.workers.attention.rows_by_slot import RowsBySlot
from oarlock.workers.lora import rank_adapter
from oarlock.workers.lora.adapter_config import AdapterConfig
from oarlock.workers.lora.low_rank import LayerPairs, RankPair
from oarlock.workers.verify.adapted_sequences import MIRRORED_SLOT, SLOT
from tests.golden.peft_files import write_peft
from tests.golden.tiny_models import make_tiny, tiny_model
from tests.unit.workers.verify.cases import VerifyCase

pytestmark = pytest.mark.slow
SIZE = 2
Q, OUT, DOWN = (f"model.layers.1.{name}" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"))
GATE, UP = (f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up"))
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> VerifyCase:
    folder, shape = tmp_path_factory.mktemp("model"), {"num_hidden_layers": 2}
    model = make_tiny(folder, "qwen2", seed=5, **shape)
    adapter = write_peft(
        folder / "adapter", tiny_model("qwen2", seed=5, **shape), rank_pattern={"self_attn.o_proj": 2}, lora_alpha=6
    )
    return VerifyCase(model, folder / "verify", adapter=adapter)


def changed_cut(module: str, change: Callable[[RankPair, Any], RankPair], rank: int | None = None) -> Plant:
    """Change a pair when a rank has read it."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        cut = rank_adapter._cut

        def changed(pair: Any, shard: Any, part: int, dtype: torch.dtype, files: Any) -> RankPair:
            found = cut(pair, shard, part, dtype, files)
            is_here = rank is None or shard.first_input == rank * shard.local_inputs
            return change(found, shard) if pair.module == module and is_here else found

        patch.setattr(rank_adapter, "_cut", changed)

    return plant


def stale_slot(patch: pytest.MonkeyPatch) -> None:
    """A slot that has an adapter already keeps it."""
    put = LayerPairs.put
    patch.setattr(LayerPairs, "put", lambda pairs, slot, held: None if slot in pairs.used else put(pairs, slot, held))


def slots_of_rows(change: Callable[[np.ndarray], np.ndarray]) -> Plant:
    """Rows get other slots."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        of = RowsBySlot.of
        patch.setattr(RowsBySlot, "of", staticmethod(lambda slots, device: of(change(slots.copy()), device)))

    return plant


def rank_of_all(patch: pytest.MonkeyPatch) -> None:
    """The scale of a module does not follow `rank_pattern`."""
    patch.setattr(AdapterConfig, "scale_of", lambda config, module: config.alpha_of(module) / config.rank)


FAULTS: list[Any] = [
    (changed_cut(Q, lambda pair, shard: replace(pair, scale=1.0)), f"{Q}: the adapter's update is not scaled"),
    (changed_cut(GATE, lambda pair, shard: replace(pair, scale=1.0)), f"{GATE} or {UP}: the adapter's update of "
     "gate_proj is not scaled"),
    (stale_slot, "model.embed_tokens: the adapter's update is the update of another slot"),
    (slots_of_rows(lambda slots: np.where(slots == SLOT, MIRRORED_SLOT, slots)), "is the update of another slot"),
    (slots_of_rows(lambda slots: np.full_like(slots, SLOT)), "rows without an adapter are updated"),
    (slots_of_rows(lambda slots: slots * 0), "the adapter's update is missing"),
    (changed_cut(DOWN, lambda pair, shard: replace(pair, a=pair.a.roll(1, 1))), f"{DOWN}: the adapter's update has "
     "other values or columns of A"),
    (changed_cut(OUT, lambda pair, shard: replace(pair, a=pair.a * 0), 1), "has 0 times the share of rank 1"),
    (changed_cut(Q, lambda pair, shard: replace(pair, b=pair.b.roll(1, 1))), f"{Q}: the adapter's update has other "
     "values or rows of B"),
    (rank_of_all, "model.layers.0.self_attn.o_proj: the adapter's update is 0.5 times the right one"),
    (changed_cut(Q, lambda pair, shard: replace(pair, scale=math.nan)), f"{Q}: the adapter's update is wrong, or added "
     "at another point, on ranks 0, 1; the values are NaN"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("plant", "cause"),
    [pytest.param(*fault, marks=pytest.mark.soak if at % 2 else ()) for at, fault in enumerate(FAULTS)],
)
def test_a_fault_of_an_adapter_is_named(
    case: VerifyCase, monkeypatch: pytest.MonkeyPatch, plant: Plant, cause: str
) -> None:
    plant(monkeypatch)
    comparison, causes = case.run(SIZE)
    assert not comparison.ok and cause in causes[0], causes


def test_exchanged_halves_are_named(case: VerifyCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank, of a square matrix."""
    changed_cut(Q, lambda pair, shard: replace(pair, a=pair.b, b=pair.a))(monkeypatch)
    assert "has A and B exchanged" in case.run(1)[1][0]


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 4])
def test_nothing_is_found_in_a_right_adapter(case: VerifyCase, size: int) -> None:
    comparison, causes = case.run(size)
    assert comparison.ok and causes == []


@pytest.mark.soak
def test_wrong_updates_of_experts_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, experts = "qwen2_moe", "model.layers.1.mlp.experts"
    adapter = write_peft(
        tmp_path / "adapter", tiny_model(family, seed=5), updates=lambda name: name.endswith("experts"),
        target_parameters=["experts.down_proj"], target_modules=[],
    )  # fmt: skip
    case = VerifyCase(make_tiny(tmp_path, family, seed=5), tmp_path / "verify", adapter=adapter)
    changed_cut(f"{experts}.2.down_proj", lambda pair, shard: replace(pair, scale=1.0))(monkeypatch)
    comparison, causes = case.run(SIZE)
    assert not comparison.ok and f"{experts}: the adapter's update of expert 2 is wrong" in causes[0], causes
