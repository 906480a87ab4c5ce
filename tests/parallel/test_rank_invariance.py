"""Equal bits at every number of ranks: tokens and logprobs at tensor-parallel size 1, 2, 4 and 8, in any batch.

Up to 48 prompts on a tiny model through the real scheduler, input batch, ranks and samplers. Ranks are threads, for
which Python adds up partial sums: `test_collectives.py` compares the sums of the kernels with these, between processes.
"""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import AutoConfig

from benchmarks.checkpoint import SHAPES
from oarlock.engine.types import Request, SamplingParams
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.all_reduce import tree_sum
from oarlock.workers.executor import start_executor
from tests.golden import paged_run
from tests.golden.tiny_models import make_tiny
from tests.parallel.direct_engine import Answer, DirectEngine
from tests.parallel.rank_threads import ThreadExecutor
from tests.unit.workers.kernel_levels import NO_KERNELS

pytestmark = pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")

VOCAB = 331  # neither slices nor blocks of it are whole
# Biases after the sums over ranks; with 8 ranks two of them share a KV head; every slice has whole groups of inputs.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"hidden_size": 256},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {},
    "cohere2": {"hidden_size": 256, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen2_moe": {},
}
NEW_VALUES: dict[str, dict[str, Any]] = {
    **{family: {"num_hidden_layers": 3} for family in ("afmoe", "kolibri1")},
    "llama4_text": {"num_hidden_layers": 3, "intermediate_size_mlp": 256},
    **{family: {} for family in ("hunyuan_v1_dense", "jais2", "ministral3")},
    **{family: {"hidden_size": 256} for family in ("granite", "olmo", "phi", "phimoe", "starcoder2")},
    **{family: {"hidden_size": 256, "n_inner": 256, "num_key_value_heads": 8} for family in ("gpt2", "gptj")},
    "deepseek_v2": {"num_key_value_heads": 8, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 16},
    "kimi_linear": {"num_key_value_heads": 8, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "linear_num_heads": 8,
                    "linear_head_dim": 32, "layer_types": ["linear_attention", "full_attention"],
                    "mlp_layer_types": ["dense", "sparse"]},
}  # fmt: skip
IN_SHORT = {"afmoe", "gpt2"}  # the others run in `make test-long`
# dtype, quantisation, KV cache
FORMS = ("bfloat16", "float16", "float32", "bfloat16-int8", "bfloat16-int4", "bfloat16-none-int8", "float32-int8-fp8")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: make_tiny(folder, family, **SHAPE | CHECKPOINTS[family]) for family in ("llama", "qwen2_moe")}


def start(path: Path, form: str, size: int, num_threads: int = 1) -> ThreadExecutor:
    dtype, quantization, cache = [*form.split("-"), *("none", "auto")[form.count("-") :]]
    return ThreadExecutor(
        WorkerConfig(
            str(path),
            device="cpu",
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=cache,
            tensor_parallel_size=size,
            max_model_len=128,
            max_num_seqs=32,
            max_num_batched_tokens=256,
            block_size=16,
            num_kv_blocks=200,
            num_threads=num_threads,
        )
    )


def make_requests(count: int) -> list[Request]:
    """Prompts of 3 to 40 tokens, sampled in every way that there is, all with logprobs."""
    draw = Random(0)
    requests = []
    for number in range(count):
        prompt = tuple(draw.randrange(VOCAB) for _ in range(3 + number % 38))
        params = SamplingParams(
            max_tokens=3 + number % 4,
            temperature=0.0 if number % 3 == 0 else 0.3 + number % 5 / 2,
            top_p=0.9 if number % 4 == 1 else 1.0,
            top_k=90 if number % 10 == 4 else 5 if number % 5 == 0 else 0,
            min_p=0.02 if number % 7 == 3 else 0.0,
            top_n_sigma=(0.0, 1.5, 0.0, 3.0)[number % 4],
            seed=number,
            logprobs=3,
            prompt_logprobs=2 if number % 6 == 0 else None,
            frequency_penalty=0.5 if number % 3 == 1 else 0.0,
            repetition_penalty=1.1 if number % 8 == 5 else 1.0,
        )
        requests.append(Request(number, prompt, params))
    return requests


def run(executor: ThreadExecutor, requests: list[Request], *, alone: bool = False) -> dict[int, Answer]:
    engine = DirectEngine(executor)
    answers: dict[int, Answer] = {}
    for some in [[request] for request in requests] if alone else [requests]:
        answers |= engine.run(some)
    assert all(answer.error is None and answer.logprobs for answer in answers.values())
    return answers


