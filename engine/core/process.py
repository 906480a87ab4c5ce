"""The engine's process: `python -m engine.core.process --fd N --parent PID`, started by `engine.client`.

The first frame on the descriptor is the configuration. Loading sends progress frames, then the loop runs. The process
never outlives its frontend: end-of-file on the socket ends it, and so does the kernel when the parent dies. Does not
import torch (an inline rank does).
"""

import argparse
import contextlib
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.core.event_loop import EXIT_BUG, EXIT_OK, EXIT_RANK_DIED, EXIT_RANK_HUNG, EngineLoop
from engine.errors import StartupError, WorkerError
from engine.ipc import messages
from engine.ipc.frame_socket import FrameSocket
from engine.ipc.frames import Frame, FrameError, FrameReader
from engine.replay.fingerprint import numbers_digest
from engine.replay.recorder import RecordingExecutor
from engine.replay.recording import RecordingWriter
from engine.structured_output.manager import StructuredOutputManager
from engine.types import EngineInfo
from workers.config import LOADING_TIMEOUT_S
from workers.parent_death import die_with_parent

if TYPE_CHECKING:
    from workers.executor import Executor

logger = logging.getLogger("oarlock.engine")

_SHUTDOWN_S = 5.0  # for clean-up; then the process ends, whatever hangs
_ORPHAN_S = 1.0  # the same when the frontend is gone; ranks notice the end of this process by themselves
_WATCH_S = 1.0

StartExecutor = Callable[..., "Executor"]


def main(
    argv: list[str], start_executor: StartExecutor | None = None, *, loading_timeout_s: float = LOADING_TIMEOUT_S
) -> int:
    """Serve one frontend until it leaves. Returns the exit code: 0, 1 (our bug), 3 and 4 (start), 5 and 6 (ranks)."""
    parser = argparse.ArgumentParser(prog="engine.core.process", description="Internal: started by the server.")
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket")
    parser.add_argument("--parent", type=int, required=True, help="the process that must be alive for this one to be")
    parser.add_argument("--runs-rank", action="store_true", help="this process will run the single rank")
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole foreground group: the parent decides
    log_to_stderr()
    if start_executor is None:
        gc.disable()  # until the loop runs: imports make nothing but objects that stay
        if arguments.runs_rank:
            threading.Thread(target=_import_rank, name="imports", daemon=True).start()
        from workers.executor import start_executor as start_ranks

        start_executor = start_ranks
    with socket.socket(fileno=arguments.fd) as sock:
        try:
            return _serve(sock, start_executor, loading_timeout_s)
        except ConnectionError as error:
            logger.info('event=frontend_gone cause="%s"', error)
            return EXIT_OK


def _import_rank() -> None:
    """Import torch and the rank's modules while the configuration is on its way. Who needs them reports a failure."""
    with contextlib.suppress(Exception):
        import workers.executor

        workers.executor.import_rank()


def _serve(sock: socket.socket, start_executor: StartExecutor, loading_timeout_s: float) -> int:
    _leave_at_end_of_file(sock)
    try:
        config = messages.read_config(_first_frame(sock))
    except FrameError as error:
        logger.error('event=bad_config cause="%s"', error)
        return EXIT_BUG
    log_to_stderr(config.worker.log_level)
    loader = _GrammarLoader(config.worker.model_path)
    # An executor with rank processes finds a stuck rank by itself, and gets some time to report it first.
    watchdog = _LoadingWatchdog(
        sock, loading_timeout_s if config.inline_single_rank else loading_timeout_s + 2 * _SHUTDOWN_S
    )
    watchdog.start()
    try:
        executor = _start(config, start_executor, watchdog.progress)
        structured_output = loader.result()
    except ConnectionError:
        raise
    except Exception as error:
        failure = _startup_failure(error)
        sock.sendall(messages.failed(failure))
        return failure.exit_code
    finally:
        watchdog.stop()
    code = _loop(sock, replace(config, worker=executor.config), executor, structured_output)
    _Deadline(_SHUTDOWN_S, code).start()
    structured_output.close()
    executor.close()
    logger.info("event=engine_stopped exit_code=%d", code)
    return code


