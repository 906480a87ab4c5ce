"""The look of the web page in a real browser: nothing is hidden, covered, broken apart or left without a name."""

import json

import pytest

from oarlock.server.http.server_state import Phase
from oarlock.server.llm.introduction import Introduction
from tests.contract.browsers import answers, ask, read
from tests.contract.test_web_page_state import STATE

pytestmark = pytest.mark.soak

TEXT = "Join two or more pathname components."
# Buttons and fields that can be used and not be seen, or that something else covers: at the middle of each is itself.
UNSEEN = """() => [...document.querySelectorAll('button, input, textarea, select, a')].filter((one) => {
    if (!one.checkVisibility() || one.closest(':disabled, .hidden')) return false;
    if (one.closest('li.user:not(:hover) > .actions')) return false; // shown when it is pointed at
    let opacity = 1;
    for (let each = one; each; each = each.parentElement) opacity *= getComputedStyle(each).opacity;
    if (opacity < 0.5) return true;
    const box = one.getBoundingClientRect();
    const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
    const pane = one.closest('#scroll, #settings, #conversation-list, [role=tabpanel]');
    const frame = pane ? pane.getBoundingClientRect() : { top: 0, bottom: innerHeight };
    if (y < frame.top || y > frame.bottom || y > innerHeight || y < 0) return false; // one scrolls there
    return !one.contains(document.elementFromPoint(x, y)) && !one.labels?.length;
}).map((one) => one.textContent || one.id)"""
BETWEEN = (("50", "90"), ("20", "50"), ("5", "20"), ("0.5", "5"))
WIDTHS = [390, 768, 1440]


def answered(page, expect, text):
    ask(page, text)
    expect(answers(page).last.locator(".numbers")).to_contain_text("cached")


def away(page):
    """Take the pointer off everything that shows more below it."""
    page.mouse.move(1, 1)
    page.wait_for_timeout(250)  # longer than it takes to fade


@pytest.mark.parametrize("width", WIDTHS)
def test_every_button_can_be_seen_while_a_message_is_edited(serve, window, expect, width):
    page = window(serve(TEXT).url, viewport={"width": width, "height": 800})
    answered(page, expect, "Old question")
    question = page.get_by_role("listitem", name="You")
    for message in (question, answers(page)):
        message.hover()
        message.get_by_role("button", name="Edit").click()
        away(page)
        assert page.evaluate(UNSEEN) == []
        message.get_by_role("button", name="Cancel").click()
    question.hover()
    question.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("New question")
    page.get_by_label("Edit the message").blur()
    away(page)
    question.get_by_role("button", name="Send").click()
    expect(page.locator(".bubble")).to_have_text("New question")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_notice_covers_nothing_and_waits_for_the_pointer(serve, window, expect, width):
    page = window(serve(TEXT).url, viewport={"width": width, "height": 800})
    page.clock.install()
    answered(page, expect, "First")
    answers(page).get_by_role("button", name="Delete").click()
    notice = page.locator("#notices p")
    expect(notice.get_by_role("button", name="Undo")).to_be_visible()
    page.mouse.move(1, 1)
    assert page.evaluate(UNSEEN) == []
    with_notice = page.locator("#send").bounding_box()
    if width > 390:  # where the settings are beside the chat
        page.get_by_role("button", name="Settings").click()
        assert page.evaluate(UNSEEN) == []
    notice.hover()
    page.clock.fast_forward(60_000)
    expect(notice).to_be_visible()
    page.mouse.move(1, 1)
    page.clock.fast_forward(11_000)
    expect(notice).to_be_visible()
    page.clock.fast_forward(2_000)
    expect(notice).to_have_count(0)
    assert page.locator("#send").bounding_box()["y"] == with_notice["y"], "what somebody is about to press stays there"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "a.json: The file contains no message."),
        ('{"messages": []}', "a.json: The file contains no message."),
        ('{"form": "oarlock-conversations", "conversations": []}', "a.json: The file contains no message."),
        ('{"form": "oarlock-conversations", "conversations": [{"messages": []}]}', "The file contains no message."),
        ('{"form": "oarlock-conversations", "conversations": [null]}', 'Conversation 1 has no list "messages".'),
        ("[null]", "Message 1 of conversation 1 is not an object."),
        ('["user"]', "Message 1 of conversation 1 is not an object."),
        ('[{"content": "x"}]', "Message 1 of conversation 1 has the role undefined"),
        ('[{"role": ["user"], "content": "x"}]', 'has the role ["user"]'),
        ('[{"role": "user", "content": "x", "files": 7}]', "One conversation was imported."),
        ('[{"role": "assistant", "content": "x", "tool_calls": [null]}]', "One conversation was imported."),
    ],
)
def test_the_number_of_conversations_that_were_read_is_true(serve, window, expect, tmp_path, content, said):
    page = window(serve(TEXT).url)
    expect(page.get_by_role("heading", name="demo")).to_be_visible()
    path = tmp_path / "a.json"
    path.write_text(content)
    read(page, path)
    expect(page.locator("#notices p").last).to_contain_text(said)
    rows = 1 if "One" in said else 0
    expect(page.locator("#conversation-list li")).to_have_count(rows)


