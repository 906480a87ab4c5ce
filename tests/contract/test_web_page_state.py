"""Live state on the web page in a real browser: blocks, replicas, batches, the last minute, one request explained."""

import asyncio
import dataclasses

import pytest

from oarlock.engine.scheduler.timeline import RequestTimeline
from oarlock.server.llm.adapters import ServedAdapter
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


ADAPTERS = {
    "slots": 2, "in_slots": 1, "host_limit": 4, "in_host_memory": 1, "names": 70, "waiting": 3,
    "shown": [
        {"name": "sql", "state": "ready", "slot": 2, "running": 1, "waiting": 0},
        {"name": "<b>legal</b>", "state": "loading", "slot": 0, "running": 0, "waiting": 3},
    ],
}  # fmt: skip


def test_adapters_are_shown_once_there_are_some_and_can_be_chosen(serve, window, expect):
    server = serve(TEXT, live_state=STATE)
    engine = server.stage.engine
    engine.info = dataclasses.replace(engine.info, max_loras=2, max_lora_rank=16, adapter_slot_bytes=3 << 20)
    adapters = Adapters()
    server.stage.state.async_llm.adapters = adapters
    page = window(server.url, "/#/state")
    panel = page.get_by_role("tabpanel", name="State")
    expect(panel.get_by_text("1,234 steps")).to_be_visible()
    card = panel.get_by_role("table", name="LoRA adapters")
    expect(card).to_be_hidden()
    engine.live_state = STATE | {"adapters": ADAPTERS}
    rows = card.get_by_role("row")
    expect(rows).to_have_count(4)
    for row, text in enumerate(("sqlslot 210", "<b>legal</b>being loaded03", "and 68 other names"), 1):
        expect(rows.nth(row)).to_have_text(text)
    summary = "1 of 2 slots in use · 1 of 4 in host memory · 70 names · 3 requests wait for their adapter"
    expect(panel.get_by_text(summary)).to_be_visible()
    page.get_by_role("tab", name="Model").click()
    model = page.get_by_role("tabpanel", name="Model")
    for text in ("3.0 MiB per rank", "also called alias/with/slash", "/adapters/sql"):
        expect(model.get_by_text(text, exact=True)).to_be_visible()
    page.get_by_role("tab", name="Chat").click()
    choice = page.get_by_role("complementary", name="Settings").get_by_label("Model")
    adapters.names.append("tone")
    page.get_by_role("button", name="Settings").click()
    choice.select_option("tone")
    page.get_by_role("button", name="Close").click()
    ask(page, "Hi")
    expect(page.get_by_role("listitem", name="Answer").get_by_text("tone", exact=True)).to_be_visible()
    expect(page.get_by_text(TEXT)).to_be_visible()
    adapters.pause_s = 0.3
    page.reload()  # the choice stays, although the names come late
    ask(page, "Ho")
    expect(page.get_by_text(TEXT)).to_have_count(2)
    assert [request.adapter for request in engine.requests] == ["tone", "tone"]


class Adapters:
    """The adapters of a server, all of which are loaded."""

    def __init__(self):
        self.names = ["sql"]
        self.pause_s = 0.0

    async def find(self, name):
        return self.loaded(name)

    def loaded(self, name):
        return ServedAdapter(name, f"/adapters/{name}", "demo", "/", 1, "00") if name in self.names else None

    async def available(self):
        await asyncio.sleep(self.pause_s)
        return [self.loaded(name) for name in self.names]

    async def use(self, name):
        return name


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
