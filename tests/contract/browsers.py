"""Real browsers for tests: Debian's Chromium and Firefox, driven by Playwright, in contexts that share nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
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
# The first with all commands that Playwright sends when it makes a context; `browser.setDownloadBehavior` came last
# (Mozilla's release notes for developers). Debian has had both older and newer ones.
OLDEST_FIREFOX = 149


@contextlib.contextmanager
def running(name: str = "chromium") -> Iterator[Any]:
    """A browser, "chromium" or "firefox". Skips the test where it is missing or too old."""
    programs = {"chromium": ("chromium", "chromium-browser", "google-chrome"), "firefox": ("firefox-esr", "firefox")}
    executable = next((found for program in programs[name] if (found := shutil.which(program))), None)
    if executable is None:
        pytest.skip(f"needs {name.title()} (Debian's package {programs[name][0]})")
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright (requirements-dev.txt)")
    if name == "firefox" and (version := firefox_version(executable)) < OLDEST_FIREFOX:
        pytest.skip(f"needs Firefox {OLDEST_FIREFOX} or later for Playwright's protocol, this is {version}")
    # The channel is Firefox as it is published, by WebDriver BiDi; without it Playwright drives its own build alone.
    # It must load pages again that it goes back to: it does not report the others.
    fresh = {"channel": "moz-firefox", "firefox_user_prefs": {"browser.sessionhistory.max_total_viewers": 0}}
    options = {"chromium": {"args": list(FLAGS)}, "firefox": fresh}[name]
    with tempfile.TemporaryDirectory() as folder, api.sync_playwright() as playwright:
        api.expect.set_options(timeout=LIMIT_MS)
        browser = getattr(playwright, name).launch(executable_path=executable, downloads_path=folder, **options)
        browser.folder = Path(folder)
        yield browser
        browser.close()


def firefox_version(executable: str) -> int:
    """The first number of this Firefox's version."""
    told = subprocess.run([executable, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    found = re.search(r"Firefox (\d+)\.", told)
    assert found, f"{executable} --version said {told!r}"
    return int(found[1])


class Window:
    """One page in a context of its own, and everything that went wrong in it."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.name, self.folder = browser.browser_type.name, browser.folder
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
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    with running(request.param) as found:
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
        if options.get("color_scheme") == "dark" and browser.browser_type.name == "firefox":
            pytest.skip("needs a Firefox whose protocol sets the colour scheme (emulation.setMediaFeaturesOverride)")
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


def saved(page: Any, act: Callable[[], Any]) -> Path:
    """The file that `act()` gives to the person, under the name that they see."""
    folder = page.window.folder
    if page.window.name == "chromium":
        with page.expect_download() as found:
            act()
        found.value.save_as(folder / found.value.suggested_filename)
        return folder / found.value.suggested_filename
    before, deadline = set(folder.iterdir()), time.monotonic() + LIMIT_MS / 1000
    act()  # Firefox saves it by itself, and Playwright does not say so
    while not (new := set(folder.iterdir()) - before) or any(path.suffix == ".part" for path in new):
        assert time.monotonic() < deadline, "nothing was saved"
        page.wait_for_timeout(20)
    (path,) = new
    return path


def read(page: Any, path: Path) -> None:
    """Import a file of conversations."""
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Import").click()
    chooser.value.set_files(path)


def ask(page: Any, text: str) -> None:
    """Send a message."""
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def answers(page: Any) -> Any:
    """All answers."""
    return page.get_by_role("listitem", name="Answer")
