"""The offline `LLM` over a fake engine: what the server would answer, in order, with its errors; an orderly close."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import threading
import time

import anyio
import psutil
import pytest

import oarlock
from oarlock import LoRARequest, SamplingParams
from oarlock.engine.errors import ContextLengthError, EngineError, RequestError
from oarlock.server.llm.generation_config import GenerationConfig
from oarlock.server.offline.llm import ChatFields
from oarlock.server.schemas.chat import ChatRequest
from oarlock.server.schemas.generation import SamplingFields
from tests.contract.conftest import DEMO, INFO
from tests.contract.test_embeddings_wire import EMBEDS
from tests.contract.test_rerank_wire import ASKS
from tests.unit.server.hub.fake_hub import FakeHub


class NoProcess:
    """Replaces the engine's process."""

    def __init__(self, num_ranks, compiles):
        self.num_ranks = num_ranks

    def discard(self):
        pass


@pytest.fixture
def make_llm(make_stage, monkeypatch):
    """`make_llm("text", …)`: an `LLM` whose engine answers with this text, and that engine."""
    opened = []

    def make(*args, llm_options=None, **options):
        engine = make_stage(*args, **options).engine

        async def start(config, on_progress, process):
            assert process.num_ranks == config.worker.tensor_parallel_size
            engine.config = config
            return engine

        monkeypatch.setattr("oarlock.server.launch.child_process.EngineProcess", NoProcess)
        monkeypatch.setattr("oarlock.engine.replicas.EngineClient.start", start)
        if "pooler" in options:
            monkeypatch.setattr("oarlock.server.llm.pooler_config.PoolerConfig.load", lambda *given: options["pooler"])
        llm = oarlock.LLM(**(llm_options or {}))
        opened.append(llm)
        return llm, engine

    yield make
    for llm in opened:
        llm.close()


def test_prompts_become_outputs_in_order(make_llm, tokenizer):
    llm, engine = make_llm(lambda request: list(request.prompt_token_ids), llm_options={"max_num_seqs": 4})
    prompts = [f"prompt number {i}" for i in range(20)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=50, temperature=0))
    assert [output.text for output in outputs] == prompts
    assert [output.prompt for output in outputs] == prompts
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert engine.config.worker.max_num_seqs == 4
    assert engine.config.worker.log_level == "WARNING"
    assert all(request.is_admitted for request in engine.requests), "its own prompts cannot fill its queue"
    assert engine.requests[0].params.eos_token_ids == (2, 0)


def test_one_prompt_ids_and_stop_strings(make_llm):
    llm, engine = make_llm("one two three")
    assert llm.generate("x", SamplingParams(max_tokens=50, stop=" two"))[0].text == "one"
    assert llm.generate([[5, 6]], SamplingParams(max_tokens=50))[0].prompt_token_ids == [5, 6]
    assert llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True))[0].num_tokens == 3
    assert engine.requests[-1].params.eos_token_ids == ()
    scored = llm.generate("x y z", SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=0, n=2))[0]
    assert [len(output.logprobs) for output in scored.outputs] == [2, 2]
    assert scored.num_tokens == 4
    assert len(scored.prompt_logprobs) == len(scored.prompt_token_ids)


