"""Replay of a recording: runs its steps on ranks, without scheduler or server, and compares the outputs.

`python -m oarlock.engine.replay`, started by `oarlock replay`. This is possible because all state that a rank keeps
between steps is a function of the steps, from the first one on. All inputs come from the recording, including sampled
ids, so a difference in one step does not change the tokens of the next. But penalties count the tokens that the ranks
sample in the replay.

Exit codes: 0 the same outputs; 1 other outputs, or a rank failed; 3 and 4 as at a start; 130 interrupted.
"""

import argparse
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from oarlock.base.errors import StartupError
from oarlock.base.python_child import die_with_parent, run_while_read
from oarlock.base.watched_reads import run_watched
from oarlock.engine.kv_cache.state_slots import NULL_SLOT
from oarlock.engine.replay.comparison import ReplayComparison
from oarlock.engine.replay.recording import MASKS, STEP, Header, Recording
from oarlock.workers.adapter_digest import adapter_digest
from oarlock.workers.adapters import NO_SLOT, AdapterCommand, CommandKind, read_commands
from oarlock.workers.config import WorkerConfig, WorkerInfo
from oarlock.workers.errors import WorkerError
from oarlock.workers.executor import Executor, start_executor
from oarlock.workers.fingerprint import layout, model_sums, versions
from oarlock.workers.protocol import ProtocolError, StepMetadata, StepOutput, table_width, unpack_output, unpack_step

EXIT_SAME, EXIT_DIFFERENT, EXIT_INTERRUPTED = 0, 1, 130
_PROGRESS_S = 0.2


