"""One rank of a verification: the serving model runner, fed known text, with every tensor of every layer recorded.

`python -m oarlock.workers.verify.rank PARENT_PID CONTROL_FD`, started by `launch.py`, writes `rank-R-*.safetensors`
and, on the answering rank, `tokens.json`. KV pages, sampler and collectives are the same as in serving. The text runs
twice: as it is served, which gives the tokens, and with recording hooks in the decoder, which then runs the separate
operations of each layer. After each half of a layer, both runs must have the same bits.
"""

import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.workers.attention.backend import AttentionBackend, LayerMemory
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.attention.rows_by_slot import AdaptedRows
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.distributed.pipeline_stage import PipelineStage
from oarlock.workers.distributed.shm_ring import ChannelClosedError
from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import SublayerSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.layers.tensor_spec import Computation, Tap
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.protocol import StepMetadata
from oarlock.workers.ranks.spawn_ranks import RankArguments, begin
from oarlock.workers.recurrent.states import NULL_SLOT
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.runner.trial_steps import ONE_GROUP, SequenceChunk, TrialMemory, greedy_step
from oarlock.workers.runner.worker_process import join, log_to_stderr
from oarlock.workers.verify.adapted_sequences import put_adapter, slots_of_step
from oarlock.workers.verify.compare import columns_of, dense_routing, file_of, halves_of, taps_of
from oarlock.workers.verify.halves import RecordedHalves
from oarlock.workers.verify.recording_backend import recording_backend
from oarlock.workers.verify.request import Text, VerifyRequest

_STEPS_PER_LINE = 16  # steps per line of progress


def run_rank(
    config: WorkerConfig,
    tp: TensorParallel,
    folder: Path,
    on_progress: Callable[[str], None],
    stage: PipelineStage | None = None,
) -> None:
    """Run the text in `folder` on this rank of `stage`, and write the results there. `stage`: None if there is only
    one.

    `on_progress` gets a description of the current work, often the same again: it also shows that there is progress.
    """
    request, text = VerifyRequest.read(folder), Text.read(folder)
    runner = ModelRunner(config, tp, stage=stage)
    runner.load(lambda fraction: on_progress("reading the weights"))
    decoder = runner.model
    assert isinstance(decoder, Decoder), "tensors inside of other models have no names to be compared by"
    on_progress("allocating KV memory")
    runner.allocate([max(blocks_needed(text, config.block_size), slots_needed(text))] * len(decoder.groups))
    slots = put_adapter(runner, request)
    halves = _recorded_halves(runner, decoder, request)
    memory = TrialMemory.of(runner.spec)
    rows: list[tuple[int, int]] = []
    chosen: dict[tuple[int, int], int] = {}
    for number, (step, here) in enumerate(steps_of(text, config.block_size, memory, slots)):
        on_progress(f"step {number // _STEPS_PER_LINE * _STEPS_PER_LINE + 1}")
        output = runner.execute(step)
        rows += here
        if output is not None:
            chosen |= dict(zip(here, output.token_ids.tolist(), strict=True))
    halves.close()
    if runner.answers:
        (folder / "tokens.json").write_text(json.dumps(_answers(text, chosen)), "utf-8")
    if request.record:
        runner.close()  # destroys graphs, which would not call the recording decoder
        recording = RecordingDecoder(decoder, diagnostics=True)
        runner.steps.model = recording  # ty: ignore[invalid-assignment]
        for step, _ in steps_of(text, config.block_size, memory, slots):
            on_progress("recording the tensors")
            runner.execute(step)
        recording.close()
        found = halves.compare(recording.steps, tp.rank, halves_of(runner.spec, runner.description.layers))
        found.write(folder, tp.rank, runner.stage.number)
        newest = {row: index for index, row in enumerate(rows)}  # rows may be computed twice
        order = torch.tensor([newest[row] for row in sorted(newest)])
        for file, tensors in _files(recording.steps, order):
            on_progress("writing the tensors")
            save_file(tensors, folder / f"rank-{tp.rank}-{file}.safetensors")


