"""The web page in a real browser, in front of the real HTTP server with a scripted engine behind it."""

import json
import re
import threading

import anyio
import pytest

from tests.contract import browsers
from tests.contract.browsers import answers, ask
from tests.contract.conftest import chat_tokenizer
from tests.contract.test_chat_tools_wire import TOOLS
from tests.unit.server.llm import chat_templates as templates

pytestmark = pytest.mark.slow

TEXT = "Join two or more pathname components, inserting '/' as needed."
EVIL = """<script>window.harmed = 1</script> <img src=x onerror="window.harmed = 2">
[run](javascript:window.harmed=3) [data](data:text/html,<script>1</script>) ![seen](http://198.51.100.7/pixel.png)
[fine](https://example.org/a_b) <b onclick=1>bold</b> **<i>strong</i>** `<u>code</u>`

```html"><img src=x onerror=window.harmed=4>
</code></pre><script>window.harmed = 5</script>
```

| a | <svg onload=window.harmed=6> |
|---|---|
| [x](JaVaScRiPt:alert(1)) | &lt;b&gt; |
"""


def prompts(server, tokenizer):
    """The prompts that the engine was given, as text."""
    return [text_of(tokenizer, request.prompt_token_ids) for request in server.stage.engine.requests]


def text_of(tokenizer, ids):
    return tokenizer.backend.decode(ids, False)


def test_an_answer_streams_and_shows_what_it_took(serve, window, expect, tokenizer):
    server = serve(TEXT, delay_s=0.01)  # an answer that arrives all at once has no speed
    page = window(server.url)
    expect(page.get_by_role("heading", name="demo")).to_be_visible()
    ask(page, "What does\nos.path.join do?")
    answer = answers(page)
    expect(answer.locator(".numbers")).to_contain_text("prompt tokens cached")
    expect(answer.locator(".prose").last).to_have_text(TEXT)
    numbers = answer.locator(".numbers span").all_inner_texts()
    count = len(tokenizer.encode(TEXT, add_special_tokens=False)) + 1
    length = len(server.stage.engine.requests[0].prompt_token_ids)
    assert numbers[0] == f"{count} tokens"
    assert numbers[1].endswith("tokens/s")
    assert numbers[2].startswith("first after ")
    assert numbers[3] == f"{length // 2} of {length} prompt tokens cached"
    assert "What does\nos.path.join do?<|im_end|>" in prompts(server, tokenizer)[0]
    page.reload()  # the conversation is kept in the tab
    expect(answers(page).locator(".prose").last).to_have_text(TEXT)
    page.get_by_role("button", name="New chat").click()
    expect(answers(page)).to_have_count(0)


def test_a_model_without_a_chat_template_says_so(serve, window, expect):
    server = serve(TEXT)
    tokenizer = chat_tokenizer(None)
    server.stage.state.async_llm.input_processor.tokenizer = tokenizer
    page = window(server.url)
    expect(page.get_by_placeholder("This model has no chat template: it serves /v1/completions only")).to_be_disabled()
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    page.get_by_role("tab", name="Model").click()
    expect(page.get_by_text("/v1/completions", exact=False).first).to_be_visible()
    tokenizer.close()


def test_stop_ends_the_answer_and_go_on_continues_it(serve, window, expect, tokenizer, wait_for):
    ids = tokenizer.encode(" one two three four five six seven eight" * 12, add_special_tokens=False)
    server = serve(lambda request: ids, delay_s=0.1)
    page = window(server.url)
    ask(page, "Count")
    expect(page.locator(".word").nth(2)).to_be_visible()  # long before the end: it streams
    expect(page.locator("li.assistant")).to_have_attribute("aria-busy", "true")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("stopped", exact=True)).to_be_visible()
    wait_for(lambda: server.stage.engine.aborted)
    shown = answers(page).locator(".prose").last.text_content()
    assert text_of(tokenizer, ids).startswith(shown)
    assert len(shown) < len(text_of(tokenizer, ids))
    server.stage.engine.delay_s = 0.0
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_text("2 / 2")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert prompts(server, tokenizer)[1].endswith(f"<|im_start|>assistant\n{shown}")
    assert answers(page).locator(".prose").last.text_content().startswith(shown)


@pytest.mark.soak
def test_an_edited_question_and_another_answer_are_branches(serve, window, expect, tokenizer):
    replies = iter([" first", " second", " third"])
    server = serve(lambda request: tokenizer.encode(next(replies), add_special_tokens=False))
    page = window(server.url)
    ask(page, "Old question")
    expect(answers(page)).to_contain_text("first")
    page.get_by_role("button", name="Try again").click()
    expect(answers(page)).to_contain_text("second")
    page.get_by_role("listitem", name="You").get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("New question")
    page.get_by_label("Edit the message").press("Enter")
    expect(answers(page)).to_contain_text("third")
    assert [prompt.count("New question") for prompt in prompts(server, tokenizer)] == [0, 0, 1]
    assert "Old question" not in prompts(server, tokenizer)[2]
    question = page.get_by_role("listitem", name="You")
    question.get_by_role("button", name="Branch before").click()  # its last answer comes along
    expect(page.locator(".bubble")).to_have_text("Old question")
    expect(answers(page)).to_contain_text("second")
    answers(page).get_by_role("button", name="Branch before").click()
    expect(answers(page)).to_contain_text("first")


