"""Self-tests at start of MoE layers: a row's experts and sums do not depend on other rows, and the order of sums is
fixed.

They use this model's own weights. Many rows with the same expert, and experts with equal scores, are rare in a trial
prompt, so they are constructed here. Each part of a sum that another number of ranks would hold is computed separately.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from oarlock.workers.distributed.all_reduce import tree_sum
from oarlock.workers.kernels.cpu.experts import CppExpertMatmul
from oarlock.workers.layers.experts import Experts, ExpertStack, Router, route

_ROWS = 65  # odd, and larger than a tile of any kernel
_CROWD = 260  # rows with the same expert: more than a block of any kernel has
_FEW = 3

Sum = Callable[[Tensor, Tensor, Tensor], Tensor]


def batch_fault(experts: Experts) -> str | None:
    """Return the first difference between a row by itself and in a batch, as a phrase, or None if there is none."""
    draw = torch.Generator().manual_seed(0)
    router, routed = experts.router, experts.routed
    x = _rows(experts, _ROWS, draw)
    fault = _difference(f"{router.name}: a row's logits of experts", router.logits, x)
    fault = fault or _choice_fault(router, router.logits(x))
    if fault is None:
        fault = _sums_fault(f"{router.name}: a row's sum over experts", routed, x, *router(x))
    if fault is None and routed.shape.count:
        crowd = _rows(experts, _CROWD, draw)
        ids = torch.full((_CROWD, 1), routed.shape.first, dtype=torch.int32, device=crowd.device)
        name = f"{router.name}: a row's result of an expert that all others have"
        fault = _sums_fault(name, routed, crowd, ids, torch.ones(ids.shape, device=crowd.device))
    if fault is None and experts.shared is not None:
        fault = _difference(f"{router.name}: a row's result of the shared expert", experts.run_shared_expert, x)
    return fault


def order_fault(experts: Experts) -> str | None:
    """Return the first sum that does not add up a row's experts by id, or parts as ranks do, or None if there is
    none."""
    x = _rows(experts, _FEW, torch.Generator().manual_seed(experts.placement.tp.rank))
    ids, weights = experts.router(x)
    none = torch.zeros((len(x), 1), dtype=torch.int32)
    name, shared = experts.router.name, experts.shared
    fault = _order_fault(f"{name}: experts", experts.routed, x, ids, weights)
    if fault is None and shared is not None:
        fault = _order_fault(f"{name}: the shared expert", shared, x, none, torch.ones(none.shape))
    return fault


def _rows(experts: Experts, count: int, draw: torch.Generator) -> Tensor:
    placement = experts.placement
    return torch.randn((count, experts.router.hidden), generator=draw).to(placement.dtype).to(placement.device)


def _choice_fault(router: Router, logits: Tensor) -> str | None:
    """Compare choices by logits [T, E] of which many are equal."""
    tied = logits.clone()
    tied[::3] = 0.0  # all experts of a row are equal
    tied[1::3] = logits[1::3, ::2].repeat_interleave(2, 1)[:, : logits.shape[1]]  # pairs of neighbours are equal
    if not torch.equal(router.choose(tied)[0], route(tied, router.spec, router.correction)[0]):
        return f"{router.name}: of experts that are equally good others than those with the lowest ids are chosen"
    return _difference(f"{router.name}: a row's choice of experts", lambda rows: router.choose(rows)[0], tied) or (
        _difference(f"{router.name}: the weights of a row's experts", lambda rows: router.choose(rows)[1], tied)
    )


def _difference(name: str, compute: Callable[[Tensor], Tensor], x: Tensor) -> str | None:
    together = compute(x)
    for row in (0, 1, 2, len(x) // 2, len(x) - 1):
        if not torch.equal(compute(x[row : row + 1])[0], together[row]):
            return f"{name} differs from its result without other rows"
    return None


def _sums_fault(name: str, stack: ExpertStack, x: Tensor, ids: Tensor, weights: Tensor) -> str | None:
    together = stack(x, ids, weights)
    for row in (0, len(x) // 2, len(x) - 1):
        one = slice(row, row + 1)
        if not torch.equal(stack(x[one], ids[one], weights[one])[0], together[row]):
            return f"{name} differs from its result without other rows"
    return None


def _order_fault(name: str, stack: ExpertStack, x: Tensor, ids: Tensor, weights: Tensor) -> str | None:
    parts = []
    for part in _parts(stack):
        parts.append(part(x, ids, weights))
        total = torch.zeros_like(parts[-1])
        for place in range(ids.shape[1]):
            one = slice(place, place + 1)
            total += part(x, ids[:, one].contiguous(), weights[:, one].contiguous())
        if not torch.equal(total, parts[-1]):
            return f"{name} are not added up by their ids"
    same = torch.equal(stack(x, ids, weights), tree_sum(parts))
    return None if same else f"{name}: the partial sums do not add up to the total"


def _parts(stack: ExpertStack) -> list[Sum]:
    """Return the sums that a larger number of ranks would compute: of slices of the width, or of groups of experts."""
    product, shape = stack.matmul, stack.shape
    if shape.groups > 1:
        return [_of_group(stack, number) for number in range(shape.groups)]
    assert isinstance(product, CppExpertMatmul)
    return [product.of_slice(number) for number in range(shape.slices)]


def _of_group(stack: ExpertStack, number: int) -> Sum:
    shape = stack.shape

    def total(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        is_here = (ids - shape.first) // shape.group == number
        return stack(x, torch.where(is_here, ids, -1), weights)

    return total
