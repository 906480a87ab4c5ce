"""Finds traces that hostile requests may have left: blocks, requests, descriptors, threads, series, a changed answer.

Compares metrics and the process table before the run with those after it, once the server is idle again.
"""

from __future__ import annotations

from tests.e2e.running import RunningServer, eventually

QUIET_WITHIN_S = 60.0
# Processes, descriptors, threads: pools may have grown to their sizes, that of the renderers of chat templates to four
# processes of nine descriptors each. What each of thousands of requests leaves is far more.
SPARE = (4, 6 + 4 * 9, 6 + 4)
MOST_NEW_SERIES = 600  # known methods times routes times statuses, seen for the first time


class Traces:
    """The state of one server before and after a run."""

    def __init__(self, server: RunningServer, path: str, body: dict) -> None:
        """`path`, `body`: a request whose answer must stay the same."""
        self._server, self._path, self._body = server, path, body
        # Use everything that starts when it is first needed, so that it counts as present before the run.
        if "prompt" in body:
            server.text("x", max_tokens=4, structured_outputs={"regex": "[ab]{3}"})
        server.client.post("/detokenize", json={"tokens": [1] * 100_000})  # large: it is read by another process
        self._text = self._canary()
        self._series = self._number_of_series()
        self._handles = self._count_handles()
        self._blocks = server.metrics()["oarlock:kv_blocks_total"]

    def answers(self) -> float:
        """HTTP answers so far."""
        return self._server.metrics()["oarlock:http_responses_total"]

    def left(self, sent: int) -> list[str]:
        """One sentence about everything that is not as before."""
        found = []
        try:
            eventually(self._is_quiet, QUIET_WITHIN_S, "no request runs, none waits, no block is held")
        except AssertionError as error:
            found.append(f"{error}: {self._state()}")
        text = self._canary()
        if text != self._text:
            found.append(f"the same request now gives {text!r}, before {self._text!r}")
        if self._server.client.get("/health").status_code != 200:
            found.append("/health is no longer 200")
        try:
            eventually(self._handles_are_back, QUIET_WITHIN_S, "descriptors and threads are back where they were")
        except AssertionError as error:
            found.append(f"{error}: {self._count_handles()}, before {self._handles}")
        grown = self._number_of_series() - self._series
        if grown > MOST_NEW_SERIES:
            found.append(f"{sent} requests made {grown} new series of metrics")
        return found

    def _canary(self) -> str:
        answer = self._server.client.post(self._path, json=self._body).json()
        return str(answer.get("choices") or answer["data"])

    def _state(self) -> dict[str, float]:
        metrics = self._server.metrics()
        wanted = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        wanted += tuple(f"oarlock:kv_blocks_{kind}" for kind in ("held", "free", "cached", "total"))
        return {name: metrics[name] for name in wanted}

    def _is_quiet(self) -> bool:
        running, waiting, held, free, cached, total = self._state().values()
        return running == waiting == held == 0 and free + cached == total == self._blocks

    def _count_handles(self) -> tuple[int, int, int]:
        """Processes, descriptors, threads: sums, because a helper that was killed comes back as another."""
        processes = self._server.processes()
        return (
            len(processes),
            sum(process.num_fds() for process in processes),
            sum(process.num_threads() for process in processes),
        )

    def _handles_are_back(self) -> bool:
        now = self._count_handles()
        return all(n <= before + spare for n, before, spare in zip(now, self._handles, SPARE, strict=True))

    def _number_of_series(self) -> int:
        lines = self._server.client.get("/metrics").text.splitlines()
        return sum(not line.startswith("#") for line in lines)
