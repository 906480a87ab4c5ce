"""The offline `LLM` over a fake engine: order, parameters, errors, and an orderly close."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

import oarlock
from engine.errors import ContextLengthError, EngineError, StartupError
from engine.sampling_params import SamplingParams
from tests.contract.conftest import DEMO
from tests.unit.server.fake_hub import FakeHub


@pytest.fixture
def make_llm(make_stage, monkeypatch):
    """`make_llm("text", …)`: an `LLM` whose engine answers with this text, and that engine."""
    opened = []

    def make(*args, llm_options=None, **options):
        engine = make_stage(*args, **options).engine

        async def start(config, on_progress):
            engine.config = config
            return engine

        monkeypatch.setattr("server.llm.llm.EngineClient.start", start)
        llm = oarlock.LLM(**(llm_options or {}))
        opened.append(llm)
        return llm, engine

    yield make
    for llm in opened:
        llm.close()


def test_prompts_become_outputs_in_order(make_llm, tokenizer):
    llm, engine = make_llm(lambda request: list(request.prompt_token_ids), llm_options={"max_num_seqs": 4})
    prompts = [f"prompt number {i}" for i in range(20)]
    outputs = llm.generate(prompts, oarlock.SamplingParams(max_tokens=50, temperature=0))
    assert [output.text for output in outputs] == prompts
    assert [output.prompt for output in outputs] == prompts
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert engine.config.worker.max_num_seqs == 4
    assert all(request.has_place for request in engine.requests), "its own prompts cannot fill its queue"
    assert engine.requests[0].params.eos_token_ids == (2, 0)


def test_one_prompt_ids_and_stop_strings(make_llm):
    llm, engine = make_llm("one two three")
    assert llm.generate("x", SamplingParams(max_tokens=50), stop=" two")[0].text == "one"
    assert llm.generate([[5, 6]], SamplingParams(max_tokens=50))[0].prompt_token_ids == (5, 6)
    assert llm.generate("x", SamplingParams(max_tokens=3), ignore_eos=True)[0].num_tokens == 3
    assert engine.requests[-1].params.eos_token_ids == ()
    scored = llm.generate("x", SamplingParams(max_tokens=2, logprobs=1))[0]
    assert len(scored.scores) == scored.num_tokens == 2


def test_chat(make_llm):
    llm, _ = make_llm("Hello!")
    assert llm.chat([{"role": "user", "content": "hi"}]).text == "Hello!"


def test_errors_are_the_engines_own_and_the_rest_is_aborted(make_llm):
    llm, _ = make_llm("x")
    with pytest.raises(ContextLengthError):
        llm.generate(["fine", "word " * 1000])
    llm, _ = make_llm("one two", fail_after=1)
    with pytest.raises(EngineError, match="not finite"):
        llm.generate(["a", "b"])
    assert llm._async_llm.open == set()


def test_wrong_options_are_named():
    with pytest.raises(StartupError, match="tensor_parallel_size"):
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


def test_the_public_module():
    assert set(oarlock.__all__) == {"LLM", "SamplingParams", "__version__"}
    with pytest.raises(AttributeError):
        _ = oarlock.nothing


@pytest.mark.filterwarnings("error")
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

        # Tests that are started in the background begin with this signal ignored.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            with pytest.raises(KeyboardInterrupt):
                oarlock.LLM(hub.model)
        finally:
            signal.signal(signal.SIGINT, handler)
        assert {child.pid for child in psutil.Process().children()} <= before
