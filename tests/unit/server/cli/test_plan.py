"""`oarlock plan`: layouts, remedies and the command that it gives; machines by name; mistakes named by one line."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from oarlock.base.host_memory import human_bytes
from oarlock.server.cli.arguments import given_settings, parse
from oarlock.server.cli.main import _parsers, main
from oarlock.server.cli.plan.layouts import SIZES
from oarlock.server.cli.plan.machine import GPUS, parse_gpus
from oarlock.workers.capacity import Memory, capacity, work_of
from oarlock.workers.config import MAX_POOLED_IDS, WorkerConfig
from oarlock.workers.preflight import open_model
from oarlock.workers.protocol import max_output_bytes
from oarlock.workers.transformers_backend import choice, tested
from oarlock.workers.transformers_backend.class_description import AttentionCall, ClassDescription, ClassTensor
from tests.unit.server.hub.fake_hub import FakeHub
from tests.unit.workers.models.test_delta_families import QWEN as QWEN_3_5

QWEN_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

SLOT_BYTES_OF_QWEN_3_5 = 19_537_920


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    return str(tmp_path)


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status = main(["plan", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def settings_of(command: str) -> dict[str, Any]:
    """Settings that our parser reads from a command."""
    words = shlex.split(command)
    assert words[0] == "oarlock"
    parser, parsers = _parsers()
    return given_settings(parse(parser, parsers["serve"], words[1:]))


def test_a_tokenizer_is_said_to_be_left_unread_and_stays_in_the_command(model, capsys) -> None:
    words = ["plan", model, "--gpus", "1xH100", "--json"]
    assert main(words) == 0
    without = capsys.readouterr()
    assert main([*words, "--tokenizer", "/nowhere"]) == 0
    given = capsys.readouterr()
    assert "--tokenizer is not looked at" in given.err and "--tokenizer" not in without.err
    found, plain = json.loads(given.out), json.loads(without.out)
    assert settings_of(found.pop("command")) == settings_of(plain.pop("command")) | {"tokenizer": "/nowhere"}
    assert found == plain


def test_every_layout_uses_all_gpus_and_the_command_is_of_the_first(model, capsys) -> None:
    flags = ["--kv-cache-dtype", "fp8", "--max-model-len", "8192", "--no-enable-prefix-caching"]
    status, found = plan(capsys, model, "--gpus", "4x4090", *flags)
    layouts = found["layouts"]
    assert status == 0 and found["fits"]
    assert sorted(tuple(one[name] for name in SIZES) for one in layouts) == [
        (1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1),
    ]  # fmt: skip
    best = layouts[0]
    given = settings_of(found["command"])
    assert {name: given.pop(name, 1) for name in SIZES} == {name: best[name] for name in SIZES}
    assert given == {
        "model": model,
        "device": "cuda",
        "kv_cache_dtype": "fp8",
        "max_model_len": 8192,
        "enable_prefix_caching": False,
    }
    assert best["tokens_per_s_of_all_users"] == max(one["tokens_per_s_of_all_users"] for one in layouts)
    assert best["users"]["4096"] == best["data_parallel_size"] * (
        best["kv_tokens"] // best["data_parallel_size"] // 4096
    )
    assert best["users"]["32768"] == 0, "no sequence may be so long"


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_told_what_makes_it_fit(model, capsys) -> None:
    status, found = plan(capsys, model, "--gpus", "1xT4")
    assert status == 1 and found["command"] is None and found["layouts"][0]["missing_bytes"] > 2 << 30
    changes = [remedy["change"] for remedy in found["remedies"]]
    assert changes[:2] == ["--quantization int8", "--quantization int4"]
    assert "2 GPUs of this kind (--tensor-parallel-size 2)" in changes
    for change in ("--quantization int4", "--quantization int8"):
        status, found = plan(capsys, model, "--gpus", "1xT4", *change.split())
        assert status == 0 and settings_of(found["command"])["quantization"] == change.split()[1]
    assert plan(capsys, model, "--gpus", "2xT4", "-tp", "2")[0] == 0
    status, found = plan(capsys, model, "--gpus", "1x19GB")
    shorter = [remedy["change"] for remedy in found["remedies"] if "--max-model-len" in remedy["change"]]
    assert status == 1 and shorter
    assert plan(capsys, model, "--gpus", "1x19GB", *shorter[0].split())[0] == 0


def test_a_host_shares_its_memory_among_ranks_and_replicas(model) -> None:
    opened, memory = open_model_of(model), Memory("cpu", 100 << 30)
    one = capacity(opened, {}, memory)
    two = capacity(opened, {"tensor_parallel_size": 2}, memory)
    copies = capacity(opened, {"data_parallel_size": 2}, memory)
    assert 0.45 < two.kv_bytes / one.kv_bytes < 0.51 and 0.95 < two.kv_tokens / one.kv_tokens < 1.01
    assert copies.kv_tokens < one.kv_tokens / 2
    given = capacity(opened, {"kv_cache_bytes": 200 << 30}, memory)
    assert given.refusal is not None and given.missing_bytes > 100 << 30


@pytest.mark.slow
def test_vectors_take_shared_memory_of_the_host(model, capsys) -> None:
    flags = ["--cpu", "--memory", "100GB", "--bandwidth", "10GB", "--max-num-seqs", "32"]
    generates, embeds = (plan(capsys, model, *flags, *more)[1] for more in ([], ["--runner", "pooling"]))
    (before,), (after,) = generates["layouts"], embeds["layouts"]
    config = open_model_of(model).config.with_(hidden_size=3584, max_num_seqs=32)
    without = max_output_bytes(config.with_(hidden_size=0)) - 4 * 32 * MAX_POOLED_IDS
    of_a_slot = max_output_bytes(config) - without
    assert before["vector_bytes"] == 0 and after["vector_bytes"] == 4 * of_a_slot, "of a ring of four slots"
    assert settings_of(embeds["command"])["runner"] == "pooling"
    copies = plan(capsys, model, *flags, "--runner", "pooling", "--data-parallel-size", "2")[1]["layouts"][0]
    assert copies["vector_bytes"] == after["vector_bytes"], "of each replica"
    lacking = [
        plan(capsys, model, "--cpu", "--memory", "8GB", "--bandwidth", "10GB", *more)[1]["layouts"][0]["missing_bytes"]
        for more in ([], ["--runner", "pooling"])
    ]
    config = config.with_(max_num_seqs=64)
    of_a_slot = max_output_bytes(config) - max_output_bytes(config.with_(hidden_size=0)) + 4 * 64 * MAX_POOLED_IDS
    assert lacking[1] - lacking[0] == 4 * of_a_slot
    assert main(["plan", model, *flags, "--classifier-from-token", "no", "yes"]) == 0
    assert "of the host's shared memory for each replica" in capsys.readouterr().out
    on_device = [
        plan(capsys, model, "--gpus", "1xH100", *more)[1]["layouts"][0] for more in ([], ["--runner", "pooling"])
    ]
    assert on_device[0]["kv_tokens"] == on_device[1]["kv_tokens"] and on_device[1]["vector_bytes"]


def open_model_of(model: str) -> Any:
    from oarlock.workers.config import WorkerConfig

    return open_model(WorkerConfig(model, load_format="dummy"))


@pytest.mark.slow
def test_only_the_description_of_a_hub_model_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"config.json": json.dumps(QWEN_7B).encode(), "model.safetensors": b"weights", "tokenizer.json": b"{}"}
    with FakeHub(files) as hub:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        flags = ["--gpus", "2xL4", "--download-dir", str(tmp_path)]
        status, found = plan(capsys, hub.model, *flags)
        assert status == 0 and found["model"]["parameters"] == 7_615_616_512
        assert hub.names_asked == {"config.json"}
        hub.refuse = (401, {})
        assert main(["plan", "owner/other", *flags]) == 2
        cause, fix = capsys.readouterr().err.splitlines()
        assert cause.startswith("error: ") and "owner/other" in cause and fix.startswith("fix: ")


def test_text_names_the_machine_the_users_and_the_command(model, capsys) -> None:
    assert main(["plan", model, "--gpus", "2x24GB"]) == 0
    text = capsys.readouterr().out
    assert "7.62 billion parameters in bfloat16" in text and "2 x 24GB" in text and "users at 32k" in text
    assert "give --bandwidth, or a GPU by its name" in text and f"oarlock serve {model}" in text


def test_a_multimodal_model_is_named_beside_its_text_part(tmp_path, capsys) -> None:
    wrapper = {
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "text_config": {**QWEN_7B, "model_type": "qwen2"},
    }
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    assert main(["plan", str(tmp_path), "--gpus", "2xL4"]) == 0
    first = "Qwen2ForCausalLM, the text part of LlavaOnevisionForConditionalGeneration, 7.62 billion parameters"
    assert capsys.readouterr().out.startswith(first)


def test_a_class_without_a_description_has_its_code_and_a_look_for_each_number_of_ranks(
    model, capsys, monkeypatch
) -> None:
    def look(directory: Path, ranks: int, **_: object) -> ClassDescription:
        sizes = {"ranks": ranks, "layers": 1, "vocab_size": 512, "hidden_size": 64, "longest_length": 4096}
        pages = AttentionCall(0, "layers.0", 4, 2, 16, 16, None, None, None, False, is_divided=ranks <= 2)
        matrix = ClassTensor("layers.0.q_proj.weight", (64, 64), "linear")
        return ClassDescription("NewForCausalLM", "new", **sizes, attention=(pages,), tensors=(matrix,))

    monkeypatch.setattr(choice, "tested_classes", lambda: {"Qwen2ForCausalLM": tested.Tested(4, None)})
    monkeypatch.setattr(choice, "class_description", look)
    flags = [model, "--model-impl", "transformers", "--gpus", "4xL4"]
    status, found = plan(capsys, *flags)
    assert status == 0 and found["model"]["served_by"] == "transformers" and "transformers" in found["command"]
    sizes = {tuple(one[name] for name in SIZES): one["kv_bytes_per_token"] for one in found["layouts"]}
    assert sizes == {(1, 1, 4): 128, (2, 1, 2): 64, (4, 1, 1): 128}, "no stages, and each rank of four has all heads"
    assert main(["plan", *flags, "--tensor-parallel-size", "2"]) == 0
    assert "Computed by transformers' code (NewForCausalLM): slower" in (text := capsys.readouterr().out)
    assert "every rank holds the weights of all layers" in text


@pytest.mark.parametrize(
    ("longest", "flags", "heads"),
    [
        (32_768, ["--gpus", "2xL4"], ["users at 4k", "users at 32k", "tokens/s, 1 user", "all at 4,096"]),
        (16_384, ["--gpus", "2xL4"], ["users at 4k", "tokens/s, 1 user", "all at 4,096"]),
        (2_048, ["--gpus", "2xL4"], ["users at 2k", "tokens/s, 1 user", "all at 2,048"]),
        (500, ["--gpus", "2xL4"], ["users at 500", "tokens/s, 1 user", "all at 500"]),
        (32_768, ["--gpus", "2x24GB"], ["users at 4k", "users at 32k"]),
        (2_048, ["--gpus", "2x24GB"], ["users at 2k"]),
        (2_048, ["--gpus", "2x24GB", "--bandwidth", "300GB"], ["users at 2k", "tokens/s, 1 user", "all at 2,048"]),
    ],
)
def test_a_plan_that_fits_has_a_value_in_every_column(model, capsys, longest, flags, heads) -> None:
    """No column is for a context that the model does not have, or for speeds that nobody can know."""
    Path(model, "config.json").write_text(json.dumps(QWEN_7B | {"max_position_embeddings": longest}))
    assert main(["plan", model, *flags]) == 0
    text = capsys.readouterr().out
    head, *rows = [line for line in text.split("\n\n")[1].splitlines() if line]
    columns = re.split(r" {2,}", head)
    assert columns[6:] == heads
    fitting = [re.split(r" {2,}", row) for row in rows if "short" not in row]
    assert fitting and all(len(row) == len(columns) and "-" not in row for row in fitting), text


def test_both_ways_to_share_experts_are_shown_with_their_bytes(tmp_path: Path, capsys) -> None:
    """Four ranks with 2 of 8 experts each, or a quarter of all: a token reads 2 / 8 of quarters, or 1 whole or both."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "decoder_sparse_step": 1}
    shape = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}
    mixture = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B | experts | shape | mixture))
    words = ["plan", str(tmp_path), "--gpus", "4xH100"]
    assert main([*words, "-tp", "4"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Experts of a rank: ")]
    held = 2 * 3 * 8 * 1024 * 1024 * 2 // 4
    assert f"{human_bytes(held)} cut along their width (a step reads {human_bytes(held // 4)} of 1 and " in line
    whole = re.search(r"whole, with --enable-expert-parallel \(a step reads ([0-9.]+) MiB of 1 and", line)
    assert whole is not None and held / 2 < float(whole[1]) * 2**20 < held  # 1 in 7 draws has both on one rank
    assert main([*words, "-tp", "1"]) == 0 and "Experts of a rank" not in capsys.readouterr().out


def test_memory_of_adapters_and_its_part_for_experts_are_shown(tmp_path: Path, capsys) -> None:
    """At rank 16, in bfloat16: 8 experts of 3 matrices, and q, k, v and o, of each of 2 layers; embedding and head."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "decoder_sparse_step": 1}
    shape = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}
    mixture = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B | experts | shape | mixture | {"vocab_size": 1024}))
    words = [str(tmp_path), "--cpu", "--memory", "8GB", "--bandwidth", "1GB", "--dtype", "bfloat16"]
    words += ["--enable-lora", "--max-loras", "4"]
    status, found = plan(capsys, *words)
    (one,) = found["layouts"]
    attention, tables = 2 * 4 * 2048, 2 * 2048
    slot = 32 * (attention + tables + 2 * 8 * 3 * 2048)
    assert status == 0 and one["adapter_slots"] == 4 and one["bytes_per_adapter_slot"] == slot
    assert one["adapter_copies_bytes"] == 5 * slot and "--max-loras 4" in found["command"]
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert f"Adapters: 4 slot(s) of {human_bytes(slot)} on each rank, for rank 16; up to 5 copies" in text
    fewer = human_bytes(32 * (attention + tables))
    assert f"takes {fewer}: --lora-target-modules embed_tokens q_proj k_proj v_proj o_proj lm_head." in text
    chosen = ["--lora-target-modules", "q_proj", "k_proj", "--max-lora-rank", "8"]
    assert main(["plan", *words, *chosen, "--lora-target-modules", "qkv_proj"]) == 0
    text = capsys.readouterr().out
    assert settings_of(text.splitlines()[-1].strip())["lora_target_modules"] == ("q_proj", "k_proj", "qkv_proj")
    assert f"of {human_bytes(16 * 2 * 3 * 2048)} on each rank, for rank 8" in text and "experts" not in text
    status, found = plan(capsys, *words, "--max-loras", "200", "--max-lora-rank", "64")
    slots = [remedy["change"] for remedy in found["remedies"] if remedy["change"].startswith("--max-loras")]
    assert status == 1 and slots == ["--max-loras 100"]
    assert plan(capsys, *words, "--max-lora-rank", "64", *slots[0].split())[0] == 0
    assert main(["plan", *words, "--lora-modules", "tone=hub/tone"]) == 0
    assert "note: adapter tone is not looked at: hub/tone is neither" in capsys.readouterr().err
    assert main(["plan", *words, "--lora-modules", "tone=/nowhere"]) == 3
    assert "error: tone: The adapter /nowhere is neither" in capsys.readouterr().err


@pytest.mark.slow
def test_layouts_that_a_model_does_not_allow_are_left_out(tmp_path: Path, capsys) -> None:
    from tests.golden.tiny_models import tiny_config

    tiny_config("gemma4_text", architectures=["Gemma4ForCausalLM"]).save_pretrained(tmp_path)
    status, found = plan(capsys, str(tmp_path), "--gpus", "2xH100")
    assert status == 0
    assert [tuple(one[name] for name in SIZES) for one in found["layouts"]] == [(1, 1, 2), (2, 1, 1)]
    assert main(["plan", str(tmp_path), "--gpus", "2xH100", "-pp", "2"]) == 3
    assert "pipeline_parallel_size 2 does not fit this model" in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_does_not_read_whole_tables(tmp_path: Path) -> None:
    from tests.golden.tiny_models import tiny_config

    read = []
    for ids in (330, 33_000):
        changes = {"architectures": ["Gemma4ForCausalLM"], "vocab_size_per_layer_input": ids}
        tiny_config("gemma4_text", **changes).save_pretrained(tmp_path)
        model = open_model(WorkerConfig(str(tmp_path), load_format="dummy", device="cpu", dtype="float32"))
        read += [work.weight_bytes for work in work_of(model, capacity(model, {}, Memory("cpu", 1 << 34)).config)]
    assert read[0] == read[1] > 0


_HEADS = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50, "head_dim": 16}


@pytest.mark.parametrize(
    ("config", "whole"),
    [
        # the projections of queries and of keys and values to their latents
        ({"architectures": ["YoutuForCausalLM"], "num_attention_heads": 8, "q_lora_rank": 32, "kv_lora_rank": 48,
          "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}, 64 * (32 + 48 + 16)),
        # keys and values of the only head
        ({"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": 1}, 64 * (16 + 16)),
    ],
    ids=["latents", "one head of keys"],
)  # fmt: skip
def test_ranks_compute_what_they_do_not_divide(tmp_path: Path, config: dict[str, Any], whole: int) -> None:
    """`whole`: number of weights of a layer that every rank has."""
    (tmp_path / "config.json").write_text(json.dumps({**_HEADS, **config}))

    def operations(size: int) -> float:
        one = WorkerConfig(str(tmp_path), load_format="dummy", device="cpu", dtype="float32")
        model = open_model(one.with_(tensor_parallel_size=size))
        (work,) = work_of(model, capacity(model, {}, Memory("cpu", 1 << 34)).config)
        return work.token_ops

    whole *= 2 * _HEADS["num_hidden_layers"]
    assert operations(4) == (operations(1) - whole) / 4 + whole


def test_a_plan_shows_the_slots_of_recurrent_state(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3_5))
    flags = [str(tmp_path), "--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "32768"]
    _, found = plan(capsys, *flags, "--gpus", "2xL4", "-tp", "2")
    (one,) = found["layouts"]
    assert one["state_slots"] == 4 * 64 and one["bytes_per_state_slot"] == SLOT_BYTES_OF_QWEN_3_5 // 2
    assert main(["plan", *flags, "--gpus", "L4", "--kv-cache-memory", "1GiB"]) == 0
    text = capsys.readouterr().out
    assert "24 slots of 18.6 MiB; a running user has two, the others are checkpoints." in text
    assert "--max-num-seqs is lowered from 64 to 6, so that states fit." in text


def test_a_plan_explains_why_the_context_is_shorter_than_the_model_s(tmp_path: Path, capsys) -> None:
    """An indexer that is not supported would choose among the tokens of longer contexts."""
    from tests.golden.tiny_models import tiny_config

    tiny_config("deepseek_v32", architectures=["DeepseekV32ForCausalLM"]).save_pretrained(tmp_path)
    words = ["plan", str(tmp_path), "--gpus", "H100"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "context 48 tokens" in text and "The context ends at 48 tokens: an indexer, which is not supported" in text
    assert main([*words, "--max-model-len", "32"]) == 0 and "an indexer" not in capsys.readouterr().out


def test_help_of_every_command_stays_quick() -> None:
    """The modules that `plan` computes with are imported only when it runs."""
    import subprocess
    import sys

    code = "import sys; from oarlock.server.cli.main import main; main(['plan', '--help']) "
    watch = "\nprint([name for name in ('numpy', 'torch', 'oarlock.workers.capacity') if name in sys.modules])"
    wrapped = f"try:\n    {code}\nexcept SystemExit: pass{watch}"
    found = subprocess.run([sys.executable, "-c", wrapped], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("text", ["H100", "1xh100", "1 x NVIDIA H100", "h100-sxm"])
def test_gpus_go_by_the_names_that_people_use(text: str) -> None:
    assert parse_gpus(text) == (1, GPUS["H100"])
    assert parse_gpus("8xRTX 4090") == (8, GPUS["4090"]) and parse_gpus("2xRTX_3090")[1] is GPUS["3090"]
    assert parse_gpus("2x24GB")[1].memory == 24 * 10**9 and parse_gpus("24GiB")[1].memory == 24 << 30


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--gpus", "2xH1000"], "no GPU is known by the name 'H1000'. Did you mean"),
        (["--gpus", "0xH100"], "0 is not a number of GPUs from 1 to 64"),
        (["--gpus", ""], "--gpus is empty"),
        (["--gpus", "H100", "--cpu"], "--gpus and --cpu exclude one another"),
        (["--cpu", "--memory", "much"], "--memory is 'much'"),
        (["--cpu", "--bandwidth", "0"], "--bandwidth is '0'"),
        (["--cpu", "--tflops", "-1"], "--tflops is '-1'"),
        (["no/such/model", "--cpu", "--bandwidth", "1GB"], "no/such/model is neither a directory"),
    ],
)
def test_mistakes_are_one_line_of_cause_and_one_of_fix(
    capsys: pytest.CaptureFixture[str], arguments: list[str], cause: str
) -> None:
    status = main(["plan", *arguments])
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert (status, shown.out, len(lines)) == (2, "", 2), shown.err
    assert lines[0].startswith("error: ") and cause in lines[0] and lines[1].startswith("fix: ")