def _recorded_halves(runner: ModelRunner, decoder: Decoder, request: VerifyRequest) -> RecordedHalves:
    """Return the record of the halves of layers as they are served, with adapters or without."""
    if not request.record:
        return RecordedHalves(None, decoder.why_not_prepared)
    kinds = (False, True) if request.adapter is not None else (False,)
    prepared = [decoder.prepared_for(runner.layer_memory, runner.backends, adapts=adapts) for adapts in kinds]
    return RecordedHalves(prepared[-1], decoder.why_not_prepared, prepared[:-1])


def _answers(text: Text, chosen: dict[tuple[int, int], int]) -> list[list[int]]:
    """Return this model's greedy choice in place of each token of the known output, by sequence."""
    return [
        [chosen[seq, len(prompt) - 1 + index] for index in range(len(output))]
        for seq, (prompt, output) in enumerate(zip(text.prompts, text.outputs, strict=True))
    ]


def _files(steps: list[dict[str, Tensor]], order: Tensor) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (file, its tensors [T, columns]) per layer. Rows are ordered by sequence, as in the reference."""
    files: dict[str, list[str]] = {}
    for name in steps[0]:
        files.setdefault(file_of(name), []).append(name)
    for file, names in files.items():
        yield file, {name: torch.cat([step.pop(name).flatten(1) for step in steps]).cpu()[order] for name in names}


def steps_of(
    text: Text, block_size: int, memory: TrialMemory = ONE_GROUP, adapter_slots: Sequence[int] = ()
) -> Iterator[tuple[StepMetadata, list[tuple[int, int]]]]:
    """Yield steps: all prompts in one, then one token of each sequence per step. Every row asks for logits.

    With each step comes the (sequence, position) of its rows. With recurrent state, the second step computes the end of
    each prompt once more, as another sequence with the same beginning would: from a state that the first step has saved
    in the middle of the prompt. The sequence goes on from its results. `adapter_slots`: of each sequence, or none.
    """
    sequences = text.inputs()
    tables = _block_tables([len(sequence) for sequence in sequences], block_size)
    slots = [_Slots(seq, at) for seq, at in enumerate(text.checkpoints)]
    for number, ranges in enumerate(_ranges(text, resumes=memory.has_states), 1):
        chunks = [
            slots[seq].chunk(sequences[seq][start:end], start, tables[seq]) for seq, (start, end) in ranges.items()
        ]
        rows = [(seq, position) for seq, (start, end) in ranges.items() for position in range(start, end)]
        step = greedy_step(chunks, block_size, range(len(rows)), step_id=number, memory=memory)
        yield replace(step, adapter_slots=np.array(slots_of_step(adapter_slots, [*ranges]), np.int32)), rows


def _ranges(text: Text, *, resumes: bool) -> Iterator[dict[int, tuple[int, int]]]:
    """Yield the positions that each step computes, by sequence: from the first, up to the second."""
    yield {seq: (0, len(prompt)) for seq, prompt in enumerate(text.prompts)}
    rests = {seq: (at, len(text.prompts[seq])) for seq, at in enumerate(text.checkpoints) if at}
    if resumes and rests:
        yield rests
    lengths = [len(sequence) for sequence in text.inputs()]
    nexts = [len(prompt) for prompt in text.prompts]
    while step := {seq: (at, at + 1) for seq, at in enumerate(nexts) if at < lengths[seq]}:
        yield step
        nexts = [at + 1 for at in nexts]


class _Slots:
    """Slots of recurrent state of one sequence: two that are read and written in turn, and its checkpoint."""

    def __init__(self, seq: int, checkpoint: int) -> None:
        """Choose the slots of sequence `seq`. `checkpoint`: tokens after which the state is saved; 0: none."""
        self._newest, self._next, self._saved = range(1 + 3 * seq, 4 + 3 * seq)
        self._checkpoint = checkpoint

    def chunk(self, token_ids: list[int], start: int, table: list[int]) -> SequenceChunk:
        """Return the next tokens of the sequence. They begin at position `start`."""
        self._newest, self._next = self._next, self._newest
        if start == 0:
            saves = [(self._checkpoint, self._saved)] if self._checkpoint else []
            return SequenceChunk(token_ids, start, table, 0, NULL_SLOT, self._newest, saves)
        read = self._saved if start == self._checkpoint else self._next
        return SequenceChunk(token_ids, start, table, 0, read, self._newest)


def slots_needed(text: Text) -> int:
    """Return the number of slots of recurrent state that the text and the self-tests need, including the null slot."""
    return max(5, 1 + 3 * len(text.prompts))


def blocks_needed(text: Text, block_size: int) -> int:
    """Return the number of blocks that the text needs, including the null block."""
    return 1 + sum(-(-len(sequence) // block_size) for sequence in text.inputs())


def _block_tables(lengths: list[int], block_size: int) -> list[list[int]]:
    """Return block tables in a shuffled order, so that nothing can rely on adjacent pages."""
    counts = [-(-length // block_size) for length in lengths]
    ids = list(range(1, 1 + sum(counts)))
    random.Random(0).shuffle(ids)
    return [[ids.pop() for _ in range(count)] for count in counts]


class RecordingDecoder:
    """A decoder that keeps a copy of every tensor it computes: hooks replace its parts.

        recording = RecordingDecoder(decoder)         # used in place of the decoder until `recording.close()`
        hidden = recording(batch, memory, backends, plans)
        logits = recording.compute_logits(hidden)
        recording.last["2.k_rope"]                    # [T, K, D] of layer 2, this rank's heads

    `last` has the tensors of the newest step, `steps` the tensors of all. T tokens, in the order of the batch; H query
    heads and K key-value heads of this rank; I its share of the intermediate size; dtypes as the layers return them.

        embedding            [T, hidden]     input of the first layer: summed over ranks, and scaled (Gemma)
        {i}.input_norm       [T, hidden]     input of the projections, if there is a norm before them
        {i}.q {i}.k {i}.v    [T, H or K, D]  after the projection, bias included
        {i}.attention_gate   [T, H, D]       projection whose sigmoid or softplus multiplies the result;
                                             [T, H] if a head has one gate
        {i}.q_rope {i}.k_rope                after norms, rotation and query scale: as attended, as cached
        {i}.attention        [T, H, D]       input of o_proj, after the gate if there is one
        {i}.o_proj           [T, hidden]     summed over ranks, before any norm and before the residual is added
        {i}.q_a, {i}.kv_a    [T, R]          latent attention: projections to the latents, and to the rotated key,
        {i}.q_latent, latent [T, R]          the latents after their norms,
        {i}.q_rope, k_rope   [T, H, R] [T, R] the rotated elements only
        {i}.delta_q, _k      [T, K, D]       projections of a gated delta net: queries and keys of its key heads,
        {i}.delta_v, _z      [T, H, D]       values and gates of its value heads,
        {i}.delta_b, _a      [T, H]          rate of writes and decay, before their functions
        {i}.q_conv, k_conv, v_conv           after the convolution
        {i}.mamba_gate, _x   [T, H * D]      projections of Mamba 2: of its heads,
        {i}.mamba_b, _c      [T, G * N]      of its groups, with N values of the state each,
        {i}.mamba_dt         [T, H]          and the time step of each head, before its function
        {i}.x_conv, b_conv, c_conv           after the convolution
        {i}.recurrence       [T, H, D]       result of the gated delta rule, or of Mamba 2 if a norm follows
        {i}.gated_norm       [T, H * D]      input of out_proj
        {i}.delta, {i}.mamba [T, hidden]     out_proj, as o_proj
        {i}.conv_b, _c, _x   [T, C]          projections of a short convolution, for C channels of this rank
        {i}.convolution      [T, C]          input of out_proj, after both gates
        {i}.out_proj         [T, hidden]     as o_proj
        {i}.mid_residual     [T, hidden]     after the attention half, unless the MLP is parallel to it
        {i}.mlp_norm         [T, hidden]     input of the MLP, if it has its own norm
        {i}.gate_up          [T, I]          activation(gate) * up
        {i}.up               [T, I]          activation(up) of an MLP without a gate
        {i}.mlp              [T, hidden]     down_proj, as o_proj
        {i}.router           [T, E]          logits of a MoE layer's router, for E experts
        {i}.routing          [T, E]          weight of each expert, 0 for experts that a token does not use
        {i}.experts          [T, hidden]     sum of a token's experts over ranks, as these exchange it
        {i}.shared           [T, hidden]     the shared expert's result, likewise
        {i}.input_gated      [T, W]          gated input that the layer gets from the tokens, this rank's share
        {i}.input_added      [T, hidden]     down_proj of it, as o_proj
        {i}.residual         [T, hidden]     after the layer
        final_norm           [T, hidden]
        logits               [L, V]          this rank's shard of the vocabulary; only after `compute_logits`

    The tensors of layer i are the taps of its sublayers (`compare.taps_of`).

    Every rank of a group must be recorded, or none. Attributes that are not defined here are the decoder's.
    """

    def __init__(self, decoder: Decoder, *, diagnostics: bool = False) -> None:
        """Install the hooks.

        `diagnostics`: also keep tensors that only the search for a cause needs:

        {i}.o_proj_partial {i}.mlp_partial   [T, hidden]   this rank's share, before the all-reduce; with several ranks
                                                           or with an adapter, whose update is left out
        {i}.gate_up_mirrored                 [T, I]        gate_up of the negated input
        {i}.absorbed                         [T, H, R]     latent attention: queries times the matrices of keys,
        {i}.attended                         [T, H, R]     results before they are multiplied by the matrices of values
        """
        self.decoder = decoder
        self._diagnostics = diagnostics
        self.steps: list[dict[str, Tensor]] = []
        self._undo: list[Callable[[], None]] = []
        # The tensor that the next all-reduce returns, and the bias that is then added.
        self._summing: tuple[str, Tensor | None] | None = None
        attentions = ((index, layer.attention) for index, layer in enumerate(decoder.spec.layers))
        self._latents = {index: one for index, one in attentions if isinstance(one, LatentAttentionSpec)}
        self._install()

    @property
    def last(self) -> dict[str, Tensor]:
        """The tensors of the newest step, by name."""
        return self.steps[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def __call__(
        self,
        batch: ForwardBatch,
        memory: list[LayerMemory],
        backends: Mapping[int, AttentionBackend],
        plans: Mapping[int, Any],
        hidden: Tensor | None = None,
    ) -> Tensor:
        self.steps.append({})
        recording = {
            group: recording_backend(backend, self._record, self._latents, diagnostics=self._diagnostics)
            for group, backend in backends.items()
        }
        return self.decoder(batch, memory, recording, plans, hidden)  # ty: ignore[invalid-argument-type]

    def compute_logits(self, hidden: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        """Compute logits as the decoder does, and record them."""
        logits = self.decoder.compute_logits(hidden, adapters)
        so_far = self.last.get("logits", logits[:0])  # a step with many rows asks in several calls
        self._record("logits", torch.cat((so_far, logits)))
        return logits

    def close(self) -> None:
        """Remove the hooks. Recordings stay."""
        while self._undo:
            self._undo.pop()()
        self.decoder.parts_were_replaced()

    def _record(self, name: str, value: Tensor) -> None:
        if self.steps:  # an all-reduce may also be asked for outside a step
            self.last[name] = value.detach().clone()

    def _install(self) -> None:
        decoder = self.decoder
        decoder.parts_were_replaced()
        self._hook(decoder, "norm", after=lambda y: self._record("final_norm", y))
        for index in range(len(decoder.layers)):
            self._install_layer(index)
        # An instance attribute hides the method of the group, which other code keeps using.
        tp = decoder.placement.tp
        before = vars(tp).get("all_reduce")
        self._undo.append(lambda: delattr(tp, "all_reduce") if before is None else setattr(tp, "all_reduce", before))
        tp.all_reduce = self._recording_all_reduce(tp.all_reduce)  # ty: ignore[invalid-assignment]

    def _install_layer(self, index: int) -> None:
        """Install the hooks of the layer at `index` in its stage."""
        layer, number = self.decoder.layers[index], self.decoder.stage[index]
        shape = self.decoder.spec.layers[number]
        for branch, spec in zip(layer.branches, shape.branches, strict=True):
            self._hook_sublayer(branch.sublayer, spec.sublayer, number)
        branches = dict(zip(map(id, shape.branches), layer.branches, strict=True))
        taps = taps_of(shape)
        for one, following in zip(taps, [*taps[1:], None], strict=True):
            name = f"{number}.{one.tap.name}"
            if one.tap.computation is Computation.NORM and one.tap not in one.branch.sublayer.taps:
                self._hook(branches[id(one.branch)], "norm", after=partial(self._record, name))
            elif one.tap.computation is Computation.RESIDUAL and following is not None:
                branch = branches[id(following.branch)]
                self._hook(branch, "sublayer" if branch.norm is None else "norm", before=partial(self._record, name))
        self._undo.append(lambda: self.decoder.layers.__setitem__(index, layer))
        before = (lambda x: self._record("embedding", x)) if number == 0 else None
        after = partial(self._record, f"{number}.{taps[-1].tap.name}")
        self.decoder.layers[index] = _Hooked(layer, before, after)  # ty: ignore[invalid-assignment]

    def _hook_sublayer(self, sublayer: Any, spec: SublayerSpec, layer: int) -> None:
        """Install the hooks on the matmuls of a sublayer. The attention backend records the tensors between them."""
        if isinstance(spec, ExpertsSpec):
            self._hook_experts(sublayer, spec, layer)
            return
        taps = [tap for tap in spec.taps if tap.is_compared]
        fused = {part for parts in spec.fused.values() for part in parts}
        for tap in taps:
            if tap.computation is Computation.PROJECTION and tap.module not in fused:
                record = partial(self._record_parts, layer, [tap])
                self._hook(sublayer, sublayer.linear_layers[tap.module], after=record)
        for whole, parts in spec.fused.items():
            projections = [tap for tap in taps if tap.computation is Computation.PROJECTION and tap.module in parts]
            if projections:
                self._hook(
                    sublayer, sublayer.linear_layers[whole], after=partial(self._record_parts, layer, projections)
                )
        convolved = [tap for tap in taps if tap.computation is Computation.CONVOLUTION and not tap.is_input]
        if convolved:
            self._hook(sublayer, "convolve", after=partial(self._record_parts, layer, convolved))
        for tap in taps:
            if tap.computation is Computation.NORM:
                self._hook(sublayer, sublayer.norms[tap.module], after=partial(self._record, f"{layer}.{tap.name}"))
            elif tap.computation is Computation.RECURRENCE:
                self._hook(sublayer, "recur", after=partial(self._record, f"{layer}.{tap.name}"))
            elif tap.computation is Computation.SUM:
                inputs = next(one for one in taps if one.is_input and one.module == tap.module)
                # The attention backend records the input of the output projection, unless a gate changes it.
                is_recorded = isinstance(spec, SelfAttentionSpec) and sublayer.gate is None
                taken = None if is_recorded else f"{layer}.{inputs.name}"
                self._hook_row_parallel(sublayer, sublayer.linear_layers[tap.module], f"{layer}.{tap.name}", taken)
            elif tap.computation is Computation.GATED and self._diagnostics:
                (whole,) = spec.fused
                self._hook_mirror(sublayer, sublayer.linear_layers[whole], f"{layer}.{tap.name}_mirrored")

    def _hook_experts(self, sublayer: Any, spec: ExpertsSpec, layer: int) -> None:
        """Install the hooks on the router, and on the all-reduces of the experts' results."""

        def routed(result: tuple[Tensor, Tensor]) -> None:
            ids, weights = result
            self._record(f"{layer}.routing", dense_routing(ids, weights, spec.choices))

        def summed(result: tuple[Tensor, Tensor | None]) -> None:
            for name, total in zip(("experts", "shared"), result, strict=True):
                if total is not None:
                    self._record(f"{layer}.{name}", total)

        self._hook(sublayer.router, "logits", after=partial(self._record, f"{layer}.router"))
        self._hook(sublayer, "router", after=routed)
        self._hook(sublayer, "sums", after=summed)

    def _record_parts(self, layer: int, taps: list[Tap], matmul: Tensor) -> None:
        """Record the results of one matmul [T, columns of all parts], each by its name as [T, parts, columns of
        one]."""
        tp = self.decoder.placement.tp
        parts = [columns_of(tap.name, self.decoder.spec, tp.rank, tp.size, layer) for tap in taps]
        columns = matmul.split([part.width for part in parts], 1)
        for tap, part, found in zip(taps, parts, columns, strict=True):
            self._record(f"{layer}.{tap.name}", found.unflatten(1, (-1, part.group)))

    def _hook_mirror(self, owner: Any, name: str, output: str) -> None:
        matmul = getattr(owner, name)
        self._hook(owner, name, before=lambda x: self._record(output, matmul(-x)))

    def _hook(self, owner: Any, name: str, before: Any = None, after: Any = None) -> None:
        original = getattr(owner, name)
        self._undo.append(lambda: setattr(owner, name, original))
        setattr(owner, name, _Hooked(original, before, after))

    def _hook_row_parallel(self, owner: Any, name: str, output: str, inputs: str | None) -> None:
        """Record the sum inside `all_reduce`, because the layer adds bias and residual before it returns."""
        layer = getattr(owner, name)

        def before(x: Tensor) -> None:
            if inputs is not None:
                self._record(inputs, x)
            if layer.adapted is not None and layer.adapted.rows is not None:
                # Its all-reduce exchanges the low-rank values of the update as well: call the layer once more.
                self._record(output, layer(x, None))
                if self._diagnostics:
                    self._record(f"{output}_partial", layer.matmul(x))
            elif self.decoder.placement.tp.size == 1:  # the matmul may add the residual itself: compute it without
                self._record(output, layer.matmul(x))
            else:
                self._summing = output, layer.bias

        self._hook(owner, name, before=before)

    def _recording_all_reduce(self, all_reduce: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def recording(x: Tensor) -> Tensor:
            if self._summing is None:
                return all_reduce(x)
            (name, bias), self._summing = self._summing, None
            if self._diagnostics:
                self._record(f"{name}_partial", x)
            total = all_reduce(x)
            self._record(name, total if bias is None else total + bias)
            return total

        return recording


class _Hooked:
    """A callable with a hook on its first argument and a hook on its result."""

    def __init__(self, inner: Any, before: Callable[[Tensor], None] | None, after: Callable[[Tensor], None] | None):
        self._inner = inner
        self._before = before
        self._after = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, x: Tensor, *others: Any, **named: Any) -> Any:
        if self._before is not None:
            self._before(x)
        result = self._inner(x, *others, **named)
        if self._after is not None:
            self._after(result)
        return result


def main(argv: list[str]) -> int:
    control = begin(argv)
    try:
        arguments = RankArguments.receive(control)
    except ChannelClosedError:
        return 1
    log_to_stderr(arguments.config, arguments.rank)

    def on_progress(text: str) -> None:
        control.send("progress", text=text)

    try:
        on_progress("joining the other ranks")
        groups = join(arguments)
        run_rank(arguments.config, groups.tp, Path(arguments.extra["folder"]), on_progress, groups.stage)
        control.send("done")
        groups.destroy()
    except StartupError as error:
        control.send("failed", cause=error.cause, fix=error.fix, exit_code=error.exit_code)
        return error.exit_code
    except ChannelClosedError:
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    # Skips interpreter teardown: another rank may be gone already, and gloo's threads would wait for it.
    os._exit(status)
