"""Messages of the web page in a real browser: while one waits, formulas, code, files, edits, selections."""

import pytest

from oarlock.engine.scheduler.timeline import RequestTimeline
from tests.contract.browsers import answers, ask

pytestmark = pytest.mark.soak

RICH = r"""Euler: $e^{i\pi} = -1$ in \(\mathbb{C}\), and it costs $5 or $6.

$$
\int_0^1 x\,dx
= \frac{1}{2}
$$

\[ \undefined{x \]

```python
def f(x):
    return "a" + str(1)  # comment
```
"""
DROP = """([name, text]) => {
    const data = new DataTransfer();
    data.items.add(new File([text], name));
    document.getElementById('chat').dispatchEvent(new DragEvent('drop', { bubbles: true, dataTransfer: data }));
}"""


def test_progress_is_shown_while_a_response_is_generated(serve, window, expect, tokenizer):
    ids = tokenizer.encode(" one two three four five six" * 20, add_special_tokens=False)
    server = serve(lambda request: ids, delay_s=0.03, pause_after=0)
    engine = server.stage.engine
    timeline = RequestTimeline(1, 500, 0.0)
    engine.known[1] = timeline.history(0, 3)
    page = window(server.url)
    ask(page, "Count")
    numbers = answers(page).locator(".numbers")
    expect(numbers).to_have_text("waits behind 3 requests")
    timeline.admitted(1.0, 100)
    timeline.computed(1.0, 1, 256, 0)
    engine.known[1] = timeline.history(0)
    expect(numbers).to_contain_text("prompt: 356 of")
    expect(numbers.get_by_role("progressbar")).to_have_attribute("value", "356")
    expect(numbers).to_contain_text("100 of them in the cache")
    engine.resume.set()
    expect(numbers).to_contain_text("tokens/s")  # while it is written
    expect(answers(page)).to_have_attribute("aria-busy", "true")
    page.keyboard.press("Escape")
    expect(numbers).to_contain_text("stopped")
    for text in (" tokens", "tokens/s", "first after", "cached"):  # as under an answer that ended by itself
        expect(numbers).to_contain_text(text)
    expect(page.locator("#context")).to_contain_text("of 4,096 tokens")
    expect(page.locator("#context")).to_contain_text("cached")
    page.get_by_label("Message").fill("word " * 5000)
    expect(page.locator("#context")).to_contain_text("not sent")
    expect(page.locator("#context")).to_contain_text("more than the context holds")


def test_formulas_and_code_are_drawn(serve, window, expect):
    page = window(serve(RICH).url)
    ask(page, RICH)
    for message in (page.get_by_role("listitem", name="You"), answers(page)):  # one's own as well
        expect(message.locator("math")).to_have_count(3)
        expect(message.locator("math").nth(1)).to_contain_text("\N{DOUBLE-STRUCK CAPITAL C}")
        expect(message.locator(".math.display math")).to_have_count(1)
        expect(message).to_contain_text("it costs $5 or $6")
        expect(message).to_contain_text(r"\undefined{x")  # as it is written, with the reason
        assert "Undefined" in message.locator(".math[title]").get_attribute("title")
        expect(message.locator(".code-keyword")).to_have_text(["def", "return"])
        expect(message.locator(".code-comment")).to_have_text("# comment")
    answers(page).locator(".code .word").first.hover()  # colours leave the words their alternatives
    expect(page.get_by_role("menu")).to_be_visible()
    page.mouse.move(5, 5)
    expect(page.get_by_role("menu")).to_have_count(0)
    shade = "one => getComputedStyle(one).backgroundColor"
    before = answers(page).locator(".word").first.evaluate(shade)
    answers(page).get_by_role("button", name="Probabilities").click()
    assert answers(page).locator(".word").first.evaluate(shade) != before  # a word of 61 %


def test_selecting_text_opens_no_menu(serve, window, expect):
    page = window(serve("Join two or more pathname components here.").url)
    ask(page, "Hi")
    expect(answers(page).locator(".numbers")).to_contain_text("cached")
    first, last = page.locator(".word").first.bounding_box(), page.locator(".word").nth(5).bounding_box()
    page.mouse.move(first["x"] + 1, first["y"] + 5)
    page.mouse.down()
    page.mouse.move(last["x"] + 4, last["y"] + 5, steps=6)
    page.wait_for_timeout(400)  # longer than a menu waits
    expect(page.get_by_role("menu")).to_have_count(0)
    page.mouse.up()
    page.wait_for_timeout(400)
    expect(page.get_by_role("menu")).to_have_count(0)
    assert len(page.evaluate("getSelection().toString()")) > 5


