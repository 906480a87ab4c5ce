"""Addresses of the web page in a real browser: tabs, conversations, Back and Forward, what a person types."""

import re

import pytest

from tests.contract.browsers import answers, ask

pytestmark = pytest.mark.soak

TEXT = "Join two or more pathname components."


def answered(page, expect, text):
    ask(page, text)
    expect(answers(page).last.locator(".numbers")).to_contain_text("cached")


def shows(page, expect, view):
    expect(page.get_by_role("tabpanel", name=view)).to_be_visible()
    expect(page.get_by_role("tab", name=view)).to_have_attribute("aria-selected", "true")
    expect(page.get_by_role("tabpanel")).to_have_count(1)


def go(page, hash_):
    """Type another address after the #."""
    page.evaluate("address => { location.hash = address }", hash_)


def test_back_and_forward_go_through_the_views(serve, window, expect):
    page = window(serve(TEXT).url)
    expect(page.get_by_role("heading", name="demo")).to_be_visible()
    for view in ("State", "Model"):
        page.get_by_role("tab", name=view).click()
        shows(page, expect, view)
        assert page.url.endswith(f"/#/{view.lower()}")
        expect(page).to_have_title(f"{view} · demo · Oarlock")
    page.get_by_role("tab", name="Model").click()  # the one that is shown adds nothing to the history
    page.evaluate("history.back()")
    shows(page, expect, "State")
    page.evaluate("history.back()")
    shows(page, expect, "Chat")
    expect(page).to_have_title("demo · Oarlock")
    page.evaluate("history.forward()")
    shows(page, expect, "State")


def test_an_address_that_is_typed_is_followed(serve, window, expect):
    page = window(serve(TEXT).url)
    for hash_, view in (("#/model", "Model"), ("#/state", "State"), ("#/chat", "Chat"), ("#/nonsense", "Chat")):
        go(page, hash_)
        shows(page, expect, view)
    go(page, "#/chat?q=Why%3F")
    expect(page.get_by_label("Message")).to_have_value("Why?")


def test_each_conversation_has_an_address(serve, window, expect):
    server = serve(TEXT)
    page = window(server.url)
    answered(page, expect, "First")
    first = page.url
    assert re.fullmatch(rf"{server.url}/#/chat/\w+", first)
    page.get_by_role("button", name="New chat").click()
    expect(answers(page)).to_have_count(0)
    assert page.url == f"{server.url}/#/chat"
    answered(page, expect, "Second")
    second = page.url
    assert second not in (first, f"{server.url}/#/chat")
    page.get_by_role("tab", name="State").click()
    page.evaluate("history.back()")
    expect(page.locator(".bubble")).to_have_text("Second")
    page.evaluate("history.back()")
    expect(page.locator(".bubble")).to_have_text("First")
    assert page.url == first
    page.evaluate("history.forward()")
    expect(page.locator(".bubble")).to_have_text("Second")
    page.get_by_role("button", name="First", exact=True).click()
    expect(page.locator(".bubble")).to_have_text("First")
    page.reload()
    expect(page.locator(".bubble")).to_have_text("First")
    other = page.context.new_page()  # a bookmark
    other.goto(second)
    expect(other.locator(".bubble")).to_have_text("Second")
    expect(other.locator("#conversation-list [aria-current=true]")).to_have_text("Second")
    expect(other.locator("#notices p")).to_have_count(0)


def test_a_view_is_loaded_again_with_the_conversation_behind_it(serve, window, expect):
    page = window(serve(TEXT).url)
    answered(page, expect, "First")
    page.get_by_role("tab", name="Model").click()
    page.reload()
    shows(page, expect, "Model")
    page.get_by_role("tab", name="Chat").click()
    expect(page.locator(".bubble")).to_have_text("First")


def test_a_conversation_that_is_not_here_is_said_to_be_missing(serve, window, expect):
    server = serve(TEXT)
    page = window(server.url, "/#/chat/nosuchid")
    expect(page.locator("#notices")).to_contain_text("This conversation is not stored in this browser.")
    assert page.url == f"{server.url}/#/chat"
    answered(page, expect, "First")
    page.get_by_label("More for First").click()
    page.get_by_role("button", name="Delete", exact=True).first.click()
    expect(answers(page)).to_have_count(0)
    assert page.url == f"{server.url}/#/chat"  # in place of the one that is gone
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".bubble")).to_have_text("First")


def test_going_back_ends_no_answer_of_the_same_conversation(serve, window, expect, tokenizer):
    ids = tokenizer.encode(" one two three" * 4, add_special_tokens=False)
    server = serve(lambda request: ids, pause_after=3)
    page = window(server.url)
    ask(page, "Count")
    expect(page.locator(".word").first).to_be_visible()
    page.get_by_role("tab", name="State").click()
    page.evaluate("history.back()")
    shows(page, expect, "Chat")
    expect(page.locator("li.assistant")).to_have_attribute("aria-busy", "true")
    server.stage.engine.resume.set()
    expect(answers(page).locator(".prose").last).to_have_text(tokenizer.backend.decode(ids, False).strip())
    assert not server.stage.engine.aborted
