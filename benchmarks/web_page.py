"""Scrolls and streams a conversation of 100,000 tokens on the web page in Chromium, and shows how long its frames take.

    python -m benchmarks.web_page [--tokens 100000] [--seconds 8]

The page is the server's own; the answers come from a stub that sends a token every five milliseconds, with five
alternatives each, so that the browser alone is measured. Frames are the times between calls of `requestAnimationFrame`,
in milliseconds. The work is processor time, which does not depend on what else the machine does: the longest task of
the page's thread (script, style, layout, painting into lists), all of its tasks by frames, and those of the threads
that rasterise and compose, which a machine with a GPU leaves to it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from oarlock.server.http import pages
from tests.contract import browsers

TURN = "A paragraph of an answer, with *emphasis* and `code`, as models write them. " * 15 + "\n\n- one\n- two\n\n"
TURN_TOKENS = 300
TOKEN_S = 0.005
CAPABILITIES = {
    "models": ["stub"],
    "version": "",
    "endpoints": {"/v1/chat/completions": {"parameters": {}}},
    "features": {"chat": True, "prefix_caching": True, "unknown_parameters": "ignored"},
    "limits": {"max_model_len": 200_000},
    "generation_config": {"sampling": {}, "source": None},
}
FRAMES = """(seconds) => new Promise((resolve) => {
    const times = [];
    let last = performance.now();
    const end = last + 1000 * seconds;
    const next = (now) => {
        times.push(now - last);
        last = now;
        if (now < end) requestAnimationFrame(next); else resolve(times.slice(1));
    };
    requestAnimationFrame(next);
})"""
SCROLL = """() => {
    const box = document.getElementById('scroll');
    box.scrollTop = 0;
    const step = () => {
        box.scrollTop += 120;
        if (box.scrollTop + box.clientHeight < box.scrollHeight) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
}"""


class Stub(BaseHTTPRequestHandler):
    """The page's files, and an endless answer."""

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Send a file of the page, or what it asks of the API at its start."""
        path = self.path.split("?")[0]
        answers = {
            "/health": {"status": "ok", "state": "ready"},
            "/v1/capabilities": CAPABILITIES,
            "/v1/models": {"data": [{"id": "stub"}]},
        }
        document = pages.document_at(path)
        if document is None and path not in answers:
            self.send_error(404)
            return
        body = json.dumps(answers[path]).encode() if document is None else document.body
        self.send_response(200)
        for name, value in ({} if document is None else document.headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """Stream tokens until the client leaves."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        words = TURN.replace(" ", "\x00 ").split("\x00")
        try:
            for number in range(1_000_000):
                text = words[number % len(words)]
                top = [{"token": text, "logprob": -0.1 - other, "bytes": None} for other in range(5)]
                entry = {"token": text, "logprob": -0.1, "bytes": None, "top_logprobs": top}
                choice = {
                    "index": 0,
                    "delta": {"content": text},
                    "logprobs": {"content": [entry]},
                    "finish_reason": None,
                }
                self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
                self.wfile.flush()
                time.sleep(TOKEN_S)
        except (BrokenPipeError, ConnectionResetError):
            return


HEADS = ("frames", "median", "p99", "longest", "over 50 ms", "longest work", "work/frame", "drawing/frame")


def measured(browser: Any, page: Any, name: str, seconds: float) -> None:
    """Print a line of the table: the frames of so many seconds, and the work of the threads in them."""
    browser.start_tracing(
        page=page, categories=["toplevel", "devtools.timeline", "disabled-by-default-devtools.timeline", "base"]
    )
    times = sorted(page.evaluate(FRAMES, seconds))
    events = json.loads(browser.stop_tracing())["traceEvents"]
    threads = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one.get("name") == "thread_name"}
    work: dict[bool, list[float]] = {True: [], False: []}  # of the page's thread; of those that rasterise and compose
    for one in events:
        if one["name"] in ("RunTask", "ThreadPool_RunTask") and "tdur" in one:
            thread = threads[one["pid"], one["tid"]]
            if thread == "CrRendererMain" or thread.startswith(("Compositor", "VizCompositor", "ThreadPoolForeground")):
                work[thread == "CrRendererMain"].append(one["tdur"] / 1000)
    late, p99 = sum(time > 50 for time in times), times[int(0.99 * (len(times) - 1))]
    figures = [statistics.median(times), p99, times[-1], late, max(work[True])]
    figures += [sum(work[own]) / len(times) for own in (True, False)]
    cells = [f"{round(figure, 1):>{len(head) + 2}}" for head, figure in zip(HEADS[1:], figures, strict=True)]
    print(f"{name:<10} {len(times):>7}", *cells)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=100_000, help="of the conversation")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    arguments = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    roles = [("user", "assistant")[number % 2] for number in range(arguments.tokens // TURN_TOKENS)]
    with tempfile.TemporaryDirectory() as folder, browsers.running() as browser:
        path = Path(folder, "long.json")
        path.write_text(json.dumps([{"role": role, "content": TURN} for role in roles]))
        page = browsers.Window(browser, viewport={"width": 1200, "height": 800}).open(
            f"http://127.0.0.1:{server.server_address[1]}/"
        )
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Import").click()
        chooser.value.set_files(path)
        page.locator("#messages > li").nth(len(roles) - 1).wait_for()
        print(f"{'':<10} {HEADS[0]:>7}", *(f"{head:>{len(head) + 2}}" for head in HEADS[1:]))
        measured(browser, page, "idle", arguments.seconds)
        page.evaluate(SCROLL)
        measured(browser, page, "scrolling", arguments.seconds)
        page.get_by_label("Message").fill("Go on")
        page.get_by_label("Message").press("Enter")
        page.locator(".word").nth(50).wait_for()
        measured(browser, page, "streaming", arguments.seconds)
        print("elements:", page.evaluate("document.querySelectorAll('*').length"))
    server.shutdown()


if __name__ == "__main__":
    main()