def _start(
    config: EngineConfig, start_executor: StartExecutor, on_progress: Callable[[str, float], None]
) -> "Executor":
    """Start and load the ranks. A recording file that cannot be made fails before the model is read."""
    writer = None if config.record_path is None else RecordingWriter(config.record_path)
    try:
        executor = start_executor(config.worker, inline=config.inline_single_rank, on_progress=on_progress)
    except BaseException:
        if writer is not None:
            writer.discard()
        raise
    return executor if writer is None else RecordingExecutor(executor, writer, config.record_limit_bytes)


def _startup_failure(error: Exception) -> StartupError:
    """The error to show the operator. Unexpected exceptions are logged with their traceback."""
    if isinstance(error, StartupError):
        return error  # the frontend prints it
    logger.exception("event=start_failed")
    if isinstance(error, WorkerError):
        fix = "The log says more. If memory ran out, use a smaller model or more ranks."
        return StartupError(f"Rank {error.rank} was lost while starting: {error.cause}.", fix, EXIT_RANK_DIED)
    cause = f"The engine failed while starting: {type(error).__name__}: {error}."
    return StartupError(cause, "The log has the traceback; please report it.", EXIT_BUG)


def _loop(
    sock: socket.socket, config: EngineConfig, executor: "Executor", structured_output: StructuredOutputManager
) -> int:
    sock.sendall(messages.ready(engine_info(config, executor)))
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    loop = EngineLoop(config, executor, FrameSocket(sock), structured_output=structured_output, wake_fd=wake_read)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    _StepWatchdog(loop, config.worker.step_timeout_s, is_inline=not executor.rank_pids).start()
    # Objects made while loading are kept for good: garbage collections during steps need not look through them.
    gc.collect()
    gc.freeze()
    gc.enable()
    logger.info("event=engine_ready num_blocks=%d block_size=%d", executor.info.num_blocks, executor.info.block_size)
    invariant = "true" if executor.info.batch_invariant else "false"
    logger.info('event=determinism batch_invariant=%s reason="%s"', invariant, executor.info.batch_invariant_reason)
    invariant = "true" if executor.info.rank_invariant else "false"
    logger.info('event=determinism rank_invariant=%s reason="%s"', invariant, executor.info.rank_invariant_reason)
    return loop.run()


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
        kv_cache_dtype=info.kv_cache_dtype,
        step_timeout_s=worker.step_timeout_s,
        max_silence_s=config.heartbeat_interval_s + worker.step_timeout_s,
    )


def _first_frame(sock: socket.socket) -> Frame:
    """The configuration. Nothing may follow it: the frontend sends more only after it has read `ready`."""
    reader = FrameReader()
    while data := sock.recv(1 << 16):
        frames = reader.feed(data)
        if len(frames) > 1 or (frames and frames[0].kind != "config"):
            raise FrameError("the first frame must be the configuration, and nothing may follow it")
        if frames:
            return frames[0]
    reader.finish()
    raise FrameError("the frontend left without a configuration")


def _leave_at_end_of_file(sock: socket.socket) -> None:
    """Start a thread that waits until the frontend closes its end, and ends this process `_ORPHAN_S` later."""

    def wait() -> None:
        poll = select.poll()
        poll.register(sock.fileno(), 0)  # hang-up is always reported; data is not
        poll.poll()
        _Deadline(_ORPHAN_S, EXIT_OK).run()

    threading.Thread(target=wait, name="frontend-watch", daemon=True).start()