def test_an_export_of_nothing_is_no_file(serve, window, expect):
    page = window(serve(TEXT).url)
    page.get_by_role("button", name="Export all").click()
    expect(page.locator("#notices")).to_contain_text("There is no conversation to export yet.")


# Words of which a part stands on another line, though the word alone would fit into its cell.
BROKEN = """() => {
    const found = [];
    for (const cell of document.querySelectorAll('#model dt, #model dd')) {
        const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
        while (walker.nextNode()) for (const match of walker.currentNode.data.matchAll(/[^\\s/-]+/g)) {
            const range = document.createRange();
            range.setStart(walker.currentNode, match.index);
            range.setEnd(walker.currentNode, match.index + match[0].length);
            if (range.getClientRects().length > 1) found.push(match[0]);
        }
    }
    return found;
}"""


@pytest.mark.parametrize("width", [340, *WIDTHS])
def test_the_model_tab_breaks_no_word(serve, window, expect, width):
    page = window(serve(TEXT).url, "/#/model", viewport={"width": width, "height": 800})
    expect(page.get_by_text("Qwen2ForCausalLM")).to_be_visible()
    assert page.evaluate(BROKEN) == []


@pytest.mark.parametrize("width", [340, 390, 768, 1024, 1440, 1920])
def test_the_tiles_fill_their_rows(serve, window, expect, width):
    page = window(serve(TEXT, live_state=STATE).url, "/#/state", viewport={"width": width, "height": 800})
    tiles = page.locator(".tile")
    expect(tiles).to_have_count(8)
    boxes = [tile.bounding_box() for tile in tiles.all()]
    right = max(box["x"] + box["width"] for box in boxes)
    rows = {round(box["y"]): [other for other in boxes if round(other["y"]) == round(box["y"])] for box in boxes}
    for row in rows.values():
        assert abs(max(box["x"] + box["width"] for box in row) - right) < 2, "no row ends early"
        assert len({round(box["width"]) for box in row}) == 1
    expect(page.get_by_text("The last minute", exact=True)).to_be_visible()
    expect(page.get_by_label("The last minute")).to_have_attribute("type", "range")


