"""Markdown of the web page, in the browser: what becomes of it, whole and streamed, and where each text stands."""

import pytest

from tests.contract import browsers

pytestmark = pytest.mark.slow

BOX = '<input type="checkbox" disabled=""'
DONE = f'{BOX} checked="" aria-label="Done">'
CASES = {
    "plain *em* **strong** ***both*** ~~gone~~": "<p>plain <em>em</em> <strong>strong</strong> "
    "<strong><em>both</em></strong> <del>gone</del></p>",
    "snake_case_name and 2 * 3 * 4 and _em_": "<p>snake_case_name and 2 * 3 * 4 and <em>em</em></p>",
    "`a*b*` ``x`y`` `open": "<p><code>a*b*</code> <code>x`y</code> `open</p>",
    r"\*no\* \\ 1 \. **open": r"<p>*no* \ 1 . **open</p>",
    "# One\n## Two ##\nthree": "<h2>One</h2><h3>Two</h3><p>three</p>",
    "a\n\nb\nc": "<p>a</p><p>b\nc</p>",
    "- a\n- b\n  - c\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>",
    "3. a\n4. b\n\ntext": '<ol start="3"><li>a</li><li>b</li></ol><p>text</p>',
    "> a *b\n> c*\n\nd": "<blockquote><p>a <em>b\nc</em></p></blockquote><p>d</p>",
    "a\n***\nb": "<p>a</p><hr><p>b</p>",
    "```py\nx = 1  # *no*\n\n  y\n```\nafter": '<pre tabindex="0"><code>x = 1  # *no*\n\n  y</code></pre><p>after</p>',
    "1. a\n   ```\n   code\n   ```\n2. b": '<ol><li>a<pre tabindex="0"><code>code</code></pre></li><li>b</li></ol>',
    "|a|b|\n|:-:|--:|\n|1|`x`|\n|2|": '<table><thead><tr><th class="center">a</th><th class="right">b</th></tr></thead>'
    '<tbody><tr><td class="center">1</td><td class="right"><code>x</code></td></tr>'
    '<tr><td class="center">2</td></tr></tbody></table>',
    "[a *b*](https://x.org/y_z) <https://x.org> http://x.org/a_b.": "<p>[a <em>b</em> @ https://x.org/y_z] "
    "[https://x.org @ https://x.org/] [http://x.org/a_b @ http://x.org/a_b].</p>",
    "[a](javascript:b) ![c](ftp://d) [e](/f)": "<p>[a](javascript:b) ![c](ftp://d) [e](/f)</p>",
    "<b>&amp;</b>": "<p>&lt;b&gt;&amp;amp;&lt;/b&gt;</p>",
    "a|b\nc": "<p>a|b\nc</p>",
    "a<br>b<br/>c<BR />d <brx>": "<p>a<br>b<br>c<br>d &lt;brx&gt;</p>",
    "a\\\nb\\": "<p>a\nb\\</p>",
    "H<sub>2</sub>O e<sup>*x*</sup> <sub>a <sup></sup> <sub class=x>b": "<p>H<sub>2</sub>O e<sup><em>x</em></sup> "
    "&lt;sub&gt;a &lt;sup&gt;&lt;/sup&gt; &lt;sub class=x&gt;b</p>",
    "- [ ] a\n- [x] *b*\n  1. [X] c\n- [y] d\n- [ ]e": f'<ul><li class="task">{BOX} aria-label="Not done"> a</li>'
    f'<li class="task">{DONE} <em>b</em><ol><li class="task">{DONE} c</li></ol></li><li>[y] d</li><li>[ ]e</li></ul>',
    "| a |\n|---|\n| b<br>c |": "<table><thead><tr><th>a</th></tr></thead>"
    "<tbody><tr><td>b<br>c</td></tr></tbody></table>",
}
# What the page adds around code and tables is left out; links show where they lead.
SHOWN = """async ([base, cases]) => {
    const { Markdown } = await import(`${base}/static/markdown.js`);
    const show = (pieces, parts) => {
        const target = document.createElement('div');
        const markdown = new Markdown(target, pieces);
        for (const part of parts) markdown.update(part);
        for (const head of target.querySelectorAll('.code-head')) head.remove();
        for (const box of target.querySelectorAll('.code, .table')) box.replaceWith(...box.childNodes);
        for (const link of target.querySelectorAll('a')) link.replaceWith('[', ...link.childNodes, ` @ ${link.href}]`);
        return target.innerHTML.replaceAll(/<!---->/g, '');
    };
    return cases.map((text) => {
        const wrong = [];
        const checked = (piece, offsets) => {
            const fits = [...Array(piece.length).keys()].every((at) => text[offsets[at]] === piece[at]);
            if (!fits || offsets.length !== piece.length) wrong.push([piece, offsets]);
            return [piece];
        };
        const prefixes = [...Array(text.length).keys()].map((end) => text.slice(0, end + 1));
        return [show(checked, [text]), show((piece) => [piece], prefixes), wrong];
    });
}"""
LONG = (
    "*a " * 30_000,
    "[" * 30_000,
    "`" * 30_000 + "a",
    "> " * 5_000,
    "- " * 5_000,
    "**a*" * 20_000,
    "_a" * 30_000,
    "<sub>" * 30_000,
    "- [ ] " * 5_000,
)


def test_markdown_is_rendered_as_expected(make_server, browser):
    server = make_server("")
    window = browsers.Window(browser)
    page = window.open(server.url)
    shown = page.evaluate(SHOWN, [server.url, list(CASES)])
    for (text, expected), (whole, streamed, wrong) in zip(CASES.items(), shown, strict=True):
        assert (whole, streamed, wrong) == (expected, expected, []), text
    assert window.faults == []


def test_hostile_texts_end(make_server, browser):
    """Each within the test's time: none takes time that grows with the square of its length."""
    server = make_server("")
    page = browsers.Window(browser).open(server.url)
    code = """async ([base, text]) => {
        const { Markdown } = await import(`${base}/static/markdown.js`);
        const target = document.createElement('div');
        new Markdown(target).update(text);
        return target.textContent.length;
    }"""
    for text in LONG:
        page.evaluate(code, [server.url, text])
