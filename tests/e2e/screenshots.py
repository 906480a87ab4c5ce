"""`make screenshots`: the pictures of the web page and the terminal in docs/, of a real server with the demo model.

The chat shows the least certain word of an answer and what else might have stood there; the state is a busy server's.
"""

from __future__ import annotations

import threading
from typing import Any

import httpx

from tests.contract import browsers
from tests.e2e import recorded_chat
from tests.e2e.running import DEMO, ROOT, RunningServer

QUESTION = "Explain collections.deque.rotate."  # whose answer has no marks that Markdown would take
NUM_CLIENTS = 12
SIZE = {"width": 1000, "height": 640}
# The index of the answer's token that was taken with the least probability, of those that begin a word.
LEAST_CERTAIN = """() => new Promise((resolve) => {
    const request = indexedDB.open('oarlock /');
    request.onsuccess = () => {
        const records = request.result.transaction('tokens').objectStore('tokens').getAll();
        records.onsuccess = () => {
            if (!records.result.length) return resolve(null); // it is not kept yet
            const { tokens, raw } = records.result.at(-1);
            const p = (token) => token.others.find((other) => other.isTaken).p;
            const words = tokens.map((token, index) => [p(token), index, raw[token.start]]);
            resolve(String(words.filter(([, , first]) => first === ' ').sort(([a], [b]) => a - b)[0][1]));
        };
    };
})"""


def main() -> None:
    """Take the screenshots."""
    with RunningServer(DEMO, "-tp", 2, "--kv-cache-memory", "64MiB") as server, browsers.running() as browser:
        take_chat(browser, server.url)
        take_state(browser, server.url)
        recorded_chat.main(server.url)


def take_chat(browser: Any, url: str) -> None:
    page = browsers.Window(browser, viewport=SIZE, color_scheme="light").open(url)
    page.get_by_label("Message").fill(QUESTION)
    page.get_by_label("Message").press("Enter")
    last = page.get_by_role("listitem", name="Answer").last
    last.get_by_text("cached").wait_for()
    while (token := page.evaluate(LEAST_CERTAIN)) is None:
        page.wait_for_timeout(100)
    last.locator(f".word[data-token='{token}']").first.hover()
    page.get_by_role("menu").wait_for()
    page.screenshot(path=ROOT / "docs" / "web-page-chat.png")


def take_state(browser: Any, url: str) -> None:
    page = browsers.Window(browser, viewport=SIZE | {"height": 760}, color_scheme="dark").open(f"{url}/#/state")
    done = threading.Event()
    clients = [threading.Thread(target=ask, args=(url, number, done)) for number in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    try:
        page.get_by_role("img", name="KV blocks").wait_for()
        page.wait_for_timeout(12_000)  # for the curves
        page.screenshot(path=ROOT / "docs" / "web-page-state.png")
    finally:
        done.set()
        for client in clients:
            client.join()


def ask(url: str, number: int, done: threading.Event) -> None:
    """Completions of different lengths, one after the other."""
    turn = 0
    while not done.is_set():
        prompt = f"# {number} {turn}\nimport os\n" * (4 + 5 * number)
        body = {"prompt": prompt, "max_tokens": 40 + 25 * number, "ignore_eos": True, "seed": turn}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status()
        turn += 1


if __name__ == "__main__":
    main()
