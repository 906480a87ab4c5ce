"""Prompts of exact lengths, the same for every server; conversations, shared beginnings and traces."""

from __future__ import annotations

import json

import pytest

from oarlock.base.errors import StartupError
from oarlock.server.bench import workload
from oarlock.server.bench.serve import ServePlan
from oarlock.server.bench.workload import IdPrompts, Lengths, TextPrompts

IDS = IdPrompts(4096, seed=7)


def test_ids_are_exact_reproducible_and_away_from_the_ends_of_the_vocabulary():
    found = workload.RandomPrompts(IDS, Lengths(5000, 8)).conversation(3)[0]
    assert len(found.prompt) == 5000 == found.input_tokens and found.output_tokens == 8
    assert min(found.prompt) >= 256 and max(found.prompt) < 3840
    assert found == workload.RandomPrompts(IDS, Lengths(5000, 8)).conversation(3)[0]
    assert found.prompt != workload.RandomPrompts(IDS, Lengths(5000, 8)).conversation(4)[0].prompt
    assert found.prompt != workload.RandomPrompts(IdPrompts(4096, 8), Lengths(5000, 8)).conversation(3)[0].prompt


def test_lengths_spread_evenly():
    plan = workload.RandomPrompts(IDS, Lengths(100, 10, spread=0.5))
    found = [plan.conversation(number)[0] for number in range(400)]
    lengths = [turn.input_tokens for turn in found]
    assert {min(lengths), max(lengths)} == {50, 150}
    assert sum(lengths) / len(lengths) == pytest.approx(100, rel=0.05)
    assert {turn.output_tokens for turn in found} == set(range(5, 16))
    assert all(len(turn.prompt) == turn.input_tokens for turn in found)


def test_words_leave_room_for_what_the_server_adds():
    text = TextPrompts(seed=1, tokens_per_word=2.0, overhead=20.0)
    assert len(text.piece("a", 120, begins=True).split()) == 50
    assert len(text.piece("a", 120).split()) == 60
    assert text.piece("a", 5, begins=True).split()  # never empty


def test_a_shared_prefix_is_shared_and_the_rest_is_not():
    plan = workload.SharedPrefix(IDS, Lengths(30, 4), prefix_tokens=100, num_prefixes=2)
    prompts = [plan.conversation(number)[0].prompt for number in range(4)]
    assert all(len(prompt) == 130 for prompt in prompts)
    assert prompts[0][:100] == prompts[2][:100] != prompts[1][:100] == prompts[3][:100]
    assert len({tuple(prompt[100:]) for prompt in prompts}) == 4
    assert plan.conversation(0)[0].input_tokens == 130


def test_turns_of_a_conversation_are_new_each():
    turns = workload.MultiTurn(TextPrompts(1), Lengths(12, 4), turns=3).conversation(0)
    assert len({turn.prompt for turn in turns}) == 3


def trace_file(tmp_path, *lines):
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


def test_a_trace_is_sorted_and_begins_at_its_first_request(tmp_path):
    file = trace_file(
        tmp_path,
        {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [4, 9]},
        "",
        {"timestamp": 1000, "input_length": 1030, "output_length": 7, "hash_ids": [4, 5]},
        {"timestamp": 1500.5, "input_length": 20, "output_length": 1},
    )
    found = workload.read_trace(file)
    assert [each.at_s for each in found] == [0, 0.5005, 2]
    plan = workload.TracedPrompts(IDS, found)
    first, second, third = (plan.conversation(number)[0] for number in range(3))
    assert [len(turn.prompt) for turn in (first, second, third)] == [1030, 20, 600]
    assert first.prompt[:512] == third.prompt[:512]
    assert first.prompt[512:600] != third.prompt[512:]
    assert ServePlan("u", workload="trace", trace=found, trace_speed=2).make_schedule().times_s[2] == 1
    assert ServePlan("u", workload="trace", trace=found, num_requests=2, concurrency=4).make_schedule().count == 2


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("{", "trace.jsonl:2 is not JSON"),
        ("[1]", "not a JSON object"),
        ('{"input_length": 1, "output_length": 1}', "timestamp is None"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}', "timestamp is -1"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "input_length is 0"),
        ('{"timestamp": 1, "input_length": 1, "output_length": "x"}', "output_length is 'x'"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}', "hash_ids"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, cause):
    file = trace_file(tmp_path, {"timestamp": 0, "input_length": 1, "output_length": 1}, line)
    with pytest.raises(StartupError) as error:
        workload.read_trace(file)
    assert cause in error.value.cause and error.value.fix


def test_no_trace(tmp_path):
    with pytest.raises(StartupError, match="is empty"):
        workload.read_trace(trace_file(tmp_path, ""))
    with pytest.raises(StartupError, match="cannot be read"):
        workload.read_trace(tmp_path / "none")


def test_schedules():
    assert ServePlan("u").make_schedule().concurrency == 1
    assert ServePlan("u").make_schedule().count == 100
    timed = ServePlan("u", concurrency=4, duration=5.0).make_schedule()
    assert (timed.concurrency, timed.count, timed.seconds) == (4, None, 5.0)
    assert len(ServePlan("u", request_rate=4, duration=5.0).make_schedule().times_s) == 20
    assert len(ServePlan("u", ramp=(1, 9), num_requests=30).make_schedule().times_s) == 30
