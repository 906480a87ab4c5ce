"""Commit subjects have a scope and at most 72 characters, and bodies give the reason."""

import pytest

from tests.house.commit_message import faults, main

BODY = "\n\nDrafts take rows that prompts need.\n"


@pytest.mark.parametrize(
    "message",
    [
        f"scheduler: cap drafts while prompts wait{BODY}",
        f"docs, tests: follow the new names{BODY}",
        f"scheduler: {'a ' * 30}b{BODY}",
        "Merge branch 'main'",
        f"kernels: `multiply` takes strides{BODY}# a comment of git\n",
    ],
)
def test_a_good_message_passes(message):
    assert faults(message) == []


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (f"Cap drafts while prompts wait{BODY}", "scope"),
        (f"scheduler: Cap drafts{BODY}", "scope"),
        (f"scheduler: drafts{BODY}", "scope"),
        (f"scheduler: cap {'drafts ' * 10}{BODY}", "85 characters"),
        (f"scheduler: cap drafts.{BODY}", "full stop"),
        ("scheduler: cap drafts\n", "body is missing"),
        ("scheduler: cap drafts\nDrafts take rows.\n", "must be empty"),
        ("", "scope"),
    ],
)
def test_a_bad_message_is_refused(message, fault, tmp_path, capsys):
    (tmp_path / "message").write_text(message)
    assert main(str(tmp_path / "message")) == 1
    assert fault in capsys.readouterr().out
