"""Self-tests at start: a sequence gets the same bits by itself and in a batch, and with every number of ranks.

If kernels compute everything, ranks agree by construction (`kernels/cpu/csrc/gemm/slices.h`), and tests compare whole
completions. The two operations in which ranks differ are tried with this model's own weights: slices of the inputs,
each multiplied separately, must add up to the matmul of a rank, and the all-reduce must add in the order of the tree.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.workers.attention.backend import AttentionBackend, CapturableBackend, LayerMemory, is_capturable
from oarlock.workers.attention.cpp import CppBackend
from oarlock.workers.attention.forward_batch import BlockTables, ForwardBatch
from oarlock.workers.attention.reference import ReferenceBackend
from oarlock.workers.attention.rows_by_slot import NO_ADAPTER, adapted_rows
from oarlock.workers.distributed.all_reduce import tree_sum
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.distributed.topology import VOCAB_SLICES
from oarlock.workers.kernels.cpu.fused_layer import ALL_ARRIVED, all_reduce_of
from oarlock.workers.kernels.cpu.gemm import CppMatmul, CppPackedMatmul
from oarlock.workers.kernels.cpu.library import library
from oarlock.workers.kernels.cpu.sampling import can_serve
from oarlock.workers.layers.linear import RowParallelLinear
from oarlock.workers.layers.placement import Placement
from oarlock.workers.lora.adapter_slots import AdapterSlots
from oarlock.workers.lora.trial_adapter import trial_adapter
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.models.rank_model import RankModel
from oarlock.workers.protocol import NULL_BLOCK
from oarlock.workers.recurrent.states import NULL_SLOT
from oarlock.workers.runner.experts_invariance import batch_fault, order_fault
from oarlock.workers.runner.trial_steps import SequenceChunk, TrialMemory, greedy_step

# Slots of the prompt's state, which are used in turn; of all others; and of a checkpoint.
_SLOTS, _OTHERS_SLOT, _SAVED = (1, 2), 3, 4
PROMPT = 67  # tokens; odd, and more than two blocks of key columns
OTHERS = 31  # number of other sequences


@dataclass(frozen=True, slots=True)
class InvarianceResult:
    """Result of the test. `reason` is one phrase for the log in both cases."""

    batch_invariant: bool
    reason: str

    def require(self) -> None:
        """Raise `StartupError` if results depend on the batch, as `--batch-invariant` requires."""
        if not self.batch_invariant:
            raise StartupError(
                f"--batch-invariant: numbers depend on the batch here. {self.reason}.",
                "Leave it out, or choose another --dtype or --attention-backend.",
            )


class InvarianceTest:
    """One prompt in its own KV blocks, and steps that compute parts of it."""

    def __init__(
        self,
        model: RankModel,
        memory: list[LayerMemory],
        backends: Mapping[int, AttentionBackend],
        block_size: int,
        length: int,
        max_len: int,
        prompt: Sequence[int] | None = None,
    ) -> None:
        """Choose the prompt: the first `length` ids of `prompt`, or random ones. `max_len`: of any sequence, in
        tokens."""
        layers = model.one_of_each_kind()
        self.model = model.with_layers(layers)
        self.memory = [memory[layer] for layer in layers]
        self.backends = backends
        self.kinds = TrialMemory.of(model.spec)
        self.slot = _SLOTS[0]  # of the prompt's newest state
        self.adapter_slots = NO_ADAPTER, NO_ADAPTER  # of the prompt, and of every second other sequence
        self.block_size = block_size
        self.random = random.Random(0)
        self.prompt = self._tokens(length) if prompt is None else list(prompt[:length])
        self.max_len = max_len
        self.longest = length + 1000  # tokens: longer than any sequence here
        self.table = range(NULL_BLOCK + 1, NULL_BLOCK + 2 + (length - 1) // block_size)

    def whole(self) -> Tensor:
        """Return the prompt's hidden states, computed in one step by itself: [length, hidden]."""
        return self._run([self._own(0, len(self.prompt))])[0]

    def from_checkpoint(self) -> Tensor:
        """Compute the prompt in chunks, save a state in the middle of one, and compute the rest again from this state.
        All cuts are at odd places."""
        cut, saved, end = 7, 13, 23
        first = self._run([self._own(0, cut)])[0]
        chunk = self._run([self._own(cut, end)._replace(saves=[(saved - cut, _SAVED)])])[0]
        self._run([self._own(end, len(self.prompt))])
        rest = self._run([self._own(saved, len(self.prompt))._replace(read_slot=_SAVED)])[0]
        return torch.cat([first, chunk[: saved - cut], rest])

    def beside_others(self) -> Tensor:
        before = [self._other(1, context) for context in (1, 5, 40)]
        parts = [*before, self._own(0, len(self.prompt)), self._other(9, 9), self._other(3, 20)]
        return self._run(parts)[len(before)]

    def in_chunks(self, others: int = 0) -> Tensor:
        """Compute the prompt in chunks, each beside `others` sequences of one token."""
        cuts = [0, *(cut for cut in (5, 11, 28, 36) if cut < len(self.prompt)), len(self.prompt)]
        rest = [self._other(1, 3 + number) for number in range(others)]
        return torch.cat([self._run([*rest, self._own(a, b)])[others] for a, b in pairwise(cuts)])

    def decoded(self, count: int, others: int, *, as_captured: bool = False) -> Tensor:
        """Decode the last `count` tokens one by one, after the other tokens. `as_captured`: with a plan for graphs."""
        first = max(0, len(self.prompt) - count)
        results = [self._run([self._own(0, first)])[0]] if first else []
        for position in range(first, len(self.prompt)):
            rest = [self._other(1, 1 + 3 * number) for number in range(others)]
            place = others // 2
            parts = [*rest[:place], self._own(position, position + 1), *rest[place:]]
            results.append(self._run(parts, as_captured=as_captured)[place])
        return torch.cat(results)

    def behind_drafts(self, count: int, others: int) -> Tensor:
        """Compute the last `count` tokens in one step, as a newest token with drafts after it."""
        first = max(0, len(self.prompt) - count)
        results = [self._run([self._own(0, first)])[0]] if first else []
        rest = [self._other(1 + number % 3, 5 + 3 * number) for number in range(others)]
        place = others // 2
        return torch.cat(
            [*results, self._run([*rest[:place], self._own(first, len(self.prompt)), *rest[place:]])[place]]
        )

    def _own(self, start: int, stop: int) -> SequenceChunk:
        """Return a part of the prompt. It reads the slot that the part before it has written."""
        before = NULL_SLOT if start == 0 else self.slot
        self.slot = _SLOTS[self.slot == _SLOTS[0]]
        return SequenceChunk(self.prompt[start:stop], start, self.table, 0, before, self.slot)

    def _other(self, count: int, context: int) -> SequenceChunk:
        # The angles, or a table of positions, may reach no further.
        context = min(context, self.max_len, self.model.spec.longest_length)
        count = min(count, context)
        blocks = [NULL_BLOCK] * -(-context // self.block_size)
        return SequenceChunk(self._tokens(count), context - count, blocks, write_slot=_OTHERS_SLOT)

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.model.spec.vocab_size) for _ in range(count)]

    def _run(self, parts: list[SequenceChunk], *, as_captured: bool = False) -> list[Tensor]:
        """Return the hidden states of one step for each part: [tokens, hidden]."""
        step, device = greedy_step(parts, self.block_size, memory=self.kinds), self.model.placement.device
        if any(self.adapter_slots):
            own, others = self.adapter_slots
            every = [own if part.blocks is self.table else others * (at % 2) for at, part in enumerate(parts)]
            step = replace(step, adapter_slots=np.array(every, np.int32))
        tables = BlockTables.of_step(step, self.block_size, device, self.kinds.pages_groups)
        batch, plans = ForwardBatch.from_step(step, tables), {}
        for group, backend in self.backends.items():
            if as_captured:
                assert isinstance(backend, CapturableBackend)
                plans[group] = backend.prepare_decode(replace(batch, context_lens=[self.longest] * batch.num_seqs))
            else:
                plans[group] = backend.prepare(batch)
        hidden = self.model.stand_in(batch.token_ids)
        hidden = self.model(batch, self.memory, self.backends, plans, hidden)  # [T, hidden]
        return list(hidden.split([len(part.token_ids) for part in parts]))