# The quickstart of vLLM's documentation but for the package's name, with arguments that its examples have.
QUICKSTART = """
from oarlock import LLM, SamplingParams

prompts = ["Hello, my name is", "The capital of France is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64)
llm = LLM(model=None, trust_remote_code=False, dtype="half", swap_space=4, max_model_len=-1)
outputs = llm.generate(prompts, sampling_params=sampling_params, use_tqdm=False)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""


def test_the_quickstart_of_vllm_runs_as_it_is(make_llm, capsys):
    _, engine = make_llm(lambda request: list(request.prompt_token_ids))
    names = {}
    exec(QUICKSTART, names)
    names["llm"].close()
    assert capsys.readouterr().out.splitlines() == [
        f"Prompt: {prompt!r}, Generated text: {prompt!r}"
        for prompt in ("Hello, my name is", "The capital of France is")
    ]
    assert (engine.config.worker.dtype, engine.config.worker.fit_model_len) == ("float16", True)
    with pytest.raises(oarlock.StartupError, match="--hf-overrides"):
        oarlock.LLM(hf_overrides={})


def test_outputs_have_the_fields_of_vllm(make_llm, tokenizer):
    llm, _ = make_llm("one two three")
    given = [{"prompt": "a b c"}, {"prompt_token_ids": [5, 6, 7], "prompt": "ignored"}]
    params = SamplingParams(max_tokens=2, n=2, logprobs=3, prompt_logprobs=1)
    first, second = llm.generate(given, params)
    assert [output.request_id for output in (first, second)] == ["0", "1"] and first.finished
    assert (first.prompt, second.prompt, second.prompt_token_ids) == ("a b c", None, [5, 6, 7])
    assert [output.index for output in first.outputs] == [0, 1] and first.outputs[0].finished()
    answer = first.outputs[0]
    assert (answer.finish_reason, answer.stop_reason, len(answer.token_ids)) == ("length", None, 2)
    assert all(token_id in entries for token_id, entries in zip(answer.token_ids, answer.logprobs, strict=True))
    taken = [entries[token_id] for token_id, entries in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in taken))
    assert "".join(entry.decoded_token for entry in taken) == answer.text
    assert first.prompt_logprobs[0] is None
    for token_id, entries in zip(first.prompt_token_ids[1:], first.prompt_logprobs[1:], strict=True):
        assert entries[token_id].logprob <= 0
    assert first.metrics.num_generation_tokens == 4
    assert first.metrics.first_token_ts <= first.metrics.last_token_ts
    (plain,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=20, stop="two"))
    assert (plain.prompt_logprobs, plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (None,) * 3
    assert (plain.outputs[0].stop_reason, plain.num_cached_tokens) == ("two", 1)
    (chat,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=2))
    assert "hi" in chat.prompt and tokenizer.encode(chat.prompt, add_special_tokens=False) == chat.prompt_token_ids
    with pytest.raises(TypeError, match="has no key 'multi_modal_data'"):
        llm.generate({"prompt": "x", "multi_modal_data": {}})


LORA = dataclasses.replace(INFO, max_loras=2)


@pytest.fixture
def adapters(tmp_path):
    """Two adapters and a broken one."""
    for name, weights in (("a", "first"), ("b", "second"), ("c", "broken")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
        (tmp_path / name / "adapter_model.safetensors").write_text(weights)
    return [LoRARequest(name, number, str(tmp_path / name)) for number, name in enumerate("abc", 1)]


def test_each_prompt_has_its_adapter(make_llm, adapters):
    a, b, broken = adapters
    options = {"enable_lora": True, "lora_modules": [f"a={a.lora_path}"]}
    llm, engine = make_llm("one", info=LORA, llm_options=options)
    assert engine.config.worker.lora_adapters == (("a", a.lora_path),) and engine.added == ["a"]
    outputs = llm.generate(["x", "y", "z"], lora_request=[a, None, b])
    assert [output.lora_request for output in outputs] == [a, None, b]
    used = {tuple(request.prompt_token_ids): request.adapter for request in engine.requests}
    assert [used[tuple(output.prompt_token_ids)] for output in outputs] == ["a", None, "b"]
    llm.chat([{"role": "user", "content": "hi"}], lora_request=b)
    assert engine.requests[-1].adapter == "b" and engine.added == ["a", "b"], "it was loaded once"
    llm.generate("x", lora_request=dataclasses.replace(b, load_inplace=True))
    assert engine.added == ["a", "b", "b (replacement)", "b"] and list(engine.adapters) == ["a", "b"]
    for wrong, cause in (
        ([a], "3 prompts and 1 entries of lora_request"),
        (LoRARequest("d", 2, b.lora_path), "it belongs to 'b'"),
        (LoRARequest("b", 7, b.lora_path), "another adapter with the name 'b'"),
        (LoRARequest("b", 2, a.lora_path), "another adapter with the name 'b'"),
        (broken, "its header is damaged"),
        (LoRARequest("oarlock-demo", 9, a.lora_path), "cannot have the name 'oarlock-demo'"),
    ):
        with pytest.raises((RequestError, ValueError), match=cause):
            llm.generate(["x", "y", "z"], lora_request=wrong)
    for fields in (("", 1, "p"), ("x", 0, "p"), ("x", 1, "")):
        with pytest.raises(ValueError, match=r"needs a name and a path|at least 1"):
            LoRARequest(*fields)


def test_vectors_and_scores_have_their_adapter_if_lora_is_on(make_llm, adapters):
    a, b, _ = adapters
    plain, _ = make_llm("")
    with pytest.raises(RequestError, match=r"LoRA is off\. Add enable_lora=True"):
        plain.generate("x", lora_request=a)
    llm, engine = make_llm("", pooler=EMBEDS, info=LORA, llm_options={"enable_lora": True})
    vectors = llm.embed(["x", "y"], lora_request=[a, None])
    used = {tuple(request.prompt_token_ids): request.adapter for request in engine.requests}
    assert [used[tuple(vector.prompt_token_ids)] for vector in vectors] == ["a", None]
    llm.score("x", ["y", "z"], lora_request=b)
    assert {request.adapter for request in engine.requests[2:]} == {"b"}


def test_params_for_each_prompt(make_llm):
    llm, _ = make_llm("one two three")
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)])
    assert [output.num_tokens for output in outputs] == [1, 2]
    with pytest.raises(ValueError, match="2 prompts and 1 SamplingParams"):
        llm.generate(["a", "b"], [SamplingParams()])
    assert llm.generate([]) == []


def test_every_field_of_a_request_is_here_or_of_http():
    """A field that is added to the schema must be considered here."""
    of_http = {"model", "stream", "stream_options", "return_progress", "user", "metadata", "store", "service_tier"}
    of_http |= {"return_token_ids", "return_tokens_as_token_ids"}  # an output always has them
    other_names = {"guided_json", "guided_regex", "guided_choice", "guided_grammar"}
    other_names |= {"json_schema", "regex", "ebnf", "grammar"}
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields - {"max_tokens", "logprobs"} == SamplingFields.model_fields.keys() - of_http - other_names
    arguments = {
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "chat_template",
    } | ChatFields.__annotations__.keys()
    assert ChatRequest.model_fields.keys() - SamplingFields.model_fields.keys() == arguments | {
        "max_tokens",
        "logprobs",
        "verbosity",  # without effect
    }


def test_chat_is_rendered_and_read_as_over_http(make_llm, make_stage):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    llm, engine = make_llm(call)
    (output,) = llm.chat(messages, SamplingParams(temperature=0, logprobs=2), tools=tools)
    stage = make_stage(call, generation_config=GenerationConfig.load(DEMO))
    body = {"messages": messages, "tools": tools, "temperature": 0, "logprobs": True, "top_logprobs": 2}

    async def post():
        async with stage.client() as client:
            return (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]

    wanted = anyio.run(post)
    assert output.finish_reason == wanted["finish_reason"] == "tool_calls"
    (ours,), (theirs,) = output.message["tool_calls"], wanted["message"]["tool_calls"]
    assert ours["function"] == theirs["function"]
    assert len(output.outputs[0].logprobs) == len(wanted["logprobs"]["content"])
    sent, received = engine.requests[0], stage.engine.requests[0]
    assert sent.prompt_token_ids == received.prompt_token_ids
    assert dataclasses.replace(sent.params, seed=0) == dataclasses.replace(received.params, seed=0)
    # The answer is part of a conversation as it is.
    result = {"role": "tool", "tool_call_id": ours["id"], "content": "2"}
    assert llm.chat([[*messages, output.message, result]] * 2)[1].text == call, "without tools it is a text"
    with pytest.raises(TypeError, match=r"'temperature': give it in SamplingParams"):
        llm.chat(messages, temperature=0)
    with pytest.raises(TypeError, match=r"'tool': its arguments are tools,"):
        llm.chat(messages, tool=[])


def test_errors_match_the_server_and_the_rest_is_aborted(make_llm):
    llm, _ = make_llm("x")
    with pytest.raises(ContextLengthError):
        llm.generate(["fine", "word " * 1000])
    with pytest.raises(oarlock.RequestError, match="'temperature' must be at most 2"):
        llm.generate("x", SamplingParams(temperature=3))
    llm, _ = make_llm("one two", fail_after=1)
    with pytest.raises(EngineError, match="not finite"):
        llm.generate(["a", "b"])
    assert llm._engine.async_llm.open == set()


def posted(stage, path, body):
    async def post():
        async with stage.client() as client:
            return (await client.post(path, json=body)).json()["data"]

    return anyio.run(post)


def test_vectors_match_the_route(make_llm, make_stage):
    llm, engine = make_llm(pooler=EMBEDS)
    texts = [f"text number {number}" for number in range(20)]
    found = llm.embed(texts, prompt_name="query", dimensions=3)
    wanted = posted(
        make_stage(pooler=EMBEDS), "/v1/embeddings", {"input": texts, "prompt_name": "query", "dimensions": 3}
    )
    assert [one.outputs.embedding for one in found] == [item["embedding"] for item in wanted]
    assert {one.outputs.array.dtype.name for one in found} == {"float32"}
    assert {one.outputs.hidden_size for one in found} == {3} and all(one.finished for one in found)
    asked = {tuple(request.prompt_token_ids) for request in engine.requests}
    assert {tuple(one.prompt_token_ids) for one in found} == asked
    assert all(one.num_cached_tokens == len(one.prompt_token_ids) // 2 for one in found), "as this engine says"
    assert all(request.is_admitted for request in engine.requests), "its own prompts cannot fill its queue"
    whole = llm.embed([[5, 6], [7]], normalize=False)
    assert [len(one.outputs.embedding) for one in whole] == [4, 4]
    assert llm.embed([]) == [] and len(llm.embed("one")) == 1
    with pytest.raises(oarlock.RequestError, match="'dimensions' is 9"):
        llm.embed("x", dimensions=9)
    with pytest.raises(TypeError, match=r"embed\(\) has no argument 'promt_name': its arguments are dimensions,"):
        llm.embed("x", promt_name="query")
    with pytest.raises(oarlock.RequestError, match=r"does not support text generation\. Use /v1/embeddings"):
        llm.generate("x")
    with pytest.raises(oarlock.RequestError, match="does not support text generation"):
        llm.chat([{"role": "user", "content": "hi"}])
    assert llm._engine.async_llm.open == set()


@pytest.mark.parametrize("pooler", [EMBEDS, ASKS], ids=["by vectors", "asked in words"])
def test_scores_match_the_route_however_many(make_llm, make_stage, tokenizer, pooler):
    llm, engine = make_llm(pooler=pooler)
    documents = [f"document {number} {'x' * (number % 7)}" for number in range(70)]
    found = llm.score("What is it?", documents)
    asked = len(engine.requests)
    wanted = posted(make_stage(pooler=pooler), "/v1/score", {"text_1": "What is it?", "text_2": documents})
    assert [one.outputs.score for one in found] == [item["score"] for item in wanted]
    assert [one.request_id for one in found] == [str(number) for number in range(len(documents))]
    assert all(
        text.strip() in tokenizer.decode(one.prompt_token_ids) for text, one in zip(documents, found, strict=True)
    )
    assert asked == len(documents) + (3 if pooler is EMBEDS else 0), "the query is embedded once in 32 pairs"
    turned, one = llm.score(documents, documents[::-1]), llm.score(documents[0], documents[-1])
    assert turned[0].outputs == one[0].outputs and turned[0].prompt_token_ids == one[0].prompt_token_ids
    assert llm.score("x", []) == []
    with pytest.raises(ValueError, match="2 texts and 3 to compare"):
        llm.score(["a", "b"], ["a", "b", "c"])
    if pooler is ASKS:
        llm.score("a", "b", instruction="Find lies")
        assert "<Instruct>: Find lies" in tokenizer.decode(engine.requests[-1].prompt_token_ids)
        with pytest.raises(oarlock.RequestError, match="has no vector for a single text"):
            llm.embed("x")


def test_vectors_for_a_program_with_an_event_loop(make_llm):
    make_llm(pooler=EMBEDS)[0].close()

    async def program():
        async with await oarlock.LLM.create(runner="pooling") as llm:
            return await asyncio.gather(llm.aembed(["a", "b"]), llm.ascore("a", ["a"]))

    vectors, scores = anyio.run(program)
    assert len(vectors) == 2 and scores[0].outputs.score == pytest.approx(1.0)


def test_a_model_that_writes_texts_has_no_vectors(make_llm):
    llm, _ = make_llm("x")
    with pytest.raises(oarlock.RequestError, match="--runner pooling"):
        llm.embed("x")
    with pytest.raises(oarlock.RequestError, match="--runner pooling"):
        llm.score("x", "y")


def test_wrong_options_are_named():
    with pytest.raises(oarlock.StartupError, match="tensor_parallel_size"):
        oarlock.LLM(tensor_paralel_size=2)
    with pytest.raises(TypeError, match="port"):
        oarlock.LLM(port=8000)


def test_it_closes_in_order_and_stays_closed(make_llm):
    llm, engine = make_llm("x")
    with llm:
        llm.generate("x")
    assert engine.closed
    assert not [thread for thread in threading.enumerate() if thread.name == "oarlock-llm"]
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x")


def test_a_program_with_an_event_loop(make_llm, monkeypatch):
    opened, engine = make_llm("one two three")
    opened.close()

    async def program():
        async with await oarlock.LLM.create() as llm:
            outputs = await asyncio.gather(
                llm.agenerate(["a", "b"], SamplingParams(max_tokens=50)),
                llm.achat([{"role": "user", "content": "hi"}]),
            )
            engine.delay_s = 60.0
            endless = asyncio.create_task(llm.agenerate("x"))
            while len(engine.requests) < 4:
                await asyncio.sleep(0.005)
            endless.cancel()
            with pytest.raises(asyncio.CancelledError):
                await endless
            while not engine.aborted:
                await asyncio.sleep(0.005)
            return [output.text for answers in outputs for output in answers]

    assert anyio.run(program) == ["one two three"] * 3
    assert engine.closed
    assert not [thread for thread in threading.enumerate() if thread.name == "oarlock-llm"]


def test_the_bar_shows_prompts_and_tokens(make_llm, capsys):
    llm, _ = make_llm("one two three")
    llm.generate(["a", "b"])
    assert capsys.readouterr().err == "", "no terminal"
    llm.generate(["a", "b"], use_tqdm=True)
    assert "2/2" in capsys.readouterr().err


def test_the_public_module():
    for name in oarlock.__all__:
        assert getattr(oarlock, name).__module__ != "oarlock" if name != "__version__" else oarlock.__version__
    with pytest.raises(AttributeError):
        _ = oarlock.nothing


@pytest.mark.filterwarnings("error")
@pytest.mark.slow
def test_ctrl_c_while_a_model_is_fetched_leaves_no_process(monkeypatch, tmp_path):
    files = {path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()}
    with FakeHub(files) as hub:
        hub.bytes_per_second = 500_000
        for name, value in hub.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        before = {child.pid for child in psutil.Process().children()}

        def interrupt():
            until = time.monotonic() + 60
            while "model.safetensors" not in hub.names_asked and time.monotonic() < until:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
            while not ended.wait(30):  # Python loses one that comes while it collects garbage
                os.kill(os.getpid(), signal.SIGINT)

        ended = threading.Event()
        # Tests that are started in the background begin with this signal ignored.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                oarlock.LLM(hub.model)
        finally:
            ended.set()
            interrupting.join()
            signal.signal(signal.SIGINT, handler)
        assert {child.pid for child in psutil.Process().children()} <= before


def test_an_image_for_the_text_part_of_a_model_is_refused_with_the_reason(make_llm):
    llm, engine = make_llm("x", info=dataclasses.replace(INFO, text_part_of="Gemma3ForConditionalGeneration"))
    parts = [{"type": "image_url", "image_url": {"url": "http://x/y"}}]
    with pytest.raises(oarlock.RequestError, match=r"serves the text part of .*; images are not supported\."):
        llm.chat([{"role": "user", "content": parts}])
    assert not engine.requests
