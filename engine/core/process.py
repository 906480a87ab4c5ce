"""The engine's process: reads its configuration, starts the ranks and runs the loop.

The first frame on the socket is the configuration. Loading sends progress frames, then the loop runs. The process never
outlives its frontend: end-of-file on the socket ends it. Does not import torch.
"""

import faulthandler
import gc
import hashlib
import json
import logging
import os
import select
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from oarlock.base.errors import EXIT_BUG, EXIT_OK, EXIT_RANK_HUNG, StartupError
from oarlock.engine.config import EngineConfig
from oarlock.engine.core.event_loop import EngineLoop
from oarlock.engine.core.log_format import log_to_stderr
from oarlock.engine.ipc import messages
from oarlock.engine.ipc.frames import FrameError, FrameReader, FrameSocket
from oarlock.engine.replay.recording import RecordingExecutor, RecordingWriter
from oarlock.engine.structured_output.manager import StructuredOutputManager
from oarlock.engine.types import EngineInfo
from oarlock.workers.config import LOADING_TIMEOUT_S, NodesConfig, OnProgress, WorkerConfig, WorkerInfo
from oarlock.workers.errors import WorkerError
from oarlock.workers.fingerprint import code_sums, model_sums, versions

if TYPE_CHECKING:
    from oarlock.engine.kv_cache.publisher import KvEventPublisher
    from oarlock.workers.executor import Executor

logger = logging.getLogger("oarlock.engine")

_SHUTDOWN_S = 5.0  # time for clean-up; afterwards the process ends, even if something hangs
_ORPHAN_S = 1.0  # time for clean-up after the frontend is gone; ranks notice the end of this process by themselves
_WATCH_S = 1.0


class StartExecutor(Protocol):
    """Starts the ranks and loads the model: `oarlock.workers.executor.start_executor` with its `ahead` given."""

    def __call__(
        self,
        config: WorkerConfig,
        on_progress: OnProgress,
        /,
        *,
        nodes: NodesConfig | None,
        leave_pid: int,
    ) -> "Executor": ...


def run(fd: int, start_executor: StartExecutor, *, loading_timeout_s: float = LOADING_TIMEOUT_S) -> int:
    """Serve the frontend behind socket `fd` until it leaves.

    Returns the exit code: 0, 1 (our bug), 3 and 4 (start), 5 and 6 (ranks).
    """
    log_to_stderr()
    with socket.socket(fileno=fd) as sock:
        try:
            return _serve(sock, start_executor, loading_timeout_s)
        except ConnectionError as error:
            logger.info('event=frontend_gone cause="%s"', error)
            return EXIT_OK


def _serve(sock: socket.socket, start_executor: StartExecutor, loading_timeout_s: float) -> int:
    _leave_at_end_of_file(sock)
    try:
        config = _first_message(sock).read()
    except FrameError as error:
        logger.error('event=invalid_config cause="%s"', error)
        return EXIT_BUG
    log_to_stderr(config.worker.log_level, is_json=config.worker.log_format == "json")
    loader = _GrammarLoader(config.tokenizer_path or config.worker.model_path) if config.writes_text else None
    watchdog = _LoadingWatchdog(sock, loading_timeout_s)
    watchdog.start()
    kv_events = None
    try:
        kv_events = _open_kv_events(config)
        executor = _start(config, start_executor, watchdog.progress)
        structured_output = None if loader is None else loader.result()
    except ConnectionError:
        raise
    except Exception as error:
        if kv_events is not None:
            kv_events.close()
        failure = _startup_failure(error)
        sock.sendall(messages.encode(messages.Failed.of(failure)))
        return failure.exit_code
    finally:
        watchdog.stop()
    code, ending = _loop(
        sock, replace(config, worker=executor.config, nodes=None), executor, structured_output, kv_events
    )
    _Deadline(_SHUTDOWN_S, code).start()
    if isinstance(executor, RecordingExecutor):
        executor.end(ending)
    if kv_events is not None:
        kv_events.close()
    if structured_output is not None:
        structured_output.close()
    executor.close(None if code == EXIT_OK else RuntimeError("the engine failed; the log of node 0 has the cause"))
    logger.info("event=engine_stopped exit_code=%d", code)
    return code


def _start(config: EngineConfig, start_executor: StartExecutor, on_progress: OnProgress) -> "Executor":
    """Start and load the ranks. If a recording file cannot be made, this fails before the model is read."""
    writer = None if config.record_path is None else RecordingWriter(config.record_path)
    try:
        # A node that leaves ends the group as the operator of this host would.
        executor = start_executor(config.worker, on_progress, nodes=config.nodes, leave_pid=os.getppid())
    except BaseException:
        if writer is not None:
            writer.discard()
        raise
    return executor if writer is None else RecordingExecutor(executor, writer, config.record_limit_bytes)