def test_an_answer_names_its_model_explains_its_request_and_its_colours(serve, window, expect):
    page = window(serve(TEXT).url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("complementary", name="Settings").get_by_label("Model").select_option("alias/with/slash")
    answered(page, expect, "Hi")
    answer = answers(page)
    expect(answer.get_by_text("alias/with/slash", exact=True)).to_be_visible()
    expect(answer.get_by_role("note")).to_have_count(0)
    answer.get_by_role("button", name="Probabilities").click()
    chips = answer.get_by_role("note", name="Colours of probabilities").locator("span")
    expect(chips).to_have_text(
        ["Probability of each token:", "≥ 90 %", *(f"{low}\N{EN DASH}{high} %" for low, high in BETWEEN), "< 0.5 %"]
    )
    shades = chips.evaluate_all("all => all.slice(1).map((one) => getComputedStyle(one).backgroundColor)")
    assert len(set(shades)) == 6
    word = answer.locator(".word.p1").first.evaluate("one => getComputedStyle(one).backgroundColor")
    assert word == shades[1]
    answer.get_by_role("button", name="Probabilities").click()
    expect(answer.get_by_role("note")).to_have_count(0)
    answer.get_by_role("button", name="Explain").click()
    dialog = page.get_by_role("dialog", name="Request chatcmpl-")
    expect(dialog.get_by_text("answered")).to_be_visible()
    dialog.get_by_role("button", name="Close").click()
    page.reload()  # both are kept with the conversation
    expect(answers(page).get_by_text("alias/with/slash", exact=True)).to_be_visible()
    expect(answers(page).get_by_role("button", name="Explain")).to_be_visible()


def test_the_keys_are_listed(serve, window, expect):
    page = window(serve(TEXT).url)
    expect(page.get_by_role("heading", name="demo")).to_be_visible()
    dialog = page.get_by_role("dialog", name="Keys")
    page.get_by_role("button", name="All keys").click()
    for key in ("Shift+Enter", "Escape", "← →", "Ctrl+/"):
        expect(dialog.get_by_text(key).first).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    page.get_by_label("Message").press("Control+/")  # in a field, too: it types nothing there
    expect(dialog).to_be_visible()
    page.keyboard.press("Control+/")
    expect(dialog).to_have_count(1)
    dialog.get_by_role("button", name="Close").click()
    expect(page.get_by_label("Message")).to_have_value("")


def test_a_model_is_introduced_by_its_owner(serve, window, expect, tokenizer):
    server = serve(TEXT)
    page = window(server.url)
    expect(page.get_by_role("heading", name="demo")).to_be_visible()
    expect(page.locator("#starters li")).to_have_count(0)  # no questions that the model may not know
    server = serve(TEXT)
    server.stage.state.introduction = Introduction("It knows <b>oars</b>.", ("What is an oar?", "What is a keel?"))
    page = window(server.url)
    expect(page.get_by_text("It knows <b>oars</b>.").first).to_be_visible()
    expect(page.locator("#starters button")).to_have_text(["What is an oar?", "What is a keel?"])
    page.get_by_role("button", name="What is a keel?").click()
    expect(answers(page).locator(".numbers")).to_contain_text("cached")
    assert "What is a keel?" in tokenizer.backend.decode(server.stage.engine.requests[0].prompt_token_ids, False)
    page.get_by_role("tab", name="Model").click()
    expect(page.get_by_role("tabpanel", name="Model").get_by_text("It knows <b>oars</b>.")).to_be_visible()


def test_a_start_says_what_it_does_and_for_how_long(serve, window, expect):
    server = serve(TEXT)
    state = server.stage.state
    state.phase, state.loading_step, state.loading_fraction = Phase.LOADING, "compiling kernels", 0.25
    state.loading_detail, state.started_at = "9 of 36 files", state.started_at - 600
    page = window(server.url)
    banner = page.locator("#banner")
    expect(banner).to_contain_text("The server is getting ready: compiling kernels, 25 %, 9 of 36 files.")
    expect(banner).to_contain_text("for 10 min")
    expect(banner.get_by_role("progressbar")).to_have_attribute("value", "0.25")
    assert banner.locator("span").nth(1).get_attribute("aria-hidden") == "true"  # not read aloud each second
    state.loading_fraction = 0.5
    expect(banner).to_contain_text("50 %")
    state.phase = Phase.READY
    expect(banner).to_be_hidden()


def test_both_documents_have_the_same_header(serve, window, expect):
    url = serve(TEXT).url
    headers = {}
    for path in ("/", "/compare"):
        page = window(url, path)
        expect(page.locator("#status")).to_have_text("ready")
        header = page.locator("header")
        names = header.locator("nav").get_by_role("tab").or_(header.locator("nav").get_by_role("link"))
        expect(names).to_have_text(["Chat", "State", "Model", "Compare"])
        shown = [header.bounding_box()["height"], header.locator("nav").evaluate("nav => nav.clientHeight")]
        current = header.locator("[aria-selected=true], [aria-current=page]")
        shown.append(current.evaluate("one => [getComputedStyle(one).color, getComputedStyle(one).backgroundColor]"))
        headers[path] = shown
        header.get_by_role("button", name="Theme").click()
        expect(header.get_by_role("button", name="Theme: light")).to_be_visible()
    assert headers["/"] == headers["/compare"]
    page.locator("header").get_by_role("link", name="State").click()
    expect(page.get_by_role("tabpanel", name="State")).to_be_visible()
    page.get_by_role("link", name="Compare", exact=True).click()
    page.wait_for_url("**/compare")
    page.evaluate("setTimeout(() => history.back())")  # later, as a page that is being left returns nothing
    expect(page.get_by_role("tabpanel", name="State")).to_be_visible()


FORMULAS = r"""$$\left|\frac{a}{\frac{b}{c}}\right| \quad \left\Vert\frac{a}{\frac{b}{c}}\right\Vert$$

$$\sqrt{\frac{a}{\frac{b}{c}}} \quad \widehat{abcdef}$$

- a
  - b
"""
# Each sign with its length and that of what it belongs to.
LENGTHS = """() => {
    const box = (one) => one.getBoundingClientRect();
    const bars = [...document.querySelectorAll('#messages mo[fence=true]')].map((bar) => {
        const rest = [...bar.parentElement.children].filter((one) => one.getAttribute('fence') !== 'true');
        return [box(bar).height, Math.max(...rest.map((one) => box(one).height))];
    });
    const hat = document.querySelector('#messages mover > mo');
    return [...bars, [box(hat).width, box(hat.parentElement.firstElementChild).width]];
}"""


def test_brackets_bars_and_roots_are_as_long_as_what_they_belong_to(serve, window, expect):
    page = window(serve(FORMULAS).url)
    answered(page, expect, "Hi")
    expect(page.locator("#messages math")).to_have_count(2)
    page.wait_for_timeout(100)  # for a frame
    lengths = page.evaluate(LENGTHS)
    assert len(lengths) >= 5
    assert [pair for pair in lengths if pair[0] < 0.85 * pair[1]] == []
    bullets = page.locator("#messages .prose ul").evaluate_all(
        "all => all.map((one) => getComputedStyle(one).listStyleType)"
    )
    assert bullets == ["disc", "disc"]


def test_an_answer_that_was_exported_still_names_its_model(serve, window, expect, tmp_path):
    page = window(serve(TEXT).url)
    path = tmp_path / "a.json"
    messages = [
        {"id": "a", "parent": "", "role": "user", "content": "Hi"},
        {"id": "b", "parent": "a", "role": "assistant", "content": "Ho", "model": "a <b>model</b>"},
    ]
    path.write_text(
        json.dumps({"form": "oarlock-conversations", "version": 1, "conversations": [{"messages": messages}]})
    )
    read(page, path)
    expect(answers(page).get_by_text("a <b>model</b>", exact=True)).to_be_visible()
    expect(answers(page).get_by_role("button", name="Explain")).to_have_count(0)  # whose request no server knows
