"""Files of requests and answers: what of them is in memory, and who parses their lines."""

from __future__ import annotations

import json
import os
import tracemalloc

import pytest

from oarlock.server.endpoints.batches.batch_file import OutputFile, RequestFile
from oarlock.server.http import large_body
from oarlock.server.http.large_body import LargeBodies
from oarlock.server.schemas.batches import MAX_CUSTOM_ID, WrongBatchError, read_line


def _line(custom_id, **body):
    url = "/v1/completions"
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"prompt": "x"}}) + "\n"


@pytest.mark.parametrize(
    ("line", "code", "problem"),
    [
        (_line("x" * (MAX_CUSTOM_ID + 1)), "custom_id_too_long", "513 characters; at most 512 are allowed"),
        (_line("\ud800"), "invalid_custom_id", "not a string"),
        ('{"custom_id": "a", "custom_id": "b"}', "invalid_json_line", "each name once"),
        (_line("a").rstrip() + "{}", "invalid_json_line", "Extra data"),
        ("{,}", "invalid_json_line", "name of a member"),
        ('{"a"}', "invalid_json_line", "name of a member"),
        ('{"a": 1 "b": 2}', "invalid_json_line", "delimiter"),
        (_line("a").rstrip()[:-1] + ",}", "invalid_json_line", "not valid JSON"),
        ("{}", "missing_member", "no 'custom_id'"),
        ("[" * 100_000, "invalid_json_line", "not valid JSON"),
        ('"text"', "invalid_json_line", "not a JSON object"),
    ],
)
def test_wrong_lines_are_named(line, code, problem):
    with pytest.raises(WrongBatchError, match=problem) as wrong:
        read_line(line.encode(), 7, "the file")
    assert wrong.value.code == code and wrong.value.line == 7 and wrong.value.cause.startswith("Line 7 of the file ")


def test_a_body_is_kept_as_it_was_written():
    body = '{"prompt": "a",\t"prompt": 1e400}'
    line = (
        f' {{"custom_id": "é{"x" * (MAX_CUSTOM_ID - 1)}", "method": "POST", "url": "/v1/completions", "body": {body}}} '
    )
    assert read_line(line.encode(), 1, "f").body == body.encode()


@pytest.mark.slow
def test_long_lines_are_parsed_by_the_process(monkeypatch):
    parsed_here = []
    monkeypatch.setattr(
        large_body, "read_line", lambda line, *where: parsed_here.append(len(line)) or read_line(line, *where)
    )
    long = _line("a", prompt="x", junk=[[]] * 200_000).encode()
    bodies = LargeBodies()
    try:
        for number, line in enumerate((long, long.replace(b"POST", b"GET"), long[:-9], _line("b").encode())):
            outcomes = []
            for read in (read_line, bodies.read_line):
                try:
                    outcomes.append(read(line, number, "f"))
                except WrongBatchError as error:
                    outcomes.append((error.cause, error.fix, error.line, error.code))
            assert outcomes[0] == outcomes[1]
    finally:
        bodies.close()
    assert parsed_here == [len(_line("b"))]


@pytest.mark.slow
def test_only_offsets_of_a_file_stay_in_memory(tmp_path):
    count = 2500
    given = tmp_path / "in.jsonl"
    given.write_text("".join(_line(f"{number:08d}" + "x" * 500, prompt="y" * 500) for number in range(count)))
    tracemalloc.start()
    try:
        requests = RequestFile(given)
        assert tracemalloc.get_traced_memory()[1] < 400 * count, "a digest of each id"
        answers = OutputFile(tmp_path / "out.jsonl", requests, is_private=True)
        tracemalloc.reset_peak()
        assert tracemalloc.get_traced_memory()[0] < 40 * count
        answers.write(3, requests.read(3), "r", 200, "{}")
        answers.write_incomplete("batch_cancelled", "It was cancelled.")
        answers.close()
        assert tracemalloc.get_traced_memory()[1] < 40 * count + 2**20
    finally:
        tracemalloc.stop()
    found = [json.loads(line)["custom_id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(set(found)) == len(found) == count and found[0].startswith("00000003")
    assert (answers.num_done, answers.num_failed) == (count, count - 1)
    assert os.stat(tmp_path / "out.jsonl").st_mode & 0o777 == 0o600


def test_a_file_that_is_wanted_no_more_is_not_read_on(tmp_path):
    given = tmp_path / "in.jsonl"
    given.write_text("".join(_line(str(number)) for number in range(10)))
    asked = []
    with pytest.raises(InterruptedError):
        RequestFile(given, is_wanted=lambda: asked.append(1) or len(asked) < 4)
    assert len(asked) == 4
