"""The web page before a real server: an alternative continues from the cached prefix, and the state shows the ranks."""

import pytest

from tests.contract import browsers

pytestmark = pytest.mark.slow


def test_going_on_from_a_word_computes_little_again(tp1):
    with browsers.running() as browser:
        window = browsers.Window(browser)
        page = window.open(tp1.url)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Message").fill("What does os.path.join do?")
        page.get_by_label("Message").press("Enter")
        answer = page.get_by_role("listitem", name="Answer")
        answer.locator(".numbers", has_text="cached").wait_for()
        written = answer.locator(".prose").last.inner_text()
        assert "Join two or more pathname components" in written
        answer.locator(".word", has_text="more").hover()
        page.locator(".menu button:not([disabled])").first.click()
        page.get_by_text("2 / 2").wait_for()
        answer.locator(".numbers", has_text="cached").wait_for()
        other = answer.locator(".prose").last.inner_text()
        assert other.startswith("Join two or")
        assert other != written
        cached, prompt = answer.locator(".numbers span", has_text="cached").inner_text().split(" of ")
        assert int(cached) > int(prompt.split()[0]) - 2 * 8  # all but the last blocks, of 8 tokens each
        page.get_by_role("tab", name="State").click()
        page.get_by_role("img", name="KV blocks").wait_for()
        page.get_by_role("row", name="0 ", exact=False).first.wait_for()  # of rank 0
        assert window.faults == []
