"""A choice of experts that rounding decides is no fault, and hides none: transformers' runs follow it."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oarlock.workers.verify.expert_choices import ExpertChoices, routing_in
from tests.golden.tiny_models import make_tiny
from tests.unit.workers.verify.cases import VerifyCase, altered

_GEMMA4 = {
    "enable_moe_block": True, "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 40,
    "attention_k_eq_v": True, "num_global_key_value_heads": 2,
}  # fmt: skip


class _Router(nn.Module):
    """A router with a result as of transformers' modules: (logits, weights, ids)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, self.weight)
        return (logits, *logits.topk(2))


_OWN = torch.tensor([[3.0, 2.0, 1.99, -9.0], [3.0, 2.0, 1.99, -9.0], [3.0, 2.0, 1.99, -9.0]])
_THEIRS = torch.tensor([[3.0, 1.98, 2.01, -9.0], [3.0, 1.98, 2.01, -9.0], [3.0, 2.0, 1.99, -9.0]])
_CHOSEN = torch.tensor([[3.0, 0.0, 2.01, 0.0], [0.0, 1.98, 2.01, 0.0], [3.0, 2.0, 0.0, 0.0]])


def test_a_choice_is_followed_only_if_its_logits_lead_to_it() -> None:
    router, run = _Router(), {"5.router": _THEIRS, "5.routing": _CHOSEN}
    choices = ExpertChoices(run)
    found = []
    for rows in (slice(0, 1), slice(1, 3)):  # in two calls, as for two sequences
        x = _OWN[rows]
        found.append(choices.follow(5, router, (x,), {}, router(x)))
    weights = torch.cat([routing_in(one, 4) for one in found])
    # The second token's choice does not follow from its logits, and the third has no other choice.
    assert torch.equal(weights != 0, torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0]]).bool())
    assert weights[0, 2] == torch.tensor(2.01)
    assert torch.equal(torch.cat([one[0] for one in found]), _OWN)
    assert choices.followed == 1


def test_choices_that_the_followed_run_has_followed_itself() -> None:
    """The first run chose from the logits of the second, so that its own logits do not lead to its choice."""
    router = _Router()
    first, second = {"0.router": _OWN[:1], "0.routing": _CHOSEN[:1]}, {"0.router": _THEIRS[:1]}
    result = ExpertChoices(first, second).follow(0, router, (_OWN[:1],), {}, router(_OWN[:1]))
    assert torch.equal(routing_in(result, 4) != 0, _CHOSEN[:1] != 0)


@pytest.mark.parametrize("size", [1, 2])
def test_near_ties_of_experts_in_layers_that_share_keys(tmp_path: Path, size: int) -> None:
    model = make_tiny(tmp_path, "gemma4_text", seed=5, dtype=torch.bfloat16, **_GEMMA4)
    comparison, causes = VerifyCase(model, tmp_path / "case", "bfloat16").run(size)
    assert comparison.ok, (comparison.first_fault, causes)
    assert comparison.near_ties > 0


def test_a_wrong_choice_is_found_among_near_ties(tmp_path: Path) -> None:
    special = {"moe_intermediate_size": 40}
    model = make_tiny(tmp_path, "lfm2_moe", dtype=torch.bfloat16, **special)
    case = VerifyCase(model, tmp_path / "case", "bfloat16")
    name = "model.layers.1.feed_forward.expert_bias"
    comparison, causes = case.run(1, altered(model, tmp_path / "altered", name, lambda bias: -bias))
    assert comparison.first_fault is not None and comparison.first_fault.name == "1.routing"
    assert "other experts are chosen" in causes[0]