@pytest.mark.soak
def test_a_word_shows_its_alternatives_and_one_of_them_goes_on(serve, window, expect, tokenizer):
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    server = serve(lambda request: ids if len(server.stage.engine.requests) == 1 else ids[-3:])
    page = window(server.url)
    ask(page, "Hi")
    expect(answers(page).locator(".numbers")).to_contain_text("cached")
    page.locator(".word").nth(3).hover()
    menu = page.get_by_role("menu")
    expect(menu.get_by_role("menuitem")).to_have_count(5)
    expect(menu.get_by_role("menuitem").first).to_have_class("taken")
    expect(menu.locator(".percent").all()[0]).to_have_text("61 %")  # exp(-0.5)
    usable = menu.locator("button:not([disabled])").first
    number = int(page.locator(".word.open").get_attribute("data-token"))
    index = menu.get_by_role("menuitem").all_inner_texts().index(usable.inner_text())
    usable.click()
    expect(page.get_by_text("2 / 2")).to_be_visible()
    expect(answers(page).locator(".numbers")).to_contain_text("cached")
    before = text_of(tokenizer, [*ids[:number], ids[number] + index])
    assert prompts(server, tokenizer)[1].endswith(f"<|im_start|>assistant\n{before}")
    expect(answers(page).locator(".prose").last).to_have_text(before + text_of(tokenizer, ids[-3:]))
    expect(page.locator(".word.chosen")).to_have_count(1)


@pytest.mark.soak
def test_the_keyboard_reaches_the_alternatives(serve, window, expect):
    page = window(serve(TEXT).url)
    ask(page, "Hi")
    expect(answers(page).locator(".numbers")).to_contain_text("cached")
    page.get_by_role("group", name="Text of the answer").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.locator(".word.open")).to_have_attribute("data-token", "2")
    expect(page.locator("#announcer")).to_contain_text("alternatives")
    page.keyboard.press("Enter")
    expect(page.locator(".menu button:focus")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.get_by_role("menu")).to_have_count(0)
    page.get_by_role("tab", name="Chat").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="State")).to_be_focused()
    expect(page.get_by_role("tabpanel", name="State")).to_be_visible()


def test_output_of_the_model_never_runs_as_code(serve, window, expect):
    for thinking in ("", EVIL):
        server = serve(EVIL)
        page = window(server.url)
        ask(page, EVIL + thinking)
        expect(answers(page).locator(".numbers")).to_contain_text("cached")
        expect(page.locator("main img, main script, main svg[onload], main b, main i, main u")).to_have_count(0)
        links = answers(page).locator(".prose a").evaluate_all("links => links.map(link => [link.href, link.rel])")
        assert [address for address, _ in links] == ["http://198.51.100.7/pixel.png", "https://example.org/a_b"]
        assert all("noopener" in rel and "noreferrer" in rel for _, rel in links)
        assert page.evaluate("window.harmed") is None
        assert {address.split("/")[2] for address in page.window.addresses} == {server.url.split("/")[2]}
        assert "<script>window.harmed = 1</script>" in answers(page).inner_text()


def test_markup_from_text_is_refused_by_the_policy_itself(serve, browser, wait_for):
    other = browsers.Window(browser)
    page = other.open(serve(TEXT).url)
    script = "const s = document.createElement('script'); s.textContent = 'window.harmed = 1'; document.body.append(s)"
    for code in ("document.body.innerHTML = '<p>'", script, "document.body.setAttribute('onclick', 'harmed = 1')"):
        assert page.evaluate(f"() => {{ try {{ {code}; return 'done' }} catch {{ return 'refused' }} }}") == "refused"
    page.evaluate("() => { const i = new Image(); i.src = 'http://198.51.100.7/x.png'; document.body.append(i) }")
    page.get_by_role("tab", name="State").click()
    assert page.evaluate("window.harmed") is None
    assert any("img-src" in fault for fault in other.faults)
    other.context.close()


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(serve, window, expect):
    server = serve(TEXT, api_key=("right",))
    page = window(server.url)
    expect(page.get_by_role("dialog", name="This server requires a key")).to_be_visible()
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Use this key").click()
    expect(page.get_by_text("The server does not accept this key.")).to_be_visible()
    page.get_by_label("API key").fill("right")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_have_count(0)
    ask(page, "Hi")
    expect(answers(page)).to_contain_text("Join two")
    stored = page.evaluate("[{...localStorage}, document.cookie, {...sessionStorage}['oarlock-key'], location.href]")
    assert stored[:3] == [{}, "", '"right"']
    assert re.fullmatch(rf"{server.url}/#/chat/\w+", stored[3])
    again = page.context.new_page()  # another tab asks again
    again.goto(server.url)
    expect(again.get_by_role("dialog")).to_be_visible()
    again.get_by_role("button", name="Not now").click()
    ask(again, "Hi")
    again.get_by_label("API key").fill("right")
    again.keyboard.press("Enter")
    expect(answers(again)).to_contain_text("Join two")  # the question was not lost


