"""Runner of batches behind the server's other requests. It resumes batches after a restart.

The responses on the disk decide: after a kill, a batch is read again from its file of requests, requests that have a
response are skipped, and each request has exactly one line in the end. Descriptions only record the progress. A server
may start while its predecessor still finishes its requests. Then it serves everything else, and resumes the batches
when the predecessor has ended, even if it was killed.
"""

import asyncio
import errno
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from oarlock.base.errors import StartupError
from oarlock.engine.errors import EngineDeadError
from oarlock.engine.panics import ENDS_TASK
from oarlock.engine.types import MAX_PRIORITY
from oarlock.server.endpoints.batches.batch import UNANSWERED, Batch, BatchEndpoints, BatchRun
from oarlock.server.endpoints.batches.batch_file import OutputFile, RequestFile, usage_of
from oarlock.server.endpoints.batches.directory import (
    BATCH_ID,
    BatchDirectory,
    FileStore,
    StoredFile,
    log_failure,
    new_id,
)
from oarlock.server.endpoints.batches.key_shares import BatchLimiter, FairLimiter, KeyNames, KeyQuota
from oarlock.server.errors import HttpError, retry_after
from oarlock.server.http.large_body import LargeBodies
from oarlock.server.http.server_state import ServerState
from oarlock.server.observability.logs import event, logger
from oarlock.server.schemas.batches import BatchRequest, WrongBatchError

MAX_REQUESTS = 50_000  # limit of one batch
MAX_BATCHES = 10_000  # batches that are kept; the oldest ended batches are forgotten first
MAX_OPEN = 256
_MAX_PARALLEL_BATCHES = 4  # batches of one key that run in parallel
_CHECKED_AT_ONCE = 1  # files that are read whole at the same time; reading takes the most memory
_OUTPUT, _ERRORS = "output", "errors"
_log = logger("batch")
_ResultT = TypeVar("_ResultT")
_POLL_S = 0.5  # interval of checks whether another server has released the directory
_RETRY_S = 5


@dataclass(slots=True)
class _Job:
    """An open batch and its files. Only the thread of `disk` touches the files."""

    batch: Batch
    disk: ThreadPoolExecutor
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # set if the batch was cancelled
    is_wanted: bool = True  # False after the server stops
    requests: RequestFile | None = None
    results: OutputFile | None = None

    def close(self) -> None:
        """Close the files, on the disk's thread. All responses are on the disk when this returns."""
        if self.results is not None:
            self.results.close()
        if self.requests is not None:
            self.requests.close()
        self.requests = self.results = None

    async def on_disk(self, function: Callable[..., _ResultT], *arguments: Any) -> _ResultT:
        return await asyncio.get_running_loop().run_in_executor(self.disk, function, *arguments)


