"""Every page is Markdown that a reader sees as it was meant. Each rule is shown to fail on a planted mistake."""

from pathlib import Path

import pytest

from tests.house import markdown
from tests.house.rules import ROOT

PAGES = markdown.pages()


def test_the_pages_are_there():
    names = {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert {"README.md", "docs/offline.md", "tests/load/README.md", "models/oarlock-demo/README.md"} <= names
    assert len(names) > 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_page_is_broken(page):
    text = page.read_text("utf-8")
    assert markdown.faults(text) + markdown.link_faults(page, text) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("* A list:\n\n  | a | b | |---|---| | one | two |\n  | three |\n", "a table was wrapped"),
        ("| a | b | |---|---|\n| 1 | 2 |\n", "a table was wrapped"),
        ("Text.\n| a | b |\n", "a row of a table is text"),
        ("| a | b |\n|---|---|\n| 1 | 2 | 3 |\n", "a row has 3 cells"),
        ("| a | b |\n|---|---|\n| `x|y` | 2 |\n", "a row has 3 cells"),
        ("| a | b |\n|---|---|\n| 1 |\n", "a row has 1 cells"),
        ("Some text. ## Usage\n", "a heading is inside"),
        ("#Usage\n", "a heading is inside"),
        ("Items: * one * two\n", "an item of a list"),
        ("A sum of 3\n- 4 and more\n", "a list begins"),
        ("It has\n1. step\n", "a list begins"),
        ("```bash\nmake\n", "a code fence is not closed"),
        ("```bash\nmake\n``\n", "a code fence is not closed"),
        ("Run ```bash\nmake\n```\n", "a code fence is"),
        ("See [the page] (x.md) and [it](a b.md).\n", "a link is text"),
    ],
)
def test_each_rule_can_fail(text, fault):
    assert [found for found in markdown.faults(text) if fault in found] != []


@pytest.mark.parametrize(
    "text",
    [
        "| a | b |\n|---|---|\n| 1 | `x \\| y` |\n",
        "* one\n* two\n\n  | a |\n  |---|\n  | 1 |\n",
        "Text.\n\n* a\n  * b\n",
        "A product: `a * b`, and a | b.\n",
        "````md\n```\n````\n",
        "> ```\n> quoted\n> ```\n",
        "C# and #1 and `## x`.\n",
        "| a |\n|---|\n| activation(gate) * up |\n",
    ],
)
def test_what_is_right_passes(text):
    assert markdown.faults(text) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[x](nowhere.md)", "does not exist"),
        ("![x](nowhere.png)", "does not exist"),
        ("[x](docs/api.md#nothing)", "no heading"),
        ("# A\n\n[x](#b)", "no heading"),
        ("[docs/api.md](docs/embeddings.md)", "leads to"),
        ("[`api.md`](docs/embeddings.md)", "leads to"),
        ("[configs/](docs/)", "leads to"),
        ("[Dockerfile](Makefile)", "leads to"),
    ],
)
def test_a_link_can_be_wrong(text, fault):
    (found,) = markdown.link_faults(ROOT / "README.md", text)
    assert fault in found


@pytest.mark.parametrize(
    "text",
    [
        "[x](https://example.org/#y)",
        "[docs/api.md](docs/api.md)",
        "[api.md](docs/api.md)",
        "[docs/](docs/README.md)",
        "[configs/](configs)",
        "# A `b`, c_d\n\n[x](#a-b-c_d)",
        "# A\n\n# A\n\n[x](#a-1)",
        "[the API](docs/embeddings.md)",
    ],
)
def test_a_right_link_passes(text):
    assert markdown.link_faults(Path(ROOT / "README.md"), text) == []
