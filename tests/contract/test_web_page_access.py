"""The web page for everybody, in real browsers: contrast, the keyboard, long conversations."""

import json

import pytest

from tests.contract.browsers import answers, ask, read

pytestmark = pytest.mark.soak

RICH = 'Some *text* with `code`, a [link](https://example.org) and\n\n```python\ndef f(): return "a"  # why\n```\n'
# Every visible text with its contrast to what is behind it, where that is below what WCAG 2.2 AA asks.
FAINT = """() => {
    const context = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const rgba = (colour) => {
        context.clearRect(0, 0, 1, 1);
        context.fillStyle = colour;
        context.fillRect(0, 0, 1, 1);
        return [...context.getImageData(0, 0, 1, 1).data];
    };
    const over = ([r, g, b, a], back) => [r, g, b].map((one, at) => (one * a + back[at] * (255 - a)) / 255);
    const behind = (element) => {
        if (!element) return rgba(getComputedStyle(document.documentElement).backgroundColor);
        const colour = rgba(getComputedStyle(element).backgroundColor);
        return colour[3] === 255 ? colour : over(colour, behind(element.parentElement));
    };
    const light = (colour) => colour.slice(0, 3).map((one) => one / 255)
        .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
        .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        const text = walker.currentNode.data.trim();
        const isShown = element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
        if (!text || !isShown || element.closest(':disabled, .hidden, svg')) continue;
        const style = getComputedStyle(element);
        const back = behind(element);
        const [a, b] = [light(over(rgba(style.color), back)), light(back)].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        const isLarge = parseFloat(style.fontSize) >= (style.fontWeight >= 700 ? 18.6 : 24);
        if (ratio < (isLarge ? 3 : 4.5)) found.push([text.slice(0, 40), element.className, ratio.toFixed(2)]);
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_is_highlighted(serve, window, expect, scheme):
    page = window(serve(RICH).url, color_scheme=scheme)
    assert page.evaluate(FAINT) == []
    ask(page, RICH)
    expect(answers(page).locator(".code-keyword").first).to_be_visible()
    expect(answers(page).locator(".numbers")).to_contain_text("cached")
    answers(page).get_by_role("button", name="Probabilities").click()
    expect(answers(page).get_by_role("note")).to_be_visible()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("hot")
    assert page.evaluate(FAINT) == []
    for view in ("State", "Model"):
        page.get_by_role("tab", name=view).click()
        assert page.evaluate(FAINT) == [], view
    page.goto(page.url.split("#")[0] + "compare")
    page.get_by_role("region", name="A", exact=True).wait_for()
    assert page.evaluate(FAINT) == []


def test_the_keyboard_goes_through_the_page_in_its_order(serve, window, expect):
    page = window(serve("x").url, viewport={"width": 390, "height": 700})
    expect(page.get_by_role("heading", name="demo")).to_be_visible()
    ask(page, "Hi")
    expect(answers(page).locator(".numbers")).to_contain_text("cached")
    page.get_by_role("button", name="Conversations").focus()
    seen = []
    for _ in range(30):
        page.keyboard.press("Tab")
        here = "e => [e.getAttribute('aria-label') || e.textContent.trim() || e.id, e.getBoundingClientRect().top]"
        seen.append(page.locator(":focus").evaluate(here))
        if seen[-1][0] == "Send":
            break
    names = [name for name, _ in seen]
    order = ("New chat", "Chat", "Settings", "Copy", "Probabilities", "Attach text files", "Send")
    places = [names.index(name) for name in order]
    assert places == sorted(places)
    page.get_by_role("button", name="Conversations").press("Enter")  # the drawer
    expect(page.get_by_label("Search conversations")).to_be_focused()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.keyboard.press("Escape")
    expect(page.get_by_role("complementary", name="Conversations")).to_be_hidden()
    expect(page.get_by_role("button", name="Conversations")).to_be_focused()
    page.goto(page.url.split("#")[0] + "compare")
    expect(page.locator("#status")).to_have_text("ready")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_long_conversation_holds_what_can_be_seen(serve, window, expect, tokenizer, tmp_path):
    paragraphs = tokenizer.encode("a b c d e\n\n" * 500, add_special_tokens=False)
    server = serve(lambda request: paragraphs)
    page = window(server.url)
    path = tmp_path / "long.json"
    text = "word " * 250
    turns = [{"role": role, "content": f"{text}\n\n- a\n- b"} for _ in range(200) for role in ("user", "assistant")]
    path.write_text(json.dumps(turns))  # about 100,000 tokens
    read(page, path)
    expect(page.locator("#messages > li")).to_have_count(400)
    elements = "document.querySelectorAll('*').length"
    for share in (1, 0.5, 0):
        page.locator("#scroll").evaluate(f"box => (box.scrollTop = box.scrollHeight * {share})")
        expect(page.locator("#messages p").nth(4)).to_be_attached()
        assert page.evaluate(elements) < 2500
    page.get_by_role("button", name="New chat").click()
    ask(page, "A long one")  # one answer of many blocks
    expect(answers(page).locator(".numbers")).to_contain_text("cached")
    words = page.evaluate("document.querySelectorAll('.word').length")
    assert 0 < words < len(paragraphs) / 2
    page.locator("#scroll").evaluate("box => (box.scrollTop = 0)")  # and those that left come back
    expect(answers(page).locator(".prose p .word").first).to_be_visible()