class _GrammarLoader(threading.Thread):
    """Makes the `StructuredOutputManager`, which takes seconds, while the ranks load the weights."""

    def __init__(self, model_path: str) -> None:
        super().__init__(name="grammars", daemon=True)
        self._model_path = model_path
        self._manager: StructuredOutputManager | None = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._manager = StructuredOutputManager.open(self._model_path)
        except Exception as error:
            self._error = error

    def result(self) -> StructuredOutputManager:
        self.join()
        if self._manager is None:
            raise self._error or RuntimeError("the tokens were not read")
        return self._manager


class _Deadline(threading.Thread):
    """Ends the process after `seconds`, whatever its clean-up is waiting for."""

    def __init__(self, seconds: float, exit_code: int) -> None:
        super().__init__(name="deadline", daemon=True)
        self._seconds = seconds
        self._exit_code = exit_code

    def run(self) -> None:
        time.sleep(self._seconds)
        os._exit(self._exit_code)


class _LoadingWatchdog(threading.Thread):
    """Ends the process when loading makes no progress: the loading thread may be in a read that never returns."""

    def __init__(self, sock: socket.socket, limit_s: float) -> None:
        super().__init__(name="loading", daemon=True)
        self._sock = sock
        self._limit_s = limit_s
        self._state = ("starting", 0.0)
        self._since = time.monotonic()
        self._done = threading.Event()

    def progress(self, phase: str, fraction: float) -> None:
        self._state, self._since = (phase, fraction), time.monotonic()
        self._sock.sendall(messages.progress(phase, fraction))

    def stop(self) -> None:
        self._done.set()

    def run(self) -> None:
        while not self._done.wait(min(_WATCH_S, self._limit_s / 4)):
            if time.monotonic() - self._since > self._limit_s:
                break
        if self._done.is_set():
            return
        phase, fraction = self._state
        failure = StartupError(
            f"The start has made no progress for {self._limit_s:g} s while {phase} ({fraction:.0%}).",
            "If the model or Python's packages lie on a network file system, see whether it answers; then start again.",
            EXIT_RANK_HUNG,
        )
        logger.critical('event=start_failed cause="%s" fix="%s"', failure.cause, failure.fix)
        faulthandler.dump_traceback(sys.stderr)
        self._sock.sendall(messages.failed(failure))
        os._exit(failure.exit_code)


class _StepWatchdog(threading.Thread):
    """Ends the process when a step takes longer than `step_timeout_s`: the loop itself cannot, it is inside the step.

    An executor with rank processes finds a hung rank by itself, and gets some time to report it first.
    """

    def __init__(self, loop: EngineLoop, step_timeout_s: float, *, is_inline: bool) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._loop = loop
        self._limit_s = step_timeout_s if is_inline else step_timeout_s + 2 * _SHUTDOWN_S

    def run(self) -> None:
        while True:
            time.sleep(min(_WATCH_S, self._limit_s / 4))
            since = self._loop.busy_since
            if since is not None and time.monotonic() - since > self._limit_s:
                logger.critical("event=step_hung limit_s=%g", self._limit_s)
                faulthandler.dump_traceback(sys.stderr)
                os._exit(EXIT_RANK_HUNG)


class LineFormatter(logging.Formatter):
    """One line per event: `time=... level=... logger=... pid=... event=... key=value`, times in UTC.

    Control characters are escaped, so that no logged text can start a line of its own; tracebacks follow indented.
    """

    converter = time.gmtime

    def __init__(self) -> None:
        super().__init__("time=%(asctime)s level=%(levelname)s logger=%(name)s pid=%(process)d %(message)s")
        self.default_time_format = "%Y-%m-%dT%H:%M:%S"
        self.default_msec_format = "%s.%03dZ"

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _on_one_line(super().formatMessage(record))

    def formatException(self, ei) -> str:
        lines = super().formatException(ei).splitlines()
        return "\n".join("    " + _on_one_line(line) for line in lines)


def _on_one_line(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def log_to_stderr(level: str = "INFO") -> None:
    """Make all loggers of this process write to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger("oarlock")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
