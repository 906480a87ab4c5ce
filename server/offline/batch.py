"""A batch on an engine of its own: its progress on the terminal, and what its ends mean."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from oarlock.engine.errors import EngineDeadError, StartupError
from oarlock.server.endpoints.batches.answer_file import AnswerFile
from oarlock.server.endpoints.batches.batch_run import BatchRun
from oarlock.server.endpoints.batches.fair_turns import FairTurns, KeyTurns
from oarlock.server.endpoints.batches.request_file import RequestFile
from oarlock.server.hub.transfer_rate import in_words
from oarlock.server.offline.offline_engine import OfflineEngine

_REPORT_S = 1.0
_EXIT_WORKER_DIED = 5
Report = Callable[[str, float, str], None]  # phase, fraction, detail


async def answer_all(engine: OfflineEngine, requests: RequestFile, answers: AnswerFile, report: Report) -> None:
    """Answer all requests. Raises `StartupError` when the engine dies or the disk is full: earlier answers are kept."""
    progress = asyncio.create_task(_report(engine, requests, answers, report))
    try:
        with ThreadPoolExecutor(1, "batch") as disk:
            turns = KeyTurns(FairTurns(engine.num_at_once), None)
            run = BatchRun(engine.endpoints.answer, requests, answers, disk, turns)
            await run.run()
    except EngineDeadError as error:
        raise StartupError(
            f"The engine has stopped: {error}. {answers.num_done} of {len(requests)} requests are answered.",
            "The lines above say why, if any. The same command goes on where this stopped.",
            _EXIT_WORKER_DIED,
        ) from None
    except OSError as error:
        raise StartupError(
            f"The answers cannot be written: {error.strerror}. {answers.num_done} of {len(requests)} requests are "
            "answered.",
            "Make room; the same command goes on where this stopped.",
        ) from None
    finally:
        progress.cancel()


async def _report(engine: OfflineEngine, requests: RequestFile, answers: AnswerFile, report: Report) -> None:
    begun, done_before = time.monotonic(), answers.num_done
    while True:
        await asyncio.sleep(_REPORT_S)
        done, total = answers.num_done, len(requests)
        took = time.monotonic() - begun
        words = f"{done} of {total} requests"
        if answers.num_failed:
            words += f", {answers.num_failed} failed"
        words += f", {engine.generation_tokens / took:.0f} tokens/s"
        if done > done_before:
            words += f", {in_words((total - done) * took / (done - done_before))} left"
        report("answering", done / total, words)
