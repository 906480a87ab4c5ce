"""Settings of the web page in a real browser: reasons, marks, presets, schemas, tools, programs; and comparing."""

import json
import os
import subprocess
import sys

import pytest

from tests.contract.browsers import answers, ask

pytestmark = pytest.mark.soak

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WRONG = {  # label -> what is typed, the reason, what is right, and what it becomes in the request
    "Temperature": ("warm", "Not a number.", "0,5", {"temperature": 0.5}),
    "Top p": ("1.5", "At most 1", "0.9", {"top_p": 0.9}),
    "Longest answer": ("4.5", "An integer.", "40", {"max_completion_tokens": 40}),
    "JSON schema of the answer": (
        "[1]",
        "A schema is an object",
        json.dumps(SCHEMA),
        {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
    ),
    "Tools": (
        '{"parameters": {}}',
        "Tool 1 has no name",
        '{"name": "f", "parameters": {"type": "object"}}',
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
    ),
    "More parameters": ("{", "Not JSON", '{"min_tokens": 1}', {"min_tokens": 1}),
}


def panel_of(page):
    page.get_by_role("button", name="Settings").click()
    return page.get_by_role("complementary", name="Settings")


def test_they_name_the_fault_and_what_is_changed(serve, window, expect):
    page = window(serve("x").url)
    expect(page.get_by_role("heading", name="demo")).to_be_visible()
    panel = panel_of(page)
    for label, (wrong, why, right, _) in WRONG.items():
        field = panel.get_by_label(label)
        field.fill(wrong)
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(panel.locator(f"#{field.get_attribute('aria-describedby')}")).to_contain_text(why)
        field.fill(right)
        expect(field).to_have_attribute("aria-invalid", "false")
    panel.get_by_label("System prompt").fill("Be brief.")
    expect(page.locator("#settings-button")).to_have_attribute("aria-label", f"Settings, {len(WRONG) + 1} changed")
    expect(panel.locator(".changed")).to_have_count(len(WRONG) + 1)
    panel.get_by_label("Name of the preset").fill("Brief")
    panel.get_by_role("button", name="Save").click()
    panel.get_by_role("button", name="Reset to the server's defaults").click()
    expect(page.locator("#settings-button")).to_have_attribute("aria-label", "Settings")
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    other = page.context.new_page()  # presets stay, settings are the tab's
    other.goto(page.url)
    panel = panel_of(other)
    expect(panel.get_by_label("System prompt")).to_have_value("")
    panel.get_by_label("Preset", exact=True).select_option("Brief")
    expect(panel.get_by_label("System prompt")).to_have_value("Be brief.")
    sent = other.evaluate("""async () => {
        const { requestFields } = await import('/static/settings_fields.js');
        return requestFields(JSON.parse(sessionStorage['oarlock-settings']), {});
    }""")
    expected = {name: value for *_, fields in WRONG.values() for name, value in fields.items()}
    assert sent == expected | {"logprobs": True, "top_logprobs": 5}
    panel.get_by_role("button", name="Delete").click()
    expect(panel.get_by_label("Preset", exact=True).locator("option")).to_have_count(1)
    panel.get_by_role("button", name="Close").click()
    expect(panel).to_be_hidden()


def test_the_request_as_programs_runs(serve, window, expect, tokenizer):
    server = serve("Read.")
    page = window(server.url)
    expect(page.get_by_role("heading", name="demo")).to_be_visible()
    panel = panel_of(page)
    panel.get_by_label("Temperature").fill("0.25")
    panel.get_by_label("More parameters").fill('{"min_tokens": 0}')
    ask(page, 'It\'s "quoted" \\ é')
    expect(answers(page).locator(".numbers")).to_contain_text("cached")
    page.get_by_label("Message").fill("And now?")
    panel.get_by_role("button", name="As code").click()
    dialog = page.get_by_role("dialog", name="The request as code")
    texts = {}
    for language in ("curl", "Python", "JavaScript"):
        dialog.get_by_role("button", name=language, exact=True).click()
        texts[language] = dialog.locator("code").text_content()
    dialog.get_by_role("button", name="Close").click()
    environment = os.environ | {"no_proxy": "127.0.0.1"}
    shell = subprocess.run(texts["curl"], shell=True, capture_output=True, text=True, timeout=60, env=environment)
    assert json.loads(shell.stdout)["choices"][0]["message"]["content"] == "Read."
    python = subprocess.run([sys.executable, "-c", texts["Python"]], capture_output=True, text=True, env=environment)
    assert python.stdout == "Read.\n", python.stderr
    said = page.evaluate(
        f"async () => {{ const lines = []; const console = {{ log: (line) => lines.push(line) }};"
        f"{texts['JavaScript']} return lines; }}"
    )
    assert said == ["Read."]
    first, *others = server.stage.engine.requests[1:]
    assert all(other.prompt_token_ids == first.prompt_token_ids for other in others)
    prompt = tokenizer.backend.decode(first.prompt_token_ids, False)
    assert 'It\'s "quoted" \\ é' in prompt and "Read." in prompt and "And now?" in prompt
    assert [request.params.temperature for request in server.stage.engine.requests] == [0.25] * 4


def test_two_servers_answer_side_by_side(serve, window, expect, tokenizer):
    reply = {0.0: "The same beginning, and one end.", 1.0: "The same beginning, but another."}
    ids = {temperature: tokenizer.encode(text, add_special_tokens=False) for temperature, text in reply.items()}
    here = serve(lambda request: ids[request.params.temperature])
    there = serve(lambda request: ids[1.0], allowed_origins=(here.url,), api_key=("theirs",))
    page = window(here.url, "/compare")
    page.get_by_label("Question", exact=True).fill("Say it")
    a, b = page.get_by_role("region", name="A", exact=True), page.get_by_role("region", name="B", exact=True)
    a.get_by_label("Temperature").fill("0")
    b.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Ask both").click()
    expect(page.locator("#verdict")).to_have_text("Both answers are the same.")
    expect(a.get_by_text("demo", exact=True)).to_be_visible()
    expect(page.get_by_role("note", name="Colours of probabilities")).to_have_count(1)
    b.get_by_label("Server").fill(there.url)
    page.get_by_role("button", name="Ask both").click()
    expect(b.get_by_role("alert")).to_contain_text("API key")
    b.get_by_label("Its API key").fill("theirs")
    page.get_by_role("button", name="Ask both").click()
    expect(page.locator("#verdict")).to_contain_text("They are the same for 20 characters")
    expect(b.locator(".prose")).to_have_text(reply[1.0])
    expect(page.locator(".word.chosen")).to_have_count(2)
    assert len(there.stage.engine.requests) == 1
    page.get_by_label("Text", exact=True).fill("How likely is 😀 this?")
    page.get_by_role("button", name="Score").click()
    expect(page.locator("#score-verdict")).to_contain_text("Perplexity")
    expect(page.locator("#score")).to_have_text("How likely is 😀 this?")