class BatchRunner:
    """All batches of one directory. Call its methods on the event loop."""

    def __init__(
        self,
        directory: BatchDirectory,
        files: FileStore,
        endpoints: BatchEndpoints,
        state: ServerState,
        names: KeyNames,
        large_bodies: LargeBodies,
        max_line: int,
    ) -> None:
        """Read the descriptions of all batches. Raises `StartupError`.

        `large_bodies`: reads long lines. `max_line`: largest size of a request in bytes.
        """
        self.files = files
        self.names = names
        files.is_used = self._reads
        self._directory = directory
        self._endpoints = endpoints
        self._state = state
        self._max_line = max_line
        self._large_bodies = large_bodies
        self._batches = dict(directory.descriptions("batches", BATCH_ID, Batch))
        for batch in self._batches.values():
            for kind in (_OUTPUT, _ERRORS):
                directory.count(batch.owner, _size(directory.work(batch.id, kind)) or 0)
        self._jobs: dict[str, _Job] = {}
        self._num_open = KeyQuota(MAX_OPEN, is_shared=directory.bytes.is_shared)
        self._tasks: set[asyncio.Task[None]] = set()
        self._active: defaultdict[str | None, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_MAX_PARALLEL_BATCHES)
        )
        self._checks = FairLimiter(_CHECKED_AT_ONCE)
        self._is_stopping = False
        self.ended_requests = {"answered": 0, "failed": 0}  # requests since the start

    def start(self) -> None:
        """Resume the open batches. The engine must be ready."""
        async_llm = self._state.async_llm
        assert async_llm is not None, "batches start when the server is ready"
        info = async_llm.engine.info
        # This also defers further sequences of a batch request with many choices or texts.
        async_llm.admission_queue.others_are_open = lambda: self._state.num_in_flight > 0
        async_llm.one_prompt = asyncio.Semaphore(1)
        num_rows, is_shared = info.data_parallel_size * info.max_num_seqs, self._directory.bytes.is_shared
        self._limiter = BatchLimiter(num_rows, self._state, is_shared=is_shared)
        for batch in sorted(self._batches.values(), key=lambda batch: batch.id):
            if batch.is_open:
                self._num_open.add(batch.owner, 1)
                self._begin(batch)

    async def stop(self) -> None:
        """Stop all batches. The next start resumes the open ones."""
        self._is_stopping = True
        for job in self._jobs.values():
            job.is_wanted = False
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Release the directory. A second call changes nothing."""
        await self.stop()
        self._large_bodies.close()
        self.files.disk.shutdown()
        self._directory.close()

    def by_status(self) -> Counter[str]:
        """Return the number of kept batches in each state."""
        return Counter(batch.status for batch in self._batches.values())

    def all_of(self, owner: str | None) -> list[Batch]:
        """Return an owner's batches with their current counts."""
        return [self._counted(batch) for batch in self._batches.values() if batch.owner == owner]

    def get(self, owner: str | None, batch_id: str) -> Batch:
        """Return a batch. Raises `HttpError` (404), also for a batch of another key."""
        found = self._batches.get(batch_id)
        if found is None or found.owner != owner:
            message = f"The batch '{batch_id[:64]}' does not exist, or was deleted."
            raise HttpError(404, message, param="batch_id", code="batch_not_found")
        return self._counted(found)

    async def create(self, batch: Batch) -> None:
        """Keep a new batch and start it. Raises `HttpError`, or `OSError` if it cannot be kept."""
        if not self._num_open.fits(batch.owner, 1):
            own = self._num_open.held(batch.owner)
            message = (
                f"{self._num_open.total} batches are open, {own} of them yours; at most {MAX_OPEN} may be "
                f"open.{self._num_open.rule} Retry when one has ended."
            )
            raise HttpError(429, message, code="too_many_batches", headers=retry_after(60))
        self._num_open.add(batch.owner, 1)
        try:
            await self._save(batch)
        except OSError:
            self._num_open.add(batch.owner, -1)
            raise
        if len(self._batches) >= MAX_BATCHES:
            self._forget_oldest()
        self._batches[batch.id] = batch
        if not self._is_stopping:  # else the next start begins it
            self._begin(batch)

    async def cancel(self, batch: Batch) -> None:
        """Cancel a batch. Raises `HttpError` (409) if it has ended, and `OSError`."""
        if not batch.is_open:
            message = f"The batch '{batch.id}' is already {batch.status}."
            raise HttpError(409, message, param="batch_id", code="batch_ended")
        job = self._jobs.get(batch.id)
        if job is None or batch.status == "finalizing":
            return  # all responses are complete, and the batch ends in a moment
        batch.enter("cancelling")
        await self._save(batch)
        job.stop.set()

    def _begin(self, batch: Batch) -> None:
        job = self._jobs[batch.id] = _Job(batch, ThreadPoolExecutor(1, "batch"))
        if batch.status == "cancelling":
            job.stop.set()
        task = asyncio.create_task(self._live(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self, job: _Job) -> None:
        """Take a batch from its current state to its end, or until the server stops."""
        batch = job.batch
        try:
            try:
                if batch.status != "finalizing":
                    outcome = await self._outcome(job)
                    await self._finish_results(job, outcome)
                await self._publish(job)
            except WrongBatchError as error:
                batch.errors = [
                    {"code": error.code, "line": error.line, "message": f"{error.cause} {error.fix}", "param": None}
                ]
                await self._end(batch, "failed")
            except EngineDeadError:  # the next start resumes it
                _log.warning(event("batch_interrupted", batch=batch.id))
            except OSError as error:
                code = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "disk_error"
                await self._fail(job, code, f"The responses cannot be written: {error.strerror}.")
            except ENDS_TASK:
                raise
            except BaseException as error:  # any error ends this batch only
                _log.error(event("batch_failed", batch=batch.id), exc_info=error)
                await self._fail(job, "internal_error", "Internal error. See the server's log for details.")
        finally:
            await asyncio.shield(self._release(job))

    async def _outcome(self, job: _Job) -> str:
        """Process requests until the batch is complete, cancelled or expired. Return the new state."""
        work = asyncio.create_task(self._run_all(job))
        stopped = asyncio.create_task(job.stop.wait())
        left = max(0.0, job.batch.expires_at - time.time())
        try:
            await asyncio.wait({work, stopped}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            work.cancel()
            await asyncio.wait({work})
        if not work.cancelled():
            work.result()  # raises the error of the work
            return "completed"
        return "cancelled" if job.stop.is_set() else "expired"

    async def _run_all(self, job: _Job) -> None:
        owner = job.batch.owner
        async with self._active[owner]:
            requests, results = await self._checked(job, self._opened, job)
            if job.batch.status == "validating":
                job.batch.enter("in_progress")
                await self._save(job.batch)
            respond = partial(self._respond, job.batch)
            run = BatchRun(respond, requests, results, job.disk, self._limiter.for_key(owner))
            run.on_result = self._count
            await run.run()

    async def _checked(self, job: _Job, function: Callable[..., _ResultT], *arguments: Any) -> _ResultT:
        """Run a function that reads whole files, one batch at a time; the keys take turns.

        If this is cancelled, it still waits for the end of the function.
        """
        async with self._checks.permit(job.batch.owner):
            work = asyncio.ensure_future(job.on_disk(function, *arguments))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait({work})
                raise

    def _count(self, status: int) -> None:
        self.ended_requests["answered" if status == 200 else "failed"] += 1

    async def _respond(self, batch: Batch, request: BatchRequest, request_id: str) -> str:
        key = self.names.key_of(batch.owner)
        owner, label = (batch.owner, batch.label) if key is None else (key.salt, key.label)
        return await self._endpoints.respond(request, request_id, owner=owner, label=label, priority=MAX_PRIORITY)

    def _opened(self, job: _Job) -> tuple[RequestFile, OutputFile]:
        """Open the batch's files, on the disk's thread. Raises `WrongBatchError`."""
        if job.requests is None:
            path = self._directory.content(job.batch.input_file_id)
            job.requests = RequestFile(
                path,
                job.batch.input_file_id,
                url=job.batch.endpoint,
                max_requests=MAX_REQUESTS,
                max_line=self._max_line,
                read=self._large_bodies.read_line,
                is_wanted=lambda: job.is_wanted,
            )
        if job.results is None:
            output, errors = (self._directory.work(job.batch.id, kind) for kind in (_OUTPUT, _ERRORS))
            reserve = partial(self._directory.reserve, job.batch.owner)
            job.results = OutputFile(output, job.requests, errors, reserve, is_private=True)
        return job.requests, job.results

    async def _finish_results(self, job: _Job, outcome: str) -> None:
        """Write a line for each request without a response. Afterwards the batch only needs to be published."""
        batch = job.batch
        batch.counts, batch.usage, num_incomplete = await self._checked(job, self._completed, job, outcome)
        self.ended_requests["failed"] += num_incomplete
        batch.outcome = outcome
        batch.written = {kind: new_id("file-") for kind in (_OUTPUT, _ERRORS)}
        batch.enter("finalizing")
        await self._save(batch)

    def _completed(self, job: _Job, outcome: str) -> tuple[tuple[int, int, int], dict[str, Any], int]:
        """Complete the files, on the disk's thread. Return the counts, the usage and the number of unanswered ones."""
        requests, results = self._opened(job)
        num_done = results.num_done
        if outcome in UNANSWERED:
            results.write_incomplete(*UNANSWERED[outcome])
        counts, num_incomplete = _counts(requests, results), results.num_done - num_done
        job.close()
        return counts, usage_of(self._directory.work(job.batch.id, _OUTPUT)), num_incomplete

    async def _publish(self, job: _Job) -> None:
        """Make the responses files of `/v1/files`, and end the batch. After a kill in the middle, it does the rest."""
        batch = job.batch
        assert batch.outcome is not None
        published = {kind: await self._published(job, kind) for kind in batch.written}
        batch.output_file_id, batch.error_file_id = published.get(_OUTPUT), published.get(_ERRORS)
        await self._end(batch, batch.outcome)

    async def _published(self, job: _Job, kind: str) -> str | None:
        """Return the id of the published file, or None if it is empty."""
        batch, file_id = job.batch, job.batch.written[kind]
        path = self._directory.work(batch.id, kind)
        size = await job.on_disk(_size, path)
        if size is None:
            return file_id if self.files.has(file_id) else None
        if not size:
            await job.on_disk(path.unlink)
            return None
        now = int(time.time())
        expires_at = None if batch.output_expires_s is None else now + batch.output_expires_s
        name = f"{batch.id}_{kind}.jsonl"
        await self.files.adopt(path, StoredFile(file_id, batch.owner, size, now, name, "batch_output", expires_at))
        return file_id

    async def _fail(self, job: _Job, code: str, message: str) -> None:
        """End a batch that cannot go on, with the responses that it has."""
        batch = job.batch
        batch.errors = [{"code": code, "line": None, "message": message, "param": None}]
        try:
            if batch.status != "finalizing":
                await self._finish_results(job, "failed")
            batch.outcome = "failed"
            await self._publish(job)
        except ENDS_TASK:
            raise
        except BaseException as error:  # even this failed; the next start tries again
            _log.error(event("batch_save_failed", batch=batch.id), exc_info=error)
            batch.enter("failed")

    async def _end(self, batch: Batch, status: str) -> None:
        batch.enter(status)
        await self._save(batch)
        total, completed, failed = batch.counts
        _log.info(
            event("batch_ended", batch=batch.id, status=status, requests=total, answered=completed, failed=failed)
        )

    async def _release(self, job: _Job) -> None:
        await job.on_disk(job.close)
        job.disk.shutdown(wait=False)
        del self._jobs[job.batch.id]
        self._num_open.add(job.batch.owner, -1)
        if not self._num_open.held(job.batch.owner):
            self._active.pop(job.batch.owner, None)

    async def _save(self, batch: Batch) -> None:
        save = partial(self._directory.save, "batches", batch.id, batch.kept())
        await asyncio.get_running_loop().run_in_executor(self.files.disk, save)

    def _forget_oldest(self) -> None:
        """Forget an ended batch of the key that has the most ended batches."""
        ended = [batch for batch in self._batches.values() if not batch.is_open]
        ((owner, _),) = Counter(batch.owner for batch in ended).most_common(1)
        batch_id = min(batch.id for batch in ended if batch.owner == owner)
        del self._batches[batch_id]
        self.files.disk.submit(self._directory.forget, batch_id).add_done_callback(log_failure)

    def _reads(self, file_id: str) -> bool:
        return any(job.batch.input_file_id == file_id and job.batch.is_open for job in self._jobs.values())

    def _counted(self, batch: Batch) -> Batch:
        job = self._jobs.get(batch.id)
        if job is not None and job.requests is not None and job.results is not None:
            batch.counts = _counts(job.requests, job.results)
        return batch


def _counts(requests: RequestFile, results: OutputFile) -> tuple[int, int, int]:
    return len(requests), results.num_done - results.num_failed, results.num_failed


def _size(path: Path) -> int | None:
    """Return the file size in bytes, or None if the file does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


class DirectoryAdoption:
    """Takeover of the directory of batches, after other servers have released it."""

    def __init__(self, directory: BatchDirectory, open_runner: Callable[[], BatchRunner]) -> None:
        """Take the directory now if no other server holds it. Raises `StartupError`.

        `open_runner`: called after this server has locked the directory.
        """
        self._directory = directory
        self._open_runner = open_runner
        self._runner = open_runner() if directory.take() else None
        self._waiting: asyncio.Task[None] | None = None
        self._failure: str | None = None

    @property
    def runner(self) -> BatchRunner:
        """The runner. Raises `HttpError` (503) while another server has the directory."""
        if self._runner is not None:
            return self._runner
        message = "Another server uses the directory of --batch-dir; this one waits until that server ends. Retry then."
        raise HttpError(503, self._failure or message, code="batch_dir_in_use", headers=retry_after(_RETRY_S))

    @property
    def ended_requests(self) -> Mapping[str, int]:
        """Numbers of answered and failed requests since the start."""
        return {"answered": 0, "failed": 0} if self._runner is None else self._runner.ended_requests

    def by_status(self) -> Mapping[str, int]:
        """Return the number of batches in each state."""
        return {} if self._runner is None else self._runner.by_status()

    def start(self) -> None:
        """Start the batches, or wait for the directory. The engine must be ready."""
        if self._runner is not None:
            self._runner.start()
        else:
            _log.warning(event("batch_dir_waiting", path=str(self._directory.path), cause="another server uses it"))
            self._waiting = asyncio.create_task(self._wait())

    async def stop(self) -> None:
        """Stop waiting, and stop all batches."""
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.wait({self._waiting})
        if self._runner is not None:
            await self._runner.stop()

    async def close(self) -> None:
        """Release the directory. A second call changes nothing."""
        await self.stop()
        if self._runner is not None:
            await self._runner.close()
        self._directory.close()

    async def _wait(self) -> None:
        begun = time.monotonic()
        while not self._directory.take():
            await asyncio.sleep(_POLL_S)
        try:
            # Thousands of descriptions may be read.
            runner = await asyncio.get_running_loop().run_in_executor(None, self._open_runner)
        except StartupError as error:
            _log.error(event("batch_dir_failed", cause=error.cause))
            self._failure = f"{error.cause} {error.fix}"
            self._directory.close()
            return
        self._runner = runner
        runner.start()
        _log.info(event("batch_dir_acquired", path=str(self._directory.path), waited_s=time.monotonic() - begun))