def check_batch_invariance(
    model: RankModel,
    memory: list[LayerMemory],
    backends: Mapping[int, AttentionBackend],
    *,
    num_blocks: Sequence[int],
    block_size: int,
    max_len: int,
    span: int = 0,
    is_asked: bool = False,
    slots: AdapterSlots | None = None,
) -> InvarianceResult:
    """Compute the prompt in different batches, chunks and steps, and compare the results.

    Every rank must call this at the same point: layers all-reduce. It overwrites the first blocks and slots of
    `memory`, before any request uses them. `num_blocks`: of each group. `max_len`: tokens of one sequence. `span`: keys
    that one program reads, if fixed; the prompt is longer. `is_asked`: the model uses the kernels of
    `--batch-invariant`; without them nothing is tried on a CUDA device. `slots`: of adapters, empty before and after.
    """
    device = model.placement.device
    if device.type != "cpu" and not is_asked:
        reason = f"on {device.type} the libraries choose kernels by the shape of the batch, without --batch-invariant"
        return InvarianceResult(False, reason)
    if any(isinstance(backend, ReferenceBackend) for backend in backends.values()):
        return InvarianceResult(False, "reference attention adds up in an order that torch chooses by shape")
    started = time.monotonic()
    kinds = TrialMemory.of(model.spec)
    length = min([PROMPT + span, max_len, *((num_blocks[group] - 1) * block_size for group in kinds.pages_groups)])
    trial = InvarianceTest(model, memory, backends, block_size, length, max_len)
    whole = trial.whole()
    ways = {
        "a prompt batched with others": trial.beside_others,
        "a prompt in chunks": trial.in_chunks,
        "tokens decoded alone": lambda: trial.decoded(4, 0),
        f"a token decoded among {OTHERS} others": lambda: trial.decoded(1, OTHERS),
        f"a token and drafts among {OTHERS} others": lambda: trial.behind_drafts(5, OTHERS),
    }
    if kinds.has_states and length == PROMPT + span:
        ways["a prompt from a saved state"] = trial.from_checkpoint
    if is_asked and is_capturable(backends):
        name = f"a token decoded among {OTHERS} others by a graph's plan"
        ways[name] = lambda: trial.decoded(1, OTHERS, as_captured=True)
    faults = [_difference(name, whole, way()) for name, way in ways.items()]
    if model.is_last:
        faults.append(_logits_fault(model, whole))
    mixtures = trial.model.mixtures()
    faults += [batch_fault(experts) for experts in mixtures]
    faults += _adapter_faults(trial, whole, slots) if slots is not None else []
    found = [fault for fault in faults if fault is not None]
    if found:
        return InvarianceResult(False, f"{found[0]}, with {_attention(backends)} in {_name(model)}")
    spent = time.monotonic() - started
    experts = ", and so did rows that crowd at an expert or choose among equally good ones" if mixtures else ""
    adapters = "" if slots is None else ", with an adapter too"
    return InvarianceResult(
        True, f"{length} tokens gave the same bits in {len(ways) + 1} ways{adapters}{experts} ({spent:.2f} s)"
    )


