"""The introduction beside a model: read within limits, reported and left out if it cannot be used."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from oarlock.server.llm import introduction
from oarlock.server.llm.introduction import FILE, MAX_FILE_BYTES, MAX_QUESTIONS, Introduction

DEMO = Path(__file__).resolve().parents[4] / "models" / "oarlock-demo"


def load(folder: Path, content: str | bytes) -> Introduction:
    (folder / FILE).write_bytes(content.encode() if isinstance(content, str) else content)
    return Introduction.load(folder)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"about": " It counts. ", "questions": ["What is 1 + 1?"]}, Introduction("It counts.", ("What is 1 + 1?",))),
        ({"about": None, "questions": []}, Introduction()),
        ({"questions": ["¿Qué?"], "icon": "a.png"}, Introduction(None, ("¿Qué?",))),
        ({}, Introduction()),
    ],
)
def test_sentences_and_questions_are_read(tmp_path, values, expected):
    assert load(tmp_path, json.dumps(values)) == expected


def test_a_model_without_the_file_has_no_introduction(tmp_path):
    assert Introduction.load(tmp_path) == Introduction()
    assert Introduction.load(tmp_path / "none" / "such") == Introduction()


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "null",
        b"\xff\xfe",
        "[" * 100_000,
        json.dumps({"about": 7}),
        json.dumps({"about": "x" * 401}),
        json.dumps({"about": ""}),
        json.dumps({"questions": "What?"}),
        json.dumps({"questions": [None]}),
        json.dumps({"questions": ["  "]}),
        json.dumps({"questions": ["x" * 201]}),
        json.dumps({"questions": ["x"] * (MAX_QUESTIONS + 1)}),
        json.dumps({"questions": ["two\nlines"]}),
        json.dumps({"about": "\x1b[2Jcleared"}),
        json.dumps({"about": "reversed \u202etxt.exe"}),
        json.dumps({"about": "x"}) + " " * MAX_FILE_BYTES,
    ],
)
def test_a_file_that_cannot_be_used_is_reported_and_left_out(tmp_path, caplog, content):
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, content) == Introduction()
    (record,) = caplog.records
    assert record.name == introduction._log.name
    assert "introduction_ignored" in record.getMessage() and FILE in record.getMessage()


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_a_folder_a_pipe_and_a_device_are_reported(tmp_path, caplog, make):
    make(tmp_path / FILE)
    with caplog.at_level(logging.WARNING):
        assert Introduction.load(tmp_path) == Introduction()
    assert len(caplog.records) == 1


def test_the_demo_model_says_what_it_is_and_asks_what_it_knows():
    found = Introduction.load(DEMO)
    assert found.about and "docstrings" in found.about
    assert len(found.questions) == 4