def differences(answers: dict[int, Answer], expected: dict[int, Answer]) -> list[int]:
    """Ids whose answers are not the same, bit by bit."""
    return [number for number, answer in answers.items() if answer != expected[number]]


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=pytest.mark.soak) if form in ("float16", "float32-int8-fp8") else form for form in FORMS],
)
def test_prompts_have_the_same_bits_at_every_number_of_ranks(checkpoints: dict[str, Path], form: str) -> None:
    requests = make_requests(24 if "-" in form else 48)
    one = start(checkpoints["llama"], form, 1)
    expected = run(one, requests, alone=True)
    assert differences(run(one, requests), expected) == []
    one.close()
    for size in (2, 4, 8) if form in FORMS[:3] else (2, 8):
        ranks = start(checkpoints["llama"], form, size)
        assert differences(run(ranks, requests), expected) == [], f"{size} ranks"
        assert differences(run(ranks, requests[::12], alone=True), expected) == [], f"{size} ranks, alone"
        ranks.close()


@pytest.mark.parametrize(
    "family",
    [
        *(name for name in CHECKPOINTS if name != "llama"),
        *(name if name in IN_SHORT else pytest.param(name, marks=pytest.mark.soak) for name in NEW_VALUES),
    ],
)
def test_other_families(tmp_path: Path, family: str) -> None:
    """Among others: without biases after the all-reduce, with norms after it or over the heads of all ranks, with
    attention and MLP in parallel, with experts, learned positions, a gate on attention, and an MLP without a gate."""
    checkpoint = make_tiny(tmp_path, family, **SHAPE | (CHECKPOINTS | NEW_VALUES)[family])
    requests = make_requests(16)
    answers = []
    for size, num_threads in ((1, 1), (1, 4), (2, 2), (4, 1), (8, 1)):
        executor = start(checkpoint, "bfloat16", size, num_threads)
        answers.append(run(executor, requests))
        executor.close()
    assert all(differences(other, answers[0]) == [] for other in answers)
    executor = start(checkpoint, "bfloat16", 2)
    assert differences(run(executor, requests[::4], alone=True), answers[0]) == []
    executor.close()


@pytest.mark.soak
@pytest.mark.parametrize("form", ["bfloat16", "bfloat16-int8", "bfloat16-int4"])
def test_the_shape_of_a_real_model_on_processes(tmp_path: Path, form: str) -> None:
    """Qwen2.5-0.5B with random weights and 6 layers: two ranks with one thread each against one rank with two."""
    shape = AutoConfig.for_model("qwen2", **SHAPES["0.5b"] | {"num_hidden_layers": 6}, tie_word_embeddings=True)
    shape.architectures = ["Qwen2ForCausalLM"]
    shape.save_pretrained(tmp_path)
    dtype, _, quantization = form.partition("-")
    answers = []
    for size in (1, 2):
        config = WorkerConfig(
            str(tmp_path),
            device="cpu",
            dtype=dtype,
            quantization=quantization or "none",
            load_format="dummy",
            tensor_parallel_size=size,
            max_model_len=128,
            max_num_seqs=32,
            max_num_batched_tokens=256,
            block_size=16,
            num_kv_blocks=200,
            num_threads=3 - size,
        )
        executor = ThreadExecutor(config) if size == 1 else start_executor(config, lambda phase, fraction: None)
        assert executor.info.rank_invariant, executor.info.rank_invariant_reason
        answers.append(DirectEngine(executor).run(make_requests(16)))
        executor.close()
    assert differences(*answers) == []


@pytest.mark.soak
@pytest.mark.parametrize("deals", [False, pytest.param(True, marks=pytest.mark.every)], ids=["cut", "dealt"])
def test_a_mixture_on_eight_processes(checkpoints: dict[str, Path], deals: bool) -> None:
    one = start(checkpoints["qwen2_moe"], "bfloat16", 1)
    config = one.config.with_(enable_expert_parallel=deals, cpu_affinity="none")
    eight = start_executor(config.with_(tensor_parallel_size=8), lambda *_: None)
    assert eight.info.rank_invariant and eight.info.batch_invariant, eight.info
    got = run(eight, make_requests(8))
    eight.close()
    assert differences(run(ThreadExecutor(config) if deals else one, make_requests(8)), got) == []


@pytest.mark.parametrize(
    "form",
    [
        "bfloat16",
        *(pytest.param(form, marks=pytest.mark.product) for form in ("float16", "float32", "float32-int8")),
        "float32-int4",
    ],
)
def test_ranks_in_another_order_are_found(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """A planted fault: partial sums of four ranks are added as (0 + 2) + (1 + 3)."""
    requests = make_requests(200 if form == "bfloat16" else 80)  # whose roundings hide most of it
    answers = []
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        monkeypatch.setattr(paged_run, "tree_sum", lambda parts, order=order: tree_sum([parts[i] for i in order]))
        executor = start(checkpoints["llama"], form, 4)
        answers.append(run(executor, requests))
        executor.close()
    assert differences(*answers) != []