def test_files_go_with_a_message(serve, window, expect, tokenizer):
    server = serve("Seen.")
    page = window(server.url)
    page.get_by_label("Attach text files").wait_for()
    with page.expect_file_chooser() as chooser:
        page.get_by_label("Attach text files").click()
    files = [("notes.md", b"```\nfenced\n```\nmore"), ("picture.png", b"\x89PNG\x00")]
    chooser.value.set_files([{"name": name, "mimeType": "text/plain", "buffer": data} for name, data in files])
    tokens = len(tokenizer.encode(files[0][1].decode(), add_special_tokens=False))
    chips = page.get_by_role("list", name="Attached files").get_by_role("listitem")
    expect(chips).to_have_text([f"notes.md{tokens} tokens\N{MULTIPLICATION SIGN}"])
    expect(page.get_by_text("picture.png is not UTF-8 text")).to_be_visible()
    page.evaluate(DROP, ["dropped.txt", "from a folder"])
    page.get_by_label("Message").fill("long " * 1000)
    for key in "AXV":  # what is pasted was cut out before
        page.keyboard.press(f"Control+{key}")
    expect(chips).to_have_count(3)
    page.get_by_role("button", name="Remove pasted text").click()
    ask(page, "What is in them?")
    expect(answers(page).locator(".numbers")).to_contain_text("cached")
    prompt = tokenizer.backend.decode(server.stage.engine.requests[0].prompt_token_ids, False)
    notes, dropped = "notes.md:\n````\n```\nfenced\n```\nmore\n````", "dropped.txt:\n```\nfrom a folder\n```"
    assert f"{notes}\n\n{dropped}\n\nWhat is in them?" in prompt
    page.get_by_text("dropped.txt", exact=True).click()
    expect(page.get_by_text("from a folder")).to_be_visible()


SLOW_STORAGE = """() => {
  const begin = IDBDatabase.prototype.transaction;
  IDBDatabase.prototype.transaction = function (names, mode) {
    const transaction = begin.call(this, names, mode);
    const until = performance.now() + 500;
    const again = () => {
      if (performance.now() < until) transaction.objectStore(names[0]).get("none").onsuccess = again;
    };
    if (mode === "readwrite") again();
    return transaction;
  };
}"""


def test_long_messages_fold_and_any_message_is_edited_and_deleted(serve, window, expect, tokenizer):
    server = serve("An answer.")
    page = window(server.url)
    ask(page, "line\n\n" * 40 + "the end")
    expect(answers(page).locator(".numbers")).to_contain_text("cached")
    question = page.get_by_role("listitem", name="You")
    folded = question.locator(".bubble").bounding_box()["height"]
    question.get_by_role("button", name="Show all").click()
    assert question.locator(".bubble").bounding_box()["height"] > 2 * folded
    answers(page).get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the answer").fill("**My** answer")
    page.get_by_role("button", name="Save as a branch").click()
    expect(answers(page)).to_contain_text("edited by hand")
    expect(answers(page).locator("strong")).to_have_text("My")
    ask(page, "Go on")
    expect(answers(page)).to_have_count(2)
    expect(answers(page).last.locator(".numbers")).to_contain_text("cached")
    assert "**My** answer" in tokenizer.backend.decode(server.stage.engine.requests[1].prompt_token_ids, False)
    answers(page).first.get_by_role("button", name="Delete").click()  # and what follows it
    expect(answers(page)).to_have_count(1)
    expect(answers(page)).to_contain_text("An answer.")  # the branch beside it
    page.evaluate(SLOW_STORAGE)  # a reload ends the transactions that are not complete
    page.get_by_role("button", name="Undo").click()
    expect(answers(page)).to_have_count(2)
    page.reload()
    expect(answers(page)).to_have_count(2)
    expect(answers(page).first).to_contain_text("My answer")