@dataclass(slots=True)
class RecordingCounts:
    """Counts of steps and blocks from a first pass over the file."""

    num_steps: int = 0
    num_outputs: int = 0
    num_tokens: int = 0
    num_blocks: int = 1  # up to the highest that any step names
    adapters: dict[str, AdapterCommand] = field(default_factory=dict)  # PREPARE of each adapter in a slot, by digest


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="oarlock.engine.replay", description="Internal: started by `oarlock replay`.")
    parser.add_argument("file")
    parser.add_argument("--parent", type=int, help="the process that must be alive for this one to be")
    parser.add_argument("--tensor-parallel-size", type=int)
    parser.add_argument("--pipeline-parallel-size", type=int)
    parser.add_argument("--model")
    parser.add_argument("--tolerance", type=float)
    arguments = parser.parse_args(argv)
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    try:
        sizes = arguments.tensor_parallel_size, arguments.pipeline_parallel_size
        return replay(arguments.file, *sizes, arguments.model, arguments.tolerance)
    except StartupError as error:
        _clear_progress()
        sys.stderr.write(f"error: {' '.join(error.cause.split())}\nfix: {' '.join(error.fix.split())}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def replay(path: str, ranks: int | None, stages: int | None, model: str | None, tolerance: float | None) -> int:
    """Replay the whole file and print the result. Returns the exit code. Raises `StartupError`.

    `ranks`: of each of `stages`; None: as recorded. The bits do not depend on `stages`.
    """
    if tolerance is not None and not tolerance >= 0:
        raise StartupError(f"--tolerance is {tolerance:g}.", "Use 0 or a small number such as 1e-4.")
    recording = Recording(path)
    _check_layout(recording)
    counts = _count(recording)
    if not counts.num_steps:
        raise StartupError(f"{path} contains no steps.", "Record while the server processes requests.")
    config = _config(recording, counts, ranks, stages, model)
    _check_adapters(counts)
    _print_head(recording, counts, config)
    executor = start_executor(config, lambda phase, share, _="": _progress(f"{phase} {share:.0%}"))
    unchecked = _inexact_reason(recording.header, executor.info)
    if tolerance is None and unchecked is None:
        tolerance = 0.0
    comparison = ReplayComparison(tolerance)
    try:
        failure = _run(executor, recording, counts, comparison)
    finally:
        _clear_progress()
        executor.close()
    return _verdict(counts, comparison, failure, unchecked)


def _inexact_reason(header: Header, info: WorkerInfo) -> str | None:
    """Return why these ranks may give other bits than the recorded ones; None if the bits must be the same."""
    recorded = header.worker["tensor_parallel_size"]
    if info.tensor_parallel_size == recorded:
        return None
    if not info.rank_invariant:
        return info.rank_invariant_reason
    if not header.info.get("rank_invariant", False):
        return f"as recorded: {header.info.get('rank_invariant_reason', 'an older version added in another order')}"
    return None


def _run(executor: Executor, recording: Recording, counts: RecordingCounts, comparison: ReplayComparison) -> str | None:
    """Run every step in order. Returns a description if a rank failed."""
    shown = 0.0
    try:
        for number, (step, expected) in enumerate(_steps(recording), 1):
            executor.submit(step)
            got = executor.collect()
            if expected is not None:
                comparison.add(step, expected, got)
            if time.monotonic() - shown > _PROGRESS_S:
                shown = time.monotonic()
                _progress(f"step {number} of {counts.num_steps}")
    except WorkerError as error:
        return f"rank {error.rank} failed at step {error.step_id}: {error.cause}"
    return None


def _steps(recording: Recording) -> Iterator[tuple[StepMetadata, StepOutput | None]]:
    """Yield each step with its output; None if none was recorded.

    A step may be recorded before the output of the previous one, and refer to its tokens. They are inserted.
    """
    waiting: deque[StepMetadata] = deque()
    before: StepOutput | None = None
    for record in recording.records():
        if record.kind == STEP:
            waiting.append(unpack_step(record.content))
            continue
        if record.kind == MASKS:
            bits = waiting[-1].mask_bits
            bits[:] = np.frombuffer(record.content, bits.dtype).reshape(bits.shape)
            continue
        output = unpack_output(record.content)
        while waiting and waiting[0].step_id < output.step_id:
            yield _with_tokens(waiting.popleft(), before), None
        if waiting:
            yield _with_tokens(waiting.popleft(), before), output
        before = output
    for step in waiting:
        yield _with_tokens(step, before), None


def _with_tokens(step: StepMetadata, before: StepOutput | None) -> StepMetadata:
    """Replace references in `step` to the tokens that the previous step sampled, if its output is known."""
    if before is not None and before.step_id == step.step_id - 1:
        unknown = step.token_ids < 0
        step.token_ids[unknown] = before.token_ids[-1 - step.token_ids[unknown]]
    return step


class _SeenMemory:
    """Entries of block tables, slots of recurrent state and slots of adapters that the steps so far have written."""

    def __init__(self, worker: WorkerConfig) -> None:
        self._block_size = worker.block_size
        self._shape = worker.max_num_seqs, table_width(worker)
        self._tables: dict[int, np.ndarray] = {}  # by memory group: whether each entry was written
        self._slots = {NULL_SLOT}
        self._adapter_slots = {NO_SLOT}
        self._prepared: dict[str, AdapterCommand] = {}  # LoRA adapters by digest
        self.adapters: dict[str, AdapterCommand] = {}  # PREPARE of each adapter that was in a slot

    def add_tables(self, step: StepMetadata) -> None:
        """Add the table entries of `step`, which are written before any is read."""
        for group in np.unique(step.table_groups).tolist():
            table, is_own = self._tables.setdefault(group, np.zeros(self._shape, bool)), step.table_groups == group
            table[step.table_rows[is_own], step.table_columns[is_own]] = True

    def add_slots(self, step: StepMetadata) -> None:
        """Add the slots that `step` writes, which later steps may read."""
        self._slots.update(step.state_writes.tolist(), step.state_saves[:, 2].tolist())

    def add_adapters(self, step: StepMetadata) -> bool:
        """Add the slots that `step` fills with adapters, which is done before the rest of it, and the adapters.

        Return False if an adapter was prepared by no step so far, so that ranks cannot have it.
        """
        for command in read_commands(step.adapter_commands, step.adapter_digests, step.adapter_texts):
            if command.kind is CommandKind.PREPARE:
                self._prepared[command.digest] = command
            elif command.kind is CommandKind.PUT:
                if command.digest not in self._prepared:
                    return False
                self._adapter_slots.add(command.slot)
                self.adapters.setdefault(command.digest, self._prepared[command.digest])
        return True

    def has_all_of(self, step: StepMetadata) -> bool:
        """Return whether each block and slot that `step` reads was assigned. Models have blocks, slots or both."""
        if not self._slots.issuperset(step.state_reads.tolist()):
            return False
        if not self._adapter_slots.issuperset(step.adapter_slots.tolist()):
            return False
        if not self._tables:
            return len(step.state_reads) == step.num_seqs
        ends = zip(step.rows.tolist(), (-(-step.seq_lens // self._block_size)).tolist(), strict=True)
        return all(table[row, :end].all() for row, end in ends for table in self._tables.values())


def _count(recording: Recording) -> RecordingCounts:
    counts = RecordingCounts()
    seen = _SeenMemory(WorkerConfig(**recording.header.worker))
    counts.adapters = seen.adapters
    try:
        for step, output in _steps(recording):
            seen.add_tables(step)
            if not seen.add_adapters(step) or not seen.has_all_of(step):
                raise StartupError(
                    f"{recording.path} does not begin with the first step: step {step.step_id} reads memory that no "
                    "step in it has assigned.",
                    "Replay the whole recording.",
                )
            seen.add_slots(step)
            counts.num_steps += 1
            counts.num_outputs += output is not None
            counts.num_tokens += step.num_tokens
            highest = int(step.table_blocks.max(initial=0)) + 1
            counts.num_blocks = max(counts.num_blocks, highest)
    except ProtocolError as error:
        raise StartupError(
            f"{recording.path} contains a step that cannot be read: {error}.",
            "Replay it with the version that wrote it.",
        ) from None
    return counts


def _check_layout(recording: Recording) -> None:
    header = recording.header
    known = {field.name for field in fields(WorkerConfig)}
    if header.layout == layout() and header.worker.keys() <= known:
        return
    theirs, ours = header.versions.get("oarlock", "unknown"), versions()["oarlock"]
    raise StartupError(
        f"{recording.path} was recorded by oarlock {theirs}, whose steps this oarlock ({ours}) cannot read.",
        f"Replay it with the version that wrote it ({theirs}), or record again with this one.",
    )


def _config(
    recording: Recording, counts: RecordingCounts, ranks: int | None, stages: int | None, model: str | None
) -> WorkerConfig:
    """Return the recorded configuration for one replica and one host, with another number of ranks or model directory
    if given."""
    header = recording.header
    changes: dict[str, Any] = {"num_kv_blocks": counts.num_blocks, "cpu_affinity": "auto", "log_level": "WARNING"}
    changes |= {"data_parallel_size": 1, "data_parallel_rank": 0, "host_free_bytes": None}
    changes["lora_adapters"] = ()  # `_check_adapters` checks the adapters that are used
    recorded = WorkerConfig(**header.worker)
    ranks, stages = ranks or recorded.tensor_parallel_size, stages or recorded.pipeline_parallel_size
    changes |= {"nnodes": 1, "tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
    if ranks * stages != recorded.ranks_per_node:
        changes["num_threads"] = None  # cores / ranks again
    if model is not None:
        changes["model_path"] = model
    config = recorded.with_(**changes)
    _check_model(header, Path(config.model_path), given=model is not None)
    return config


def _check_model(header: Header, directory: Path, *, given: bool) -> None:
    if not directory.is_dir():
        raise StartupError(
            f"The model {directory} {'does not exist' if given else 'of the recording is not on this machine'}.",
            "Give the directory of the same checkpoint with --model PATH.",
        )
    here = model_sums(directory)
    names = sorted(header.model.keys() | here.keys())
    if header.worker["load_format"] == "dummy":
        names = ["config.json"]  # no weights were read
    other = [name for name in names if here.get(name) != header.model.get(name)]
    if other:
        raise StartupError(
            f"{directory} is not the model of this recording: {', '.join(other[:3])} "
            f"{'differs' if len(other) == 1 else 'differ'}{' and more' if len(other) > 3 else ''}.",
            "Give the checkpoint it was recorded with: --model PATH.",
        )


def _check_adapters(counts: RecordingCounts) -> None:
    """Check that each LoRA adapter of the recording has the same content here. Raises `StartupError`."""
    for digest, command in counts.adapters.items():
        named = f"The adapter {command.name!r} of the recording, {digest},"
        fix = f"Put its files into {command.directory}."
        try:
            found = run_watched(partial(adapter_digest, command.directory), command.directory)
        except OSError as error:
            raise StartupError(f"{named} cannot be read from {command.directory}: {error.strerror}.", fix) from None
        if found != digest:
            raise StartupError(f"{named} differs from the content of {command.directory}, {found}.", fix)


# -- output


def _print_head(recording: Recording, counts: RecordingCounts, config: WorkerConfig) -> None:
    header = recording.header
    info = header.info
    print(
        f"recording  {recording.path}: {counts.num_steps} steps, {counts.num_tokens} tokens, {header.started}, "
        f"oarlock {header.versions.get('oarlock', '?')}\n"
        f"model      {config.model_path} ({info['architecture']}, {config.dtype}, "
        f"KV cache in {config.kv_cache_dtype})\n"
        f"ranks      recorded with {_ranks(WorkerConfig(**header.worker))}, replayed with {_ranks(config)}, "
        f"on {config.device}"
    )
    for digest, command in counts.adapters.items():
        print(f"adapter    {command.name} ({digest}): {command.directory}")
    here = versions()
    others = [f"{name} {was} -> {here[name]}" for name, was in header.versions.items() if here.get(name, was) != was]
    if others:
        print(f"versions   {', '.join(others)}: other rounding is possible")
    print(f"end        {_end_reason(recording)}")
    if recording.torn is not None:
        print(f"note       {recording.torn}; the records before it are replayed")
    sys.stdout.flush()


def _end_reason(recording: Recording) -> str:
    if recording.end is not None:
        return recording.end
    if recording.is_being_written:
        return "not yet: the server is still recording; the records so far are replayed"
    return "unknown: the server was killed with its engine, or the machine stopped"


def _ranks(config: WorkerConfig) -> str:
    """Describe the ranks in words: `2`, or `2 in each of 3 stages`."""
    stages = config.pipeline_parallel_size
    return f"{config.tensor_parallel_size}" + (f" in each of {stages} stages" if stages > 1 else "")


def _verdict(counts: RecordingCounts, comparison: ReplayComparison, failure: str | None, unchecked: str | None) -> int:
    """Print the result, and return the exit code. `unchecked`: why the bits may differ from the recorded ones."""
    print(comparison.table())
    unanswered = counts.num_steps - counts.num_outputs
    if unanswered:
        print(f"{unanswered} step(s) have no recorded output and were run without a comparison")
    if comparison.tolerance is None and comparison.logprobs.compared:
        print(f"logprobs are not checked (--tolerance checks them): {unchecked}")
    elif comparison.tolerance == 0:
        print("logprobs are compared bit by bit")
    if comparison.first is not None:
        print(f"first difference: {comparison.first}")
        if comparison.tolerance is None:
            print("near ties may be decided differently; with the recorded number of ranks all outputs must be equal")
    if failure is not None:
        print(f"stopped: {failure}")
    same = comparison.is_equal and failure is None
    print("result: the same outputs" if same else "result: NOT the same")
    return EXIT_SAME if same else EXIT_DIFFERENT


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[Kreplay: {text}")
        sys.stderr.flush()


def _clear_progress() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the ranks as well
    sys.exit(run_while_read(lambda: main(sys.argv[1:])))