@pytest.mark.soak
def test_a_server_that_goes_and_comes_back(serve, window, expect):
    server = serve(TEXT)
    page = window(server.url)
    expect(page.locator("#status")).to_have_text("ready")
    server.stop()
    ask(page, "Are you there?")
    expect(answers(page)).to_contain_text("The server does not respond.")
    expect(page.locator("#banner")).to_contain_text("nothing you wrote is lost")
    serve(TEXT, port=server.port)
    expect(page.locator("#banner")).to_be_hidden()
    page.get_by_role("button", name="Try again").click()
    expect(answers(page)).to_contain_text("Join two")


def test_an_answer_that_is_cut_off_can_go_on(serve, window, expect, tokenizer):
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    came: list[int] = []  # how many tokens came through: four, or fewer where a busy server sent the fifth along
    passed_on, shown = threading.Event(), threading.Event()

    def cut(app):
        async def pass_on(scope, receive, send):
            seen = 0

            async def send_some(message):
                nonlocal seen
                if not came and scope["method"] == "POST":
                    tokens = message.get("body", b"").count(b'"content":[{')
                    if seen + tokens > 4:
                        came.append(seen)
                        passed_on.set()
                        await anyio.to_thread.run_sync(shown.wait)  # a failed stream drops what a page has not read
                        raise ConnectionError("cut")
                    seen += tokens
                await send(message)

            await app(scope, receive, send_some)

        return pass_on

    def text(request):
        return ids if len(server.stage.engine.requests) == 1 else ids[came[0] :]

    server = serve(text, around=cut, delay_s=0.02)
    page = window(server.url)
    ask(page, "Hi")
    try:
        assert passed_on.wait(60) and came[0] > 0
        expect(answers(page).locator(".prose").last).to_have_text(text_of(tokenizer, ids[: came[0]]))
    finally:
        shown.set()
    expect(answers(page)).to_contain_text("the connection was lost")
    expect(answers(page).locator(".prose").last).to_have_text(text_of(tokenizer, ids[: came[0]]))
    page.get_by_role("button", name="Continue").click()
    expect(answers(page).locator(".prose").last).to_have_text(TEXT)
    assert prompts(server, tokenizer)[1].endswith(text_of(tokenizer, ids[: came[0]]))


@pytest.mark.soak
def test_an_engine_that_dies_leaves_its_records(serve, window, expect):
    page = window(serve(TEXT, die_after=4).url)
    ask(page, "Hi")
    expect(answers(page).locator(".problem")).to_contain_text("The engine has stopped")
    expect(answers(page).locator(".prose").last).to_contain_text("Join")
    expect(page.get_by_role("button", name="Continue")).to_be_enabled()


def test_errors_name_the_field_and_the_settings_are_sent(serve, window, expect, tokenizer):
    known = threading.Event()

    def late(app):
        async def wait(scope, receive, send):
            if scope.get("path") == "/v1/capabilities":
                await anyio.to_thread.run_sync(known.wait)
            await app(scope, receive, send)

        return wait

    server = serve(TEXT, around=late)
    page = window(server.url)
    page.get_by_role("button", name="Settings").click()
    panel = page.get_by_role("complementary", name="Settings")
    panel.get_by_label("System prompt").fill("Be brief.")
    panel.get_by_label("Temperature").fill("3")
    expect(panel.get_by_label("Temperature")).to_have_attribute("aria-invalid", "false")
    known.set()  # the ranges come after somebody began to type
    expect(panel.get_by_label("Temperature")).to_have_attribute("aria-invalid", "true")
    panel.get_by_label("Temperature").fill("0,5")
    panel.get_by_label("Longest answer").fill("4")
    panel.get_by_label("Model").select_option("alias/with/slash")
    panel.get_by_label("More parameters").fill('{"min_tokens": 9}')
    ask(page, "Hi")
    expect(answers(page)).to_contain_text("min_tokens")
    assert server.stage.engine.requests == []
    panel.get_by_label("More parameters").fill("")
    page.get_by_role("button", name="Try again").click()
    expect(answers(page).locator(".numbers")).to_contain_text("the token limit ended it")
    params = server.stage.engine.requests[0].params
    assert (params.temperature, params.max_tokens) == (0.5, 4)
    assert "system\nBe brief." in prompts(server, tokenizer)[0]