def _adapter_faults(trial: InvarianceTest, whole: Tensor, slots: AdapterSlots) -> list[str | None]:
    """Compute the prompt with an adapter in different batches, and without one among rows that have one.

    `whole`: the prompt's hidden states without an adapter: [length, hidden].
    """
    assert isinstance(trial.model, Decoder), "only described models have adapters"
    among = {
        "batched with others": trial.beside_others,
        f"decoded among {OTHERS} others": lambda: trial.decoded(1, OTHERS),
    }
    with trial_adapter(slots, trial.model) as slot:
        trial.adapter_slots = slot, slot
        adapted = trial.whole()
        ways = {"in chunks": trial.in_chunks, "decoded alone": lambda: trial.decoded(4, 0), **among}
        faults = [_difference(f"with an adapter {name}", adapted, way()) for name, way in ways.items()]
        trial.adapter_slots = NO_ADAPTER, slot
        faults += [_difference(f"{name} that have an adapter", whole, way()) for name, way in among.items()]
        if trial.model.is_last:
            faults.append(_logits_fault(trial.model, adapted, slot))
    trial.adapter_slots = NO_ADAPTER, NO_ADAPTER
    return faults


def _logits_fault(model: RankModel, hidden: Tensor, slot: int = NO_ADAPTER) -> str | None:
    """Compare one row of logits computed by itself with the same row computed together with others. `slot`: of its
    adapter, which every second row has."""
    some, device = hidden[-min(5, len(hidden)) :], hidden.device
    slot_of = np.where(np.arange(len(some) - 1, -1, -1) % 2, NO_ADAPTER, slot).astype(np.int32)  # [L]
    own, every = (adapted_rows(rows, device) for rows in (slot_of[-1:], slot_of))
    alone = model.compute_logits(some[-1:].contiguous(), own)
    name = "a row of logits with an adapter among others" if slot else "a row of logits among others"
    return _difference(name, alone, model.compute_logits(some, every)[-1:])


def _difference(name: str, expected: Tensor, found: Tensor) -> str | None:
    """Return the size of a difference as a phrase, or None if the bits are equal."""
    if torch.equal(expected, found):
        return None
    gaps = (expected.double() - found.double()).nan_to_num(posinf=0.0, neginf=0.0).abs()
    share = f"{int((expected != found).sum())} of {expected.numel()} values"
    return f"{name}: {share} differ from those of the prompt alone, by {float(gaps.max()):.1e} at most"


def _attention(backends: Mapping[int, AttentionBackend]) -> str:
    """Return the backends' names, and on the CPU the reason why the batch-invariant kernel is not used."""
    return ", ".join(dict.fromkeys(map(_attention_of, backends.values()))) or "no attention"


def _attention_of(backend: AttentionBackend) -> str:
    reason = CppBackend.why_not(backend.spec) if backend.spec.device.type == "cpu" else None
    return (
        f"{backend.name} attention"
        if reason is None
        else f"{backend.name} attention (not the C++ kernel, since {reason})"
    )


