"""Effect of each parameter of `/v1/completions` on the engine's request and on the answer."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import tokenizers
import transformers
from tokenizers.processors import TemplateProcessing

from oarlock.engine.types import FinishReason, TokenEvent, TokenLogprobs
from oarlock.server.llm.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[2] / "models" / "oarlock-demo"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TEXT = "Hello, wörld! 😀 中文"


def _post(stage, body, path="/v1/completions", **options):
    async def send():
        async with stage.client() as client:
            return await client.post(path, json=body, **options)

    return anyio.run(send)


def _choice(stage, body, **options):
    response = _post(stage, body, **options)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def _params(stage, body, **options):
    _choice(stage, {"prompt": "x", **body}, **options)
    return stage.engine.requests[-1].params


def test_bad_words_are_tokenized_beside_the_event_loop(make_stage, tokenizer, monkeypatch):
    stage, threads, encode = make_stage(), [], tokenizer.encode

    def noted(text, **how):
        threads.append(threading.current_thread().name.partition("_")[0])
        return encode(text, **how)

    monkeypatch.setattr(tokenizer, "encode", noted)
    _params(stage, {"bad_words": ["a", "b"]})
    assert threads == ["tokenizer"] * 5


def test_penalties_biases_and_bans_reach_the_engine(make_stage, tokenizer):
    payload = {
        "presence_penalty": 1.5,
        "frequency_penalty": -2,
        "repetition_penalty": 1.25,
        "logit_bias": {"7": -100, "5": 2.5},
        "allowed_token_ids": [9, 3, 9],
        "bad_words": ["def", "a b"],
    }
    params = _params(make_stage(), payload)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1.5, -2.0, 1.25)
    assert params.logit_bias == ((5, 2.5), (7, -100.0))
    assert [*params.allowed_token_ids] == [3, 9]
    wanted = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("def", " def", "a b", " a b")]
    assert list(params.bad_words) == list(dict.fromkeys(wanted))
    plain = _params(make_stage(), dict.fromkeys(payload))
    assert (plain.presence_penalty, plain.repetition_penalty, plain.logit_bias) == (0.0, 1.0, ())
    assert (plain.allowed_token_ids, plain.bad_words) == (None, ())


def test_priority_and_salt_reach_the_engine(make_stage):
    stage = make_stage()
    _choice(stage, {"prompt": "x", "priority": -3, "cache_salt": "tenant-1"})
    assert (stage.engine.requests[0].priority, stage.engine.requests[0].cache_salt) == (-3, b"tenant-1")
    _choice(stage, {"prompt": "x"})
    assert (stage.engine.requests[1].priority, stage.engine.requests[1].cache_salt) == (0, b"")


def test_prompts_of_different_keys_share_nothing(make_stage):
    stage = make_stage(api_key=("first", "second"))
    for key, salt in (("first", None), ("first", None), ("second", None), ("second", "s")):
        _choice(stage, {"prompt": "x", "cache_salt": salt}, headers={"Authorization": f"Bearer {key}"})
    salts = [request.cache_salt for request in stage.engine.requests]
    assert salts[0] == salts[1] != b""
    assert len(set(salts)) == 3
    assert all(b"first" not in salt and b"second" not in salt for salt in salts)


def test_the_stop_string_is_shown_when_asked_for(make_stage):
    payload = {"prompt": "x", "stop": [" wör", "ld!"], "max_tokens": 50}
    hidden, shown = (
        _choice(make_stage(TEXT), {**payload, "include_stop_str_in_output": flag}) for flag in (False, True)
    )
    assert (hidden["text"], shown["text"]) == ("Hello,", "Hello, wör")
    assert hidden["stop_reason"] == shown["stop_reason"] == " wör"
    assert hidden["finish_reason"] == shown["finish_reason"] == "stop"


def test_a_stop_token_is_shown_when_asked_for(make_stage, tokenizer):
    stop_id = tokenizer.encode("!", add_special_tokens=False)[0]
    stage = make_stage("Hi")
    ids = tuple(tokenizer.encode("Hi", add_special_tokens=False))

    async def events(request):
        yield TokenEvent(request.request_id, (*ids, stop_id), finish_reason=FinishReason.STOP, stop_token_id=stop_id)

    stage.engine._events = events
    for flag, text in ((False, "Hi"), (True, "Hi!")):
        payload = {"prompt": "x", "stop_token_ids": [stop_id], "include_stop_str_in_output": flag}
        choice = _choice(stage, payload)
        assert (choice["text"], choice["stop_reason"]) == (text, stop_id)


def test_special_tokens_are_shown_when_asked_for(make_stage, tokenizer):
    special = min(tokenizer.special_ids)
    name = tokenizer.token_text(special)
    ids = [*tokenizer.encode("a", add_special_tokens=False), special]
    for flag, text in ((True, "a"), (False, "a" + name)):
        stage = make_stage(lambda request: ids, eos=False)
        assert _choice(stage, {"prompt": "x", "skip_special_tokens": flag})["text"] == text


def test_ids_come_with_each_choice_and_the_prompts_once_in_a_stream(make_stage, tokenizer):
    payload = {"prompt": ["one", "two three"], "n": 2, "return_token_ids": True, "max_tokens": 40}
    stage = make_stage(TEXT)
    body = _post(stage, payload).json()
    prompts = [tokenizer.encode(text) for text in payload["prompt"]]
    reply = [*stage.engine.reply(None), stage.engine.requests[0].params.eos_token_ids[0]]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert all(choice["token_ids"] == reply for choice in body["choices"])
    chunks = _chunks(_post(stage, {**payload, "stream": True}))
    for index, prompt in enumerate([prompts[0], prompts[0], prompts[1], prompts[1]]):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert [chunk.get("prompt_token_ids") for chunk in own] == [prompt] + [None] * (len(own) - 1)
        assert [token for chunk in own for token in chunk["token_ids"]] == reply


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("regex", "a", "regex"),
        ("ebnf", 'root ::= "a"', "ebnf"),
        ("grammar", 'root ::= "a"', "ebnf"),
        ("json_schema", {"const": "a"}, "json_schema"),
        ("guided_whitespace_pattern", "a", None),
    ],
)
def test_constraints_under_the_names_of_other_servers_are_never_ignored(make_stage, name, value, kind):
    stage = make_stage()
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        answer = _post(stage, {**body, name: value}, path)
        if kind is None:
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        else:
            assert answer.status_code == 200
            grammar = stage.engine.requests[-1].params.grammar
            assert (grammar.kind, grammar.param) == (kind, name)
        assert _post(stage, {**body, name: None}, path).status_code == 200


def test_in_chat_what_belongs_to_the_prompt_stands_beside_the_choices(make_stage, tokenizer):
    stage = make_stage("one two")
    payload = {"messages": [{"role": "user", "content": "x"}], "n": 2, "return_token_ids": True, "prompt_logprobs": 0}
    body = _post(stage, payload, CHAT).json()
    prompt = list(stage.engine.requests[0].prompt_token_ids)
    assert body["prompt_token_ids"] == prompt
    assert len(body["prompt_logprobs"]) == len(prompt)
    assert body["prompt_logprobs"][0] is None
    for choice in body["choices"]:
        assert choice["token_ids"]
        assert not {"prompt_token_ids", "prompt_logprobs"} & choice.keys()
    response = _post(stage, {**payload, "stream": True, "stream_options": {"include_usage": True}}, CHAT)
    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    for name in ("prompt_token_ids", "prompt_logprobs"):
        assert [event[name] for event in events if name in event] == [body[name]]
    for index, choice in enumerate(body["choices"]):
        own = [part for event in events for part in event["choices"] if part["index"] == index]
        assert [token for part in own for token in part.get("token_ids", ())] == choice["token_ids"]


def _chunks(response):
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: {")]
    return [choice for line in lines for choice in json.loads(line[6:])["choices"]]


def test_tokens_as_ids_in_logprobs(make_stage):
    stage = make_stage("ab")
    logprobs = _choice(stage, {"prompt": "x", "logprobs": 2, "return_tokens_as_token_ids": True})["logprobs"]
    ids = stage.engine.reply(None)
    assert logprobs["tokens"][: len(ids)] == [f"token_id:{token}" for token in ids]
    assert list(logprobs["top_logprobs"][0]) == [f"token_id:{ids[0]}", f"token_id:{ids[0] + 1}"]


def test_prompt_logprobs_have_the_documented_shape(make_stage, tokenizer):
    stage = make_stage("ok")
    choice = _choice(stage, {"prompt": [5, 6, 14], "prompt_logprobs": 2})
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert others[0] == {
        "6": {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.token_text(6)},
        "7": {"logprob": -1.5, "rank": 2, "decoded_token": tokenizer.token_text(7)},
    }
    assert others[1]["15"]["rank"] == 2
    assert choice["logprobs"] is None
    assert choice["text"] == "ok"


def test_scores_of_prompt_and_answer_may_differ_in_number(make_stage):
    stage = make_stage("ok")
    payload = {"prompt": [5, 6], "echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 0}
    choice = _choice(stage, payload)
    assert stage.engine.requests[0].params.prompt_logprobs == 3
    assert len(choice["prompt_logprobs"][1]) == 3
    assert [entry and len(entry) for entry in choice["logprobs"]["top_logprobs"]] == [None, 1]


def test_scoring_needs_no_echo(make_stage):
    stage = make_stage("never")
    response = _post(stage, {"prompt": [5, 6], "prompt_logprobs": 0, "max_tokens": 0})
    choice = response.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert list(choice["prompt_logprobs"][1]) == ["6"]
    assert response.json()["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("payload", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, 3),
        ({"truncate_prompt_tokens": 300}, 240),
        ({"truncate_prompt_tokens": -1, "max_tokens": 40}, 216),
        ({"truncate_prompt_tokens": -1, "max_tokens": 250}, 128),
        ({"truncate_prompt_tokens": -1, "max_tokens": 0, "echo": True, "prompt_logprobs": 0}, 240),
    ],
)
def test_the_end_of_a_prompt_is_kept_on_request_only(make_stage, payload, kept):
    stage = make_stage("a")
    ids = [5 + number for number in range(240)]
    for side, expected in ((None, ids[-kept:]), ("left", ids[-kept:]), ("right", ids[:kept])):
        choice = _choice(stage, {"prompt": ids, **payload, "return_token_ids": True, "truncation_side": side})
        assert choice["prompt_token_ids"] == expected


def test_a_prompt_that_is_too_long_even_when_cut_is_refused(make_stage):
    error = _post(make_stage(), {"prompt": [5] * 300, "truncate_prompt_tokens": 290}).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "290" in error["message"]


def test_echo_shows_the_kept_text(make_stage, tokenizer):
    ids = tokenizer.encode("one two three four", add_special_tokens=False)
    payload = {"prompt": "one two three four", "truncate_prompt_tokens": 2, "echo": True, "max_tokens": 0}
    assert _choice(make_stage(), payload)["text"] == tokenizer.decode(ids[-2:])


def test_best_of_ranks_by_mean_logprob_and_counts_everything(make_stage, tokenizer):
    words = [tokenizer.encode(text, add_special_tokens=False) for text in ("bad", "good", "fair", "best")]
    scores = {0: -2.0, 1: -0.4, 2: -1.0, 3: -0.1}
    stage = make_stage()
    asked_for = []

    async def events(request):
        asked_for.append(request.params)
        number = (request.request_id - 1) % 4
        logprobs = tuple(TokenLogprobs(token, scores[number], 1) for token in words[number])
        length = FinishReason.LENGTH
        yield TokenEvent(request.request_id, tuple(words[number]), logprobs=logprobs, finish_reason=length)

    stage.engine._events = events
    body = _post(stage, {"prompt": ["x", "y"], "n": 2, "best_of": 4, "max_tokens": 9}).json()
    assert [choice["text"] for choice in body["choices"]] == ["best", "good"] * 2
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 2 * sum(map(len, words))
    assert all(params.logprobs == 0 for params in asked_for)
    assert _post(make_stage(), {"prompt": "x", "n": 2, "best_of": 2, "stream": True}).status_code == 200


def test_a_suffix_needs_a_model_that_fills_in(make_stage, tokenizer, monkeypatch):
    error = _post(make_stage(), {"prompt": "a", "suffix": "b"}).json()["error"]
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    monkeypatch.setattr(type(tokenizer), "fim_token_ids", (11, 12, 13))
    stage = make_stage()
    _choice(stage, {"prompt": "a", "suffix": "b"})
    a, b = (tokenizer.encode(text, add_special_tokens=False) for text in "ab")
    assert list(stage.engine.requests[0].prompt_token_ids) == [11, *a, 12, *b, 13]


def test_a_text_with_a_suffix_has_the_tokens_that_transformers_gives_it(make_stage):
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcxyz",
        "▁a",
        "▁x",
        "xy",
        "▁xy",
    ]
    merges = [("▁", "a"), ("▁", "x"), ("x", "y"), ("▁x", "y")]
    theirs = transformers.CodeLlamaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    loaded = Tokenizer(tokenizers.Tokenizer.from_str(theirs.backend_tokenizer.to_str()), {"bos_token": "<s>"})
    stage = make_stage()
    stage.state.async_llm.input_processor.tokenizer = loaded
    for prompt, suffix in (("a b", "xy c"), ("a", "\n\nxy"), ("a\n", "z xy"), ("x", "xyxy" * 20)):
        _choice(stage, {"prompt": prompt, "suffix": suffix, "max_tokens": 1})
        expected = theirs(prompt, suffix=suffix)["input_ids"]
        assert list(stage.engine.requests[-1].prompt_token_ids) == expected, (prompt, suffix)
    _choice(stage, {"prompt": "a", "suffix": "xyxy" * 20, "max_tokens": 1, "truncate_prompt_tokens": 7})
    assert list(stage.engine.requests[-1].prompt_token_ids) == theirs("a", suffix="xyxy" * 20)["input_ids"][-7:]
    loaded.close()


@pytest.mark.parametrize("opens", [{"add_bos_token": True}, {}, {"add_bos_token": False}])
def test_special_tokens_before_a_text_also_precede_a_suffix_prompt(make_stage, monkeypatch, opens):
    backend = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    backend.add_special_tokens(["<s>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    bos, *marks = (backend.token_to_id(name) for name in ("<s>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"))
    if "add_bos_token" not in opens:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    loaded = Tokenizer(backend, {"bos_token": "<s>", **opens})
    stage = make_stage()
    stage.engine.info = replace(stage.engine.info, vocab_size=5000)
    stage.state.async_llm.input_processor.tokenizer = loaded
    a, b = (loaded.encode(text, add_special_tokens=False) for text in "ab")
    begun = [] if opens.get("add_bos_token") is False else [bos]
    for prompt, more, opening in (
        ("a", {}, begun),
        ("<s>a", {}, [bos]),
        ("a", {"add_special_tokens": False}, []),
        (a, {}, []),
        ([bos, *a], {}, [bos]),
    ):
        _choice(stage, {"prompt": prompt, "suffix": "b", "max_tokens": 1, **more})
        before, between, after = marks
        expected = (*opening, before, *a, between, *b, after)
        assert stage.engine.requests[-1].prompt_token_ids == expected, (prompt, more)
    loaded.close()


def test_accepted_fields_change_nothing(make_stage):
    payload = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex"}
    stage = make_stage()
    response = _post(stage, {"prompt": "x", "seed": 1, **payload})
    assert response.status_code == 200
    assert "X-Ignored-Parameters" not in response.headers
    _post(stage, {"prompt": "x", "seed": 1})
    first, second = stage.engine.requests
    assert (first.params, first.priority, first.cache_salt) == (second.params, second.priority, second.cache_salt)


def test_usage_so_far_in_every_chunk(make_stage):
    stage = make_stage(TEXT)
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}
    response = _post(stage, {"prompt": "x", "stream": True, "stream_options": options, "max_tokens": 50})
    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-2:] == [len(stage.engine.reply(None)) + 1] * 2
    assert events[-1]["choices"] == []
    assert "obfuscation" not in response.text
    response = _post(stage, {"prompt": "x", "stream": True, "stream_options": {"continuous_usage_stats": True}})
    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    assert all(event["choices"] and event["usage"] for event in events)
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        refused = {"include_usage": False, "continuous_usage_stats": True}
        text = _post(stage, {**body, "stream": True, "stream_options": refused}, path).text
        assert '"usage"' not in text and text.endswith("data: [DONE]\n\n"), "as vLLM has it"


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_whose_time_is_up_ends_with_its_text_so_far(make_stage, stream):
    stage = make_stage(TEXT, pause_after=4)
    response = _post(stage, {"prompt": "x", "timeout": 0.2, "stream": stream, "n": 2})
    assert response.status_code == 200
    choices = _chunks(response) if stream else response.json()["choices"]
    for index in range(2):
        own = [choice for choice in choices if choice["index"] == index]
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["timeout"]
        text = "".join(choice["text"] for choice in own)
        assert text
        assert TEXT.startswith(text.rstrip("\ufffd"))
    assert sorted(stage.engine.aborted) == [1, 2]
    assert stage.counters.finished["timeout"] == 2


@pytest.mark.parametrize(
    ("body", "headers"),
    [({"timeout": 0.05}, {}), ({}, {"X-Request-Timeout": "0.05"}), ({"timeout": 60}, {"X-Request-Timeout": "5e-2"})],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_never_began_is_a_408(make_stage, body, headers, stream):
    stage = make_stage(pause_after=0)
    response = _post(stage, {"prompt": "x", "stream": stream, **body}, headers=headers)
    assert response.status_code == 408
    assert response.headers["x-should-retry"] == "false"
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "timeout", "timeout")
    # on a busy machine the time may pass before the engine has the request
    assert stage.engine.aborted == [one.request_id for one in stage.engine.requests]


def test_the_operators_limit_counts_too(make_stage):
    assert _post(make_stage(pause_after=0, request_timeout=0.05), {"prompt": "x", "timeout": 60}).status_code == 408


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "1e9", ""])
def test_a_wrong_time_limit_in_the_header(make_stage, value):
    response = _post(make_stage(), {"prompt": "x"}, headers={"X-Request-Timeout": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Timeout"


def test_the_limit_counts_while_the_prompt_is_prepared(make_stage, monkeypatch):
    stage = make_stage()

    async def never(*_: object, **__: object) -> list[int]:
        await asyncio.sleep(60)
        return []

    monkeypatch.setattr(stage.state.async_llm.input_processor.tokenizer, "aencode", never)
    response = _post(stage, {"prompt": "x", "timeout": 0.05})
    assert (response.status_code, response.json()["error"]["code"]) == (408, "timeout")
    assert stage.engine.requests == []