def _startup_failure(error: Exception) -> StartupError:
    """Return the error to show the operator. Unexpected exceptions are logged with their traceback."""
    if isinstance(error, StartupError):
        return error  # the frontend prints it
    logger.exception("event=start_failed")
    if isinstance(error, WorkerError):
        fix = "The log has the cause. If memory ran out, use a smaller model or more ranks."
        return StartupError(f"Rank {error.rank} was lost while starting: {error.cause}.", fix, error.exit_code)
    cause = f"The engine failed while starting: {type(error).__name__}: {error}."
    return StartupError(cause, "The log has the traceback; please report it.", EXIT_BUG)


def _open_kv_events(config: EngineConfig) -> "KvEventPublisher | None":
    """Bind the sockets of KV events before the model is read. Imports the libraries only if events are configured."""
    if config.kv_events is None:
        return None
    from oarlock.engine.kv_cache.publisher import KvEventPublisher

    return KvEventPublisher(config.kv_events, config.worker.data_parallel_rank)


def _loop(
    sock: socket.socket,
    config: EngineConfig,
    executor: "Executor",
    structured_output: StructuredOutputManager | None,
    kv_events: "KvEventPublisher | None",
) -> tuple[int, str]:
    """Run the loop. Return the exit code and the reason of its end."""
    info = executor.info
    sock.sendall(messages.encode(messages.Ready(engine_info(config, executor))))
    loop = EngineLoop(config, executor, FrameSocket(sock), structured_output=structured_output, kv_events=kv_events)
    if kv_events is not None:
        kv_events.start(info.block_size, loop.scheduler.memory.leader.span)
    # Objects created while loading are kept for good: garbage collections during steps need not scan them.
    gc.collect()
    gc.freeze()
    gc.enable()
    logger.info("event=engine_ready num_blocks=%d block_size=%d", info.num_blocks, info.block_size)
    if info.kv_offload is not None:
        tiers = info.kv_offload
        fields = tiers.num_slots, tiers.bytes_per_block, tiers.max_disk_bytes, tiers.read_bytes_per_s or 0.0
        logger.info("event=kv_offload host_blocks=%d block_bytes=%d disk_bytes=%d read_bytes_per_s=%.0f", *fields)
    invariant = "true" if info.batch_invariant else "false"
    logger.info('event=determinism batch_invariant=%s reason="%s"', invariant, info.batch_invariant_reason)
    invariant = "true" if info.rank_invariant else "false"
    logger.info('event=determinism rank_invariant=%s reason="%s"', invariant, info.rank_invariant_reason)
    return loop.run(), loop.ending


def engine_info(config: EngineConfig, executor: "Executor") -> EngineInfo:
    info, worker = executor.info, config.worker
    return EngineInfo(
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_seqs=worker.max_num_seqs,
        max_num_batched_tokens=worker.max_num_batched_tokens,
        tensor_parallel_size=info.tensor_parallel_size,
        device=info.device,
        dtype=info.dtype,
        attention_backend=info.attention_backend,
        architecture=info.architecture,
        num_parameters=info.num_parameters,
        active_parameters=info.active_parameters,
        weight_bytes_per_rank=info.weight_bytes_per_rank,
        kv_bytes_per_token_per_rank=info.kv_bytes_per_token_per_rank,
        enable_prefix_caching=config.enable_prefix_caching,
        load_seconds=info.load_seconds,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        batch_invariant=info.batch_invariant,
        batch_invariant_reason=info.batch_invariant_reason,
        rank_invariant=info.rank_invariant,
        rank_invariant_reason=info.rank_invariant_reason,
        rank_pids=executor.rank_pids,
        numbers_digest=numbers_digest(worker, info),
        quantization=info.quantization,
        input_rounding=info.input_rounding,
        kv_cache_dtype=info.kv_cache_dtype,
        step_timeout_s=worker.step_timeout_s,
        pipeline_parallel_size=worker.pipeline_parallel_size,
        nnodes=worker.nnodes,
        hidden_size=info.hidden_size,
        text_part_of=info.text_part_of,
        served_by=info.served_by,
        is_replicated=info.is_replicated,
        groups=info.groups,
        max_loras=worker.max_loras,
        max_lora_rank=worker.max_lora_rank if worker.max_loras else 0,
        adapter_slot_bytes=info.adapter_slot_bytes,
        max_silence_s=config.heartbeat_interval_s + worker.step_timeout_s,
    )