def _name(model: RankModel) -> str:
    return str(model.placement.dtype).removeprefix("torch.")


_ROWS = 3


@dataclass(frozen=True, slots=True)
class RankInvariance:
    """Result of the test. `reason` is one phrase for the log in both cases."""

    rank_invariant: bool
    reason: str


def check_rank_invariance(
    model: RankModel, memory: list[LayerMemory], backends: Mapping[int, AttentionBackend]
) -> RankInvariance:
    """Check the kernels in use, and try them. Every rank must call this at the same point: it all-reduces."""
    why_not, trial = _why_not(model, memory, backends), model.with_layers(model.one_of_each_kind())
    result = check_sums(trial.summed_outputs() if why_not is None else (), model.placement, why_not)
    faults = [order_fault(experts) for experts in trial.mixtures()] if result.rank_invariant else []
    fault = next((fault for fault in faults if fault is not None), None)
    return result if fault is None else RankInvariance(False, fault)


def check_sums(outputs: Sequence[RowParallelLinear], place: Placement, why_not: str | None) -> RankInvariance:
    """Try the all-reduced sums of `outputs`, the linear layers whose inputs ranks share.

    `why_not`: a reason why the result is not invariant, whatever the trial shows; None if there is none.
    """
    started = time.monotonic()
    has_reason = torch.tensor([float(why_not is not None)], dtype=torch.float64, device=place.device)
    if place.tp.all_gather(has_reason).any() and why_not is None:
        why_not = "another rank has kernels that add up in another order"
    sizes = [size for size in (1, 2, 4, 8) if size <= place.slices]
    on_device = _why_not_on(place.device)
    if on_device is not None:
        why_not = on_device
    elif why_not is None and (place.tp.size not in sizes or VOCAB_SLICES % place.tp.size):
        working = ", ".join(map(str, sizes))
        why_not = f"{place.tp.size} ranks do not hold whole slices of the inputs; {working} would"
    reason = why_not or _fault(outputs, place)
    if reason is not None:
        return RankInvariance(False, reason)
    named = " and ".join(filter(None, (", ".join(map(str, sizes[:-1])), str(sizes[-1]))))
    ranks = "1 rank" if sizes == [1] else f"{named} ranks"
    spent = time.monotonic() - started
    return RankInvariance(True, f"the same bits with {ranks}: partial sums are added in one tree ({spent:.2f} s)")


def _why_not_on(device: torch.device) -> str | None:
    if device.type == "cpu":
        return None
    return f"on {device.type} libraries add up in an order that depends on the shape of a rank's weights"


def _why_not(model: RankModel, memory: list[LayerMemory], backends: Mapping[int, AttentionBackend]) -> str | None:
    """Return the reason why this rank's kernels guarantee nothing, or None if they do."""
    device = model.placement.device
    reason = _why_not_on(device) or model.why_not_rank_invariant(memory, backends)
    if reason is None and model.is_last and not can_serve(device):
        reason = "samples are computed by torch, in an order that depends on the shape of a rank's vocabulary"
    return reason


def _fault(outputs: Sequence[RowParallelLinear], place: Placement) -> str | None:
    tp = place.tp
    draw = torch.Generator().manual_seed(tp.rank)
    found = None
    for output in outputs:
        if not _adds_up(output, place.local_slices, draw):
            found = f"{output.name}: slices of the inputs do not add up to the product of all"
    if not _ranks_add_up(tp, draw):
        found = f"the all-reduce over {tp.size} ranks is not added in the order of the tree"
    return found


def _adds_up(layer: RowParallelLinear, slices: int, draw: torch.Generator) -> bool:
    """Return whether a rank's matmul equals the sum of its slices, each computed with all other inputs set to zero."""
    product = layer.matmul
    assert isinstance(product, CppMatmul | CppPackedMatmul)
    share = product.as_share()
    x = torch.randn((_ROWS, layer.weight_shard.local_inputs), generator=draw).to(product.dtype)
    parts: list[Tensor] = []
    for place in range(slices):
        alone = torch.zeros_like(x)
        alone.chunk(slices, 1)[place].copy_(x.chunk(slices, 1)[place])
        parts.append(share(alone))
    return torch.equal(share(x), tree_sum(parts))


def _ranks_add_up(tp: TensorParallel, draw: torch.Generator) -> bool:
    if tp.size == 1:
        return True
    mine = torch.randn(67, generator=draw)
    expected = tree_sum(list(tp.all_gather(mine)))
    same = torch.equal(tp.all_reduce(mine.clone()), expected)
    group = tp.group_for_kernels
    if group is not None:
        missing = all_reduce_of(library())(group.address, mine.data_ptr(), len(mine))
        if missing != ALL_ARRIVED:
            raise group.lost(missing)
        same &= torch.equal(mine, expected)
    return same
