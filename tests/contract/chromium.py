"""A real browser for tests: Debian's Chromium, driven by Playwright, in contexts that share nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LIMIT_MS = 60_000  # only keeps a broken test from hanging


@contextlib.contextmanager
def running() -> Iterator[Any]:
    """A browser. Skips the test where there is none."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("needs Chromium (Debian's package chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright (requirements-dev.txt)")
    with api.sync_playwright() as playwright:
        api.expect.set_options(timeout=LIMIT_MS)
        browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        yield browser
        browser.close()


class Window:
    """One page in a context of its own, and everything that went wrong in it."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(LIMIT_MS)
        self.page = self.context.new_page()
        self.faults: list[str] = []  # errors of scripts, and what the content security policy refused
        self.addresses: list[str] = []  # of everything that was asked for
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", self._heard)
        self.page.on("request", lambda request: self.addresses.append(request.url))

    def _heard(self, message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.faults.append(message.text)

    def open(self, url: str) -> Any:
        """Open the page at this address."""
        self.page.goto(url)
        return self.page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running() as found:
        yield found


@pytest.fixture
def serve(make_server: Callable[..., Any]) -> Callable[..., Any]:
    """`make_server` of a model with a longer context."""
    from tests.contract.conftest import INFO

    info = dataclasses.replace(INFO, max_model_len=4096, max_num_batched_tokens=4096, num_blocks=600)
    return lambda *args, **options: make_server(*args, info=info, **options)


@pytest.fixture
def window(browser: Any) -> Iterator[Callable[..., Any]]:
    """`window(url)`: the page there, in a context of its own. At the end nothing has gone wrong in any of them."""
    opened = []

    def make(url: str, path: str = "/", **options: Any) -> Any:
        opened.append(Window(browser, **options))
        page = opened[-1].open(url + path)
        page.window = opened[-1]
        return page

    yield make
    for each in opened:
        each.context.close()
    assert [fault for each in opened for fault in each.faults] == []


@pytest.fixture
def expect() -> Any:
    return pytest.importorskip("playwright.sync_api").expect


def ask(page: Any, text: str) -> None:
    """Send a message."""
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def answers(page: Any) -> Any:
    """All answers."""
    return page.get_by_role("listitem", name="Answer")