def _first_message(sock: socket.socket) -> messages.Config:
    """Read the configuration. Nothing may follow it: the frontend sends more only after it has read `ready`."""
    reader = FrameReader()
    while data := sock.recv(1 << 16):
        payloads = reader.feed(data)
        if payloads:
            message = messages.read_from_frontend(payloads[0])
            if len(payloads) > 1 or not isinstance(message, messages.Config):
                raise FrameError("the first frame must be the configuration, and nothing may follow it")
            return message
    reader.finish()
    # The frontend's start failed, and it reports the reason: this is no error of the engine.
    raise ConnectionError("the frontend left before it sent a configuration")


def _leave_at_end_of_file(sock: socket.socket) -> None:
    """Start a thread that waits until the frontend closes its end, and ends this process `_ORPHAN_S` later."""

    def wait() -> None:
        poll = select.poll()
        poll.register(sock.fileno(), 0)  # hang-up is always reported; data is not
        poll.poll()
        _Deadline(_ORPHAN_S, EXIT_OK).run()

    threading.Thread(target=wait, name="frontend-watch", daemon=True).start()


class _GrammarLoader(threading.Thread):
    """Creates the `StructuredOutputManager`, which takes seconds, while the ranks load the weights."""

    def __init__(self, tokenizer_path: str) -> None:
        super().__init__(name="grammars", daemon=True)
        self._tokenizer_path = tokenizer_path
        self._manager: StructuredOutputManager | None = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._manager = StructuredOutputManager.open(self._tokenizer_path)
        except Exception as error:
            self._error = error

    def result(self) -> StructuredOutputManager:
        self.join()
        if self._manager is None:
            raise self._error or RuntimeError("the tokenizer could not be read")
        return self._manager


class _Deadline(threading.Thread):
    """Ends the process after `seconds`, even if its clean-up hangs."""

    def __init__(self, seconds: float, exit_code: int) -> None:
        super().__init__(name="deadline", daemon=True)
        self._seconds = seconds
        self._exit_code = exit_code

    def run(self) -> None:
        time.sleep(self._seconds)
        os._exit(self._exit_code)


class _LoadingWatchdog(threading.Thread):
    """Ends the process if loading makes no progress: the loading thread may be in a read that never returns."""

    def __init__(self, sock: socket.socket, limit_s: float) -> None:
        """`limit_s`: time after which the executor reports a stuck rank; this thread waits a tenth longer."""
        super().__init__(name="loading", daemon=True)
        self._sock = sock
        self._limit_s = limit_s
        self._state = ("starting", 0.0)
        self._since = time.monotonic()
        self._done = threading.Event()

    def progress(self, phase: str, fraction: float, detail: str = "") -> None:
        self._state, self._since = (phase, fraction), time.monotonic()
        self._sock.sendall(messages.encode(messages.Progress(phase, round(fraction, 4), detail)))

    def stop(self) -> None:
        self._done.set()

    def run(self) -> None:
        while not self._done.wait(min(_WATCH_S, self._limit_s / 4)):
            if time.monotonic() - self._since > 1.1 * self._limit_s:
                break
        if self._done.is_set():
            return
        phase, fraction = self._state
        failure = StartupError(
            f"The start has made no progress for {self._limit_s:g} s while {phase} ({fraction:.0%}).",
            "If the model or Python's packages are on a network file system, check that it responds; then start again.",
            EXIT_RANK_HUNG,
        )
        logger.critical('event=start_failed cause="%s" fix="%s"', failure.cause, failure.fix)
        faulthandler.dump_traceback(sys.stderr)
        self._sock.sendall(messages.encode(messages.Failed.of(failure)))
        os._exit(failure.exit_code)


def numbers_digest(worker: WorkerConfig, info: WorkerInfo) -> str:
    """Return the SHA-256 of everything below text that affects values: equal at every start with the same inputs."""
    weights = f"dummy {worker.seed}" if worker.load_format == "dummy" else "stored"
    names = ("dtype", "quantization", "dequantize", "kv_cache_dtype", "num_threads", "block_size", "max_model_len")
    run = {name: getattr(worker, name) for name in names}
    found = {name: getattr(info, name) for name in ("tensor_parallel_size", "device", "attention_backend", "kernels")}
    if info.served_by != "oarlock":
        found["served_by"] = info.served_by
    if info.served_by == "checkpoint":
        found["code"] = code_sums(Path(worker.model_path))
    if info.rank_invariant:  # they do not change any bit of a result
        del found["tensor_parallel_size"], run["num_threads"]
    parts = [model_sums(Path(worker.model_path)), weights, run, found, versions()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
