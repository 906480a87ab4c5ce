"""Live state on the web page in a real browser: blocks, replicas, batches, the last minute, one request explained."""

import dataclasses

import pytest

from oarlock.engine.scheduler.timeline import RequestTimeline
from tests.contract.batch_server import request_line, serving
from tests.contract.browsers import ask
from tests.contract.conftest import FakeEngine

pytestmark = pytest.mark.soak

TEXT = "Join two or more."
STATE = {
    "running": 2,
    "waiting": 1,
    "tokens_per_second": {"prompt": 12.0, "generation": 345.6},
    "kv": {
        "block_size": 16,
        "total": 2052,
        "held": 12,
        "cached": 40,
        "free": 2000,
        "cells_of": 1,
        "map": "h12c40f2000",
    },
    "step": {
        "count": 1234,
        "last_ms": 5.25,
        "median_ms": 4.0,
        "p99_ms": 20.0,
        "ranks": [{"rank": rank, "last_ms": 5.0 + rank, "median_ms": 3.5} for rank in range(2)],
    },
    "adapters": None,
    "slowest": [],
}


def test_the_live_state_is_drawn_and_told(serve, window, expect):
    server = serve(TEXT, live_state=STATE)
    page = window(server.url, "/#/state")
    panel = page.get_by_role("tabpanel", name="State")
    expect(panel.get_by_role("img", name="2,052 KV blocks: 12 held, 40 cached, 2000 free")).to_be_visible()
    for text in ("346", "1,234 steps", "median 4.0 ms", "6.0 ms", "None: the server is idle."):
        expect(panel.get_by_text(text).first).to_be_visible()
    shades = panel.locator("canvas.map").evaluate("""map => {
        const data = map.getContext('2d').getImageData(0, 0, map.width, map.height).data;
        const found = {};
        for (let at = 0; at < data.length; at += 4) {
            const shade = data.slice(at, at + 3).join();
            if (data[at + 3] === 255) found[shade] = (found[shade] ?? 0) + 1;
        }
        return Object.values(found).sort((a, b) => a - b);
    }""")
    each = shades[0] / 12  # pixels of one square
    assert shades == [12 * each, 40 * each, 2000 * each]
    server.stop()
    expect(page.locator("#state.stale")).to_be_visible()


def test_the_last_minute_and_one_request(serve, window, expect):
    open_request = {"request_id": 1, "state": "running", "adapter": None, "age_s": 2.0}
    open_request |= {"prompt_tokens": 40, "cached_tokens": 16, "output_tokens": 0}
    server = serve(TEXT, live_state=STATE | {"slowest": [open_request]}, pause_after=0)
    timeline = RequestTimeline(1, 40, 0.0)
    timeline.admitted(0.5, 16)
    server.stage.engine.known[1] = timeline.history(0)
    page = window(server.url)
    ask(page, "Hi")
    page.get_by_role("tab", name="State").click()
    panel = page.get_by_role("tabpanel", name="State")
    panel.get_by_role("button", name="chatcmpl-").click()
    dialog = page.get_by_role("dialog", name="Request chatcmpl-")
    for text in ("running", "prompt tokens cached", "received", "sent to the engine", "began to run"):
        expect(dialog.get_by_text(text).first).to_be_visible()
    server.stage.engine.resume.set()
    expect(dialog.get_by_text("answered")).to_be_visible()  # it is shown anew until it has ended
    dialog.get_by_role("button", name="Close").click()
    slider = panel.get_by_role("slider", name="The last minute")
    server.stage.engine.live_state = STATE | {"step": STATE["step"] | {"count": 4321}}
    expect(panel.get_by_text("4,321 steps")).to_be_visible()
    slider.fill("0")
    expect(panel.get_by_text("1,234 steps")).to_be_visible()
    expect(panel.get_by_text(" s ago")).to_be_visible()
    panel.get_by_role("button", name="Back to now").click()
    expect(panel.get_by_text("4,321 steps")).to_be_visible()


class Two(FakeEngine):
    """Two replicas, of which the second is down."""

    @property
    def replicas(self):
        return [self, dataclasses.replace(self, number=1, live_state=None)]


def test_replicas_and_batches(make_stage, window, expect, tmp_path):
    with serving(make_stage, tmp_path) as serve_batches:
        server = serve_batches(live_state=STATE)
        batch = server.ended(server.batch([request_line("a", prompt="x", max_tokens=2)]))
        server.stage.engine.__class__ = Two
        page = window(server.url, "/#/state")
        expect(page.get_by_role("row", name=batch.id)).to_contain_text("completed")
        rows = page.get_by_role("table", name="Replicas").get_by_role("row")
        expect(rows).to_have_count(3)
        expect(rows.nth(1)).to_contain_text("ready")
        expect(rows.nth(2)).to_contain_text("down")