@pytest.mark.soak
def test_reasoning_is_folded_and_calls_are_shown_and_answered(serve, window, expect):
    tokenizer = chat_tokenizer(templates.QWEN)
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "<b>é</b>"}}\n</tool_call>'
    replies = [f"<think>\nI look it up.\n</think>\n\nOne moment.\n{call}", "<think>\nGood.\n</think>\n\nIt is **42**."]
    ids = [tokenizer.encode(reply, add_special_tokens=False) for reply in replies]
    server = serve(lambda request: ids[min(1, len(server.stage.engine.requests) - 1)])
    server.stage.state.async_llm.input_processor.tokenizer = tokenizer
    page = window(server.url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools").fill(json.dumps(TOOLS))
    page.get_by_role("button", name="Settings").click()
    ask(page, "What is it?")
    expect(page.get_by_label("Result of f")).to_be_visible()
    expect(page.get_by_text("I look it up.")).to_be_hidden()
    page.get_by_text("Reasoning", exact=True).click()
    expect(page.get_by_text("I look it up.")).to_be_visible()
    expect(page.locator(".call")).to_contain_text('"a": "<b>é</b>"')
    page.get_by_label("Result of f").fill("forty-two")
    page.get_by_role("button", name="Send result").click()
    expect(page.locator("strong", has_text="42")).to_be_visible()
    assert "forty-two" in prompts(server, tokenizer)[1]
    assert "I look it up" in prompts(server, tokenizer)[1]
    page.locator("li.assistant").last.locator(".word", has_text="4").first.hover()  # behind thoughts, too
    page.locator(".menu button:not([disabled])").first.click()
    expect(page.get_by_text("2 / 2")).to_be_visible()
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    assert "Good." in prompts(server, tokenizer)[2].rsplit("assistant", 1)[1]
    tokenizer.close()


@pytest.mark.soak
def test_it_works_below_a_path_of_a_proxy(serve, window, expect):
    def below(app):
        async def strip(scope, receive, send):
            assert scope["path"].startswith("/llm/"), scope["path"]
            await app({**scope, "path": scope["path"].removeprefix("/llm")}, receive, send)

        return strip

    page = window(serve(TEXT, around=below).url, "/llm/")
    ask(page, "Hi")
    expect(answers(page)).to_contain_text("Join two")
    page.get_by_role("tab", name="Model").click()
    expect(page.get_by_text("/llm/v1/chat/completions")).to_be_visible()


def test_the_model_and_its_limits(serve, window, expect):
    page = window(serve(TEXT).url, "/#/model")
    panel = page.get_by_role("tabpanel", name="Model")
    expect(panel.get_by_role("heading", name="demo", exact=True)).to_be_visible()
    for text in ("also called alias/with/slash", "Qwen2ForCausalLM", "8,900,000", "4,096 tokens", "int8"):
        expect(panel.get_by_text(text).first).to_be_visible()


@pytest.mark.soak
@pytest.mark.parametrize("width", [340, 1200])
def test_it_fits_its_window_and_everything_has_a_name(serve, window, expect, width):
    page = window(serve(f"{TEXT}\n\n```\n{'x' * 400}\n```\n").url, viewport={"width": width, "height": 700})
    ask(page, "y" * 300)
    expect(answers(page).locator(".numbers")).to_contain_text("cached")
    for view in ("Chat", "State", "Model"):
        page.get_by_role("tab", name=view).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
    page.get_by_role("tab", name="Chat").click()
    page.get_by_role("button", name="Settings").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    controls = re.findall(
        r"""^ *- '?(?:button|textbox|searchbox|tab|tabpanel|checkbox|combobox|link|dialog|menuitem)\b.*""",
        page.locator("body").aria_snapshot(),  # as screen readers are told
        re.MULTILINE,
    )
    assert len(controls) > 20
    assert [control for control in controls if not re.search(r'[a-z] "[^"]', control)] == []


@pytest.mark.soak
def test_dark_and_light(serve, window):
    url = serve(TEXT).url
    shade = "getComputedStyle(document.documentElement).backgroundColor"
    dark, light = window(url, color_scheme="dark"), window(url, color_scheme="light")
    assert dark.evaluate(shade) == "rgb(20, 23, 26)"
    assert light.evaluate(shade) == "rgb(250, 249, 246)"
    light.get_by_role("button", name="Theme").click()
    light.get_by_role("button", name="Theme: light").click()
    assert light.evaluate(shade) == "rgb(20, 23, 26)"
    light.reload()  # the choice is kept
    light.get_by_role("button", name="Theme: dark").wait_for()
    assert light.evaluate(shade) == "rgb(20, 23, 26)"
