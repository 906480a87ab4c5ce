"""Conversations of the web page in a real browser: kept, found, renamed, deleted, as files and links."""

import json
import urllib.parse

import pytest

from tests.contract.browsers import answers, ask, read, saved

pytestmark = pytest.mark.soak

TEXT = "Join two or more pathname components, inserting '/' as needed."
EVIL = (
    "<img src=x onerror=harmed=1>",
    "<script>harmed=2</script>",
    "[a](javascript:harmed=3)",
    r"$\href{javascript:harmed=4}{x}$",
    r"\(\htmlData{a=b}{x}\includegraphics{http://198.51.100.7/a.png}\)",
    "```html\n<svg onload=harmed=5>\n```",
)
RECORDS = """() => new Promise((resolve) => {
    const request = indexedDB.open('oarlock /');
    request.onsuccess = () => {
        const tables = [...request.result.objectStoreNames];
        if (!tables.length) return resolve(0);
        const transaction = request.result.transaction(tables);
        const counts = tables.map((name) => new Promise((one) => {
            transaction.objectStore(name).count().onsuccess = (event) => one(event.target.result);
        }));
        Promise.all(counts).then((found) => resolve(found.reduce((a, b) => a + b)));
    };
})"""
LISTEN = """() => {
    window.heard = new Set();
    new BroadcastChannel('oarlock /').onmessage = (event) => window.heard.add(event.data);
}"""


def rows(page):
    return page.locator("#conversation-list li")


def choose(page, title, action):
    page.get_by_label(f"More for {title}").click()
    page.locator("#conversation-list details[open]").get_by_role("button", name=action, exact=True).click()


def answered(page, expect, text):
    ask(page, text)
    expect(answers(page).last.locator(".numbers")).to_contain_text("cached")


def hears(page, conversations):
    """Wait until the tab has heard of changes of as many conversations, and has read what is kept."""
    while page.evaluate("window.heard.size") < conversations:
        page.wait_for_timeout(20)
    page.evaluate(RECORDS)


def test_they_are_kept_found_renamed_and_brought_back(serve, window, expect):
    url = serve(TEXT).url
    page = window(url)
    answered(page, expect, "A question about oars")
    page.get_by_role("button", name="New chat").click()
    expect(answers(page)).to_have_count(0)
    answered(page, expect, "What is a keel?")
    expect(rows(page)).to_have_count(2)
    expect(rows(page).first.locator(".title")).to_have_attribute("aria-current", "true")
    page.get_by_label("Search conversations").fill("pathname OARS")  # in the answer, and in the title
    expect(rows(page)).to_have_count(1)
    choose(page, "A question about oars", "Rename")
    page.get_by_label("Title").fill("Rowing")
    page.get_by_label("Title").press("Enter")
    page.get_by_label("Search conversations").fill("")
    other = page.context.new_page()  # another tab, as after a restart
    other.goto(url)
    expect(answers(other)).to_have_count(0)
    other.get_by_role("button", name="Rowing", exact=True).click()
    expect(answers(other).locator(".prose").last).to_have_text(TEXT)
    expect(answers(other).locator(".word").first).to_be_visible()  # with what else might have stood there
    answered(other, expect, "And then?")
    choose(other, "Rowing", "Delete")
    expect(rows(other)).to_have_count(1)
    expect(rows(page)).to_have_count(1)  # the first tab hears of it
    other.get_by_role("button", name="Undo").click()
    expect(rows(page)).to_have_count(2)
    expect(answers(other)).to_have_count(2)


def test_an_open_menu_and_a_title_half_written_outlast_a_change_of_the_list(serve, window, expect):
    url = serve(TEXT).url
    page = window(url)
    answered(page, expect, "A keel")
    other = page.context.new_page()
    other.goto(url)
    expect(rows(other)).to_have_count(1)
    other.evaluate(LISTEN)
    other.get_by_label("More for A keel").click()
    answered(page, expect, "And then?")
    page.get_by_role("button", name="New chat").click()
    answered(page, expect, "An oar")
    hears(other, 2)
    expect(rows(other)).to_have_count(1)
    other.get_by_label("More for A keel").press("Escape")
    expect(rows(other)).to_have_count(2)
    choose(other, "A keel", "Rename")
    other.get_by_label("Title").fill("Rowing")
    page.get_by_role("button", name="New chat").click()
    answered(page, expect, "A rudder")
    hears(other, 3)
    other.get_by_label("Title").press("Enter")
    expect(rows(other).locator(".title")).to_have_text(["A rudder", "An oar", "Rowing"])


def test_nothing_is_kept_where_one_wishes_so(serve, window, expect):
    url = serve(TEXT).url
    page = window(url)
    answered(page, expect, "A secret")
    while page.evaluate(RECORDS) <= 3:  # the page's policy forbids wait_for_function, which evaluates later
        page.wait_for_timeout(20)
    page.get_by_label("Save nothing on this machine").check()
    expect(page.get_by_text("The saved conversations are deleted.")).to_be_visible()
    assert page.evaluate(RECORDS) == 0
    answered(page, expect, "Another secret")
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="A secret", exact=True).click()  # this tab still has it
    expect(answers(page)).to_have_count(2)
    assert page.evaluate(RECORDS) == 0
    other = page.context.new_page()
    other.goto(url)
    expect(other.get_by_label("Save nothing on this machine")).to_be_checked()
    expect(rows(other)).to_have_count(0)


