"""Mamba 2 against transformers' modules: their values, and equal bits for any cuts, batch and number of ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import FalconH1Config, Mamba2Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer, compute_mup_vector
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.mamba2 import Mamba2
from oarlock.workers.layers.mamba2_spec import Mamba2Spec
from oarlock.workers.layers.placement import Placement
from oarlock.workers.recurrent.states import LayerStates, StateStep
from tests.golden.paged_run import on_ranks
from tests.unit.workers.state_steps import state_step_of
from tests.unit.workers.weights_in_memory import MemoryWeights

CPU = torch.device("cpu")
HIDDEN, HEADS, WIDTH, STATE, WINDOW, TOKENS = 32, 8, 8, 16, 4, 21
LIMITS = (0.4, 1.1)  # which many time steps reach
SLOTS = 12
_PLAIN: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_heads": HEADS, "head_dim": WIDTH, "state_size": STATE, "conv_kernel": WINDOW,
    "num_hidden_layers": 1, "time_step_limit": LIMITS, "chunk_size": 8,
}  # fmt: skip
_FALCON: dict[str, Any] = {
    "hidden_size": HIDDEN, "mamba_d_ssm": HEADS * WIDTH, "mamba_n_heads": HEADS, "mamba_d_state": STATE,
    "mamba_n_groups": 2, "mamba_d_conv": WINDOW, "num_hidden_layers": 1, "mamba_chunk_size": 8,
    "num_attention_heads": 4, "ssm_multipliers": [0.7, 1.3, 0.6, 1.7, 0.8],
}  # fmt: skip


def mamba2_mixer(groups: int, *, bias: bool = False) -> tuple[nn.Module, Mamba2Spec]:
    config = Mamba2Config(**_PLAIN, n_groups=groups, use_bias=bias, use_conv_bias=not bias)
    settings: dict[str, Any] = {"projection_bias": bias, "output_bias": bias, "conv_bias": not bias}
    settings |= {"least_step": LIMITS[0], "most_step": LIMITS[1]}
    return Mamba2Mixer(config, 0), Mamba2Spec(HEADS, WIDTH, groups, STATE, WINDOW, 1e-5, **settings)


def falcon_mixer(*, normed: bool, gates_first: bool) -> tuple[nn.Module, Mamba2Spec]:
    config = FalconH1Config(**_FALCON, mamba_rms_norm=normed, mamba_norm_before_gate=not gates_first)
    mixer = FalconH1Mixer(config, 0)
    mixer.register_buffer("mup_vector", compute_mup_vector(config), persistent=False)
    gate, x, b, c, dt = _FALCON["ssm_multipliers"]
    eps = config.rms_norm_eps if normed else None
    return mixer, Mamba2Spec(HEADS, WIDTH, 2, STATE, WINDOW, eps, gates_first, scales=(gate, x, b, c, dt))


KINDS = {
    "one-group": lambda: mamba2_mixer(1),
    "two-groups-biased": lambda: mamba2_mixer(2, bias=True),
    "eight-groups": lambda: mamba2_mixer(8),
    "scaled-without-norm": lambda: falcon_mixer(normed=False, gates_first=True),
    "scaled-norm-first": lambda: falcon_mixer(normed=True, gates_first=False),
}


def built(kind: str) -> tuple[nn.Module, Mamba2Spec, Tensor]:
    """A seeded module of transformers, its spec, and inputs [T, hidden]."""
    torch.manual_seed(0)
    mixer, spec = KINDS[kind]()
    for name, parameter in mixer.named_parameters():
        parameter.data.normal_(mean=1.0 if name in ("norm.weight", "D") else 0.0, std=0.4)
    return mixer.eval(), spec, torch.randn(TOKENS, HIDDEN)


def layer_of(mixer: nn.Module, spec: Mamba2Spec, tp: TensorParallel, dtype: torch.dtype) -> tuple[Mamba2, LayerStates]:
    layer = Mamba2("mixer", spec, 0, HIDDEN, Placement(tp, dtype, CPU, slices=8))
    weights = MemoryWeights({f"mixer.{name}": tensor for name, tensor in mixer.state_dict().items()})
    for part in layer.parts:
        part.load(weights)
    parts = [
        torch.zeros((SLOTS + 1, *part.shape_of_rank(tp.size)), dtype=torch.float32 if part.is_float32 else dtype)
        for part in spec.memory.parts
    ]
    return layer, LayerStates(tuple(parts))


def run(layer: Mamba2, states: LayerStates, x: Tensor, step: StateStep) -> Tensor:
    return layer(x, None, SimpleNamespace(states=states, state_step=step))  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize("kind", list(KINDS))
def test_results_are_within_twice_transformers_own_error(kind: str) -> None:
    mixer, spec, x = built(kind)
    with torch.inference_mode():
        theirs = mixer(x[None])[0].double()
        layer, states = layer_of(mixer, spec, TensorParallel.solo(), torch.float32)
        ours = run(layer, states, x, state_step_of([TOKENS], [0], [1])).double()
        exact = judged(mixer, spec, x)
    bound = 2 * (theirs - exact).abs().max() + 1e-6 * exact.abs().max()
    assert (theirs - exact).abs().max() < 1e-4 * exact.abs().max(), "transformers computes something else"
    assert (ours - exact).abs().max() <= bound


def judged(mixer: Any, spec: Mamba2Spec, x: Tensor) -> Tensor:
    """Return the module's definition in float64, written out for whole sequences."""
    mixer = mixer.double()
    scales = torch.cat([torch.full((rows,), s) for (rows, _), s in zip(spec.rows, spec.scales, strict=True)])
    gate, rows, dt = (mixer.in_proj(x.double()) * scales.double()).split(
        [spec.width, spec.width + 2 * spec.group_width, spec.num_heads], 1
    )
    rows = nn.functional.silu(mixer.conv1d(rows.T[None])[0, :, :TOKENS].T)
    inner, b, c = rows.split([spec.width, spec.group_width, spec.group_width], 1)
    each = spec.num_heads // spec.groups
    inner = inner.unflatten(1, (spec.num_heads, -1))
    b, c = (part.unflatten(1, (spec.groups, -1)).repeat_interleave(each, 1) for part in (b, c))
    dt = nn.functional.softplus(dt + mixer.dt_bias).clamp(spec.least_step, spec.most_step)
    log = (dt * -mixer.A_log.exp()).cumsum(0)
    decay = (log[:, None] - log[None]).exp()
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[:, :, None]
    weights = torch.einsum("thn,shn->tsh", c, b) * torch.where(seen, decay, 0.0) * dt[None]
    mixed = torch.einsum("tsh,shp->thp", weights, inner) + mixer.D[:, None] * inner
    silu = nn.functional.silu(gate).unflatten(1, (spec.num_heads, -1))
    if spec.eps is None:
        return mixer.out_proj((mixed * silu).flatten(1))
    before = mixed * silu if spec.gates_first else mixed
    groups = before.flatten(1).unflatten(1, (spec.groups, -1))
    normed = (groups * (groups.square().mean(2, keepdim=True) + spec.eps).rsqrt()).flatten(1) * mixer.norm.weight
    return mixer.out_proj(normed if spec.gates_first else normed * silu.flatten(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_cuts_batches_and_saved_states_do_not_change_bits(kind: str, dtype: torch.dtype) -> None:
    mixer, spec, x = built(kind)
    x = x.to(dtype)
    with torch.inference_mode():
        layer, states = layer_of(mixer, spec, TensorParallel.solo(), dtype)
        whole = run(layer, states, x, state_step_of([TOKENS], [0], [1], [(0, 5, 7), (0, 16, 8)]))
        other, rest = x[:3].flip(0), x[5:]
        pieces = run(layer, states, torch.cat([other, rest[:1]]), state_step_of([3, 1], [0, 7], [2, 3]))[3:]
        last = run(layer, states, torch.cat([rest[1:], other]), state_step_of([len(rest) - 1, 3], [3, 0], [4, 5]))
        assert torch.equal(torch.cat([pieces, last[: len(rest) - 1]]), whole[5:])
        for part in states.parts:
            assert torch.equal(part[4], part[1]) and not torch.equal(part[8], part[1]) and not part[0].any()


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_number_of_ranks_has_the_same_bits(kind: str) -> None:
    mixer, spec, x = built(kind)

    def results(tp: TensorParallel) -> Tensor:
        layer, states = layer_of(mixer, spec, tp, torch.float32)
        return run(layer, states, x, state_step_of([TOKENS], [0], [1]))

    (alone,) = on_ranks(1, results)
    for size in (2, 4):
        assert all(torch.equal(alone, one) for one in on_ranks(size, results))