def test_they_travel_as_files(serve, window, expect, tmp_path):
    server = serve(TEXT)
    page = window(server.url)
    answered(page, expect, "# A *title*")
    answers(page).get_by_role("button", name="Try again").click()
    expect(page.get_by_text("2 / 2")).to_be_visible()
    expect(answers(page).locator(".numbers")).to_contain_text("cached")
    path = saved(page, lambda: choose(page, "# A *title*", "As Markdown"))
    assert path.name == "A title.md"
    assert path.read_text() == f"# # A *title*\n\n## Question\n\n# A *title*\n\n## Answer\n\n{TEXT}\n"
    other = window(server.url)
    read(other, saved(page, page.get_by_role("button", name="Export all").click))
    expect(other.get_by_text("2 / 2")).to_be_visible()  # every branch
    expect(answers(other).locator(".prose").last).to_have_text(TEXT)
    given = tmp_path / "a.json"
    for text, problem in (
        ("{", "is not JSON"),
        ('{"a": 1}', "neither"),
        ('[{"role": "wizard", "content": "x"}]', 'Message 1 of conversation 1 has the role "wizard"'),
        ('[{"role": "user", "content": ["x"]}]', "a content that is not text"),
    ):
        given.write_text(text)
        read(other, given)
        expect(other.locator("#notices p").last).to_contain_text(problem)
    given.write_text(json.dumps([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]))
    read(other, given)  # messages as the API takes them
    expect(answers(other).locator(".prose").last).to_have_text("Ho")


def test_a_link_opens_with_a_question_and_sends_nothing(serve, window, expect):
    server = serve(TEXT)
    question = "Why?\n<img src=x onerror=window.harmed=1> & more"
    page = window(server.url, "/#/chat?" + urllib.parse.urlencode({"q": question}))
    expect(page.get_by_label("Message")).to_have_value(question)
    assert page.evaluate("location.href") == f"{server.url}/"
    assert server.stage.engine.requests == []
    page.get_by_label("Message").press("Enter")
    expect(answers(page).locator(".numbers")).to_contain_text("cached")
    assert page.evaluate("window.harmed") is None


CREATED = "main img, main script, main svg[onload], main iframe, main [onerror], main [onclick], #messages a"


def attach(page, expect, name, text):
    with page.expect_file_chooser() as chooser:
        page.get_by_label("Attach text files").click()
    chooser.value.set_files({"name": name, "mimeType": "text/plain", "buffer": text.encode()})
    expect(page.locator("#files li")).to_contain_text("token")


def unharmed(page, expect):
    """The formulas are drawn, and nothing else came of the hostile texts."""
    expect(page.locator("math").first).to_be_attached()
    expect(page.locator(CREATED)).to_have_count(0)
    expect(page.locator("math [href], math [class], math img")).to_have_count(0)
    assert page.evaluate("window.harmed") is None


def test_no_text_becomes_an_element(serve, window, expect, tmp_path):
    """Questions, answers, names of files, titles, imported conversations, formulas: the same hostile texts in each."""
    evil = "\n\n".join(EVIL)
    server = serve(evil)
    page = window(server.url)
    page.get_by_label("Attach text files").wait_for()
    attach(page, expect, f"{EVIL[0]}.txt", evil)
    answered(page, expect, evil)
    path = tmp_path / "a.json"
    messages = [
        {"role": "user", "content": evil, "files": [{"name": EVIL[1], "text": evil}]},
        {
            "role": "assistant",
            "content": evil,
            "tool_calls": [{"id": EVIL[0], "function": {"name": EVIL[0], "arguments": evil}}],
        },
        {"role": "tool", "tool_call_id": "x", "content": evil},
    ]
    path.write_text(json.dumps(messages))
    read(page, path)
    expect(page.locator("#messages > li")).to_have_count(3)
    unharmed(page, expect)
    assert all(address.startswith((server.url, "blob:")) for address in page.window.addresses)


def test_no_text_becomes_an_element_on_its_way_out(serve, window, expect):
    """Exported as either file, copied and pasted, read again and opened: hostile texts as they were, and safe names."""
    evil, title = "\n\n".join(EVIL), f"../.. \u202etxt.exe:{EVIL[0]}|CON"
    server = serve(evil)
    page = window(server.url)
    page.get_by_label("Attach text files").wait_for()
    attach(page, expect, f"{EVIL[0]}.txt", evil)
    answered(page, expect, evil)
    choose(page, EVIL[0], "Rename")
    page.get_by_label("Title").fill(title)
    page.get_by_label("Title").press("Enter")
    written = saved(page, lambda: choose(page, title, "As Markdown"))
    kept = saved(page, lambda: choose(page, title, "As JSON"))
    assert (written.name, kept.name) == tuple(f"txt.exeimg srcx onerrorharmed1CON.{kind}" for kind in ("md", "json"))
    assert written.read_text().count(evil) == 3  # the question, the file, the answer
    assert written.read_text().startswith(f"# {title}\n")
    other = window(server.url)
    read(other, kept)
    expect(other.locator("#messages > li")).to_have_count(2)
    unharmed(other, expect)
    expect(rows(other).locator(".title")).to_have_text(title)
    answers(other).get_by_role("button", name="Copy", exact=True).last.click()
    expect(answers(other).get_by_role("button", name="Copied")).to_be_visible()
    other.get_by_label("Message").press("Control+V")
    expect(other.get_by_label("Message")).to_have_value(evil)
    assert json.loads(kept.read_text())["conversations"][0]["title"] == title
    read(other, saved(other, lambda: choose(other, title, "As JSON")))  # once more: what was read is written alike
    expect(rows(other)).to_have_count(2)
    unharmed(other, expect)
