"""Distinction of rounding from faults, the part that a rank holds, and the report of them."""

import json
from pathlib import Path

import pytest
import torch

from oarlock.workers.attention.forward_batch import BlockTables, ForwardBatch
from oarlock.workers.models.registry import read_spec
from oarlock.workers.runner.trial_steps import TrialMemory
from oarlock.workers.verify import __main__ as command
from oarlock.workers.verify.compare import (
    LARGEST_LIMIT,
    LIMIT,
    CompletionResult,
    RankError,
    TensorResult,
    VerifyResults,
    columns_of,
    compare_tokens,
    tensor_names,
)
from oarlock.workers.verify.halves import HalfDifference, Halves, same_bits
from oarlock.workers.verify.rank import blocks_needed, steps_of
from oarlock.workers.verify.report import VerifyReport, shown, table
from oarlock.workers.verify.request import Text
from tests.golden.tiny_models import make_tiny
from tests.house.rules import ROOT
from tests.unit.workers.verify.cases import PROMPTS, VerifyCase


def row(
    tensor: str,
    ratio: float,
    rms: float,
    layer: int | None = 1,
    agree: bool = True,
    head: float = 0.5,
    limit: float = LARGEST_LIMIT,
) -> TensorResult:
    right, other = RankError(0, 1e-6, 1e-6, 0.5, 0.5), RankError(1, 1e-6, 1e-6, ratio, rms, head, limit)
    return TensorResult(layer, tensor, (right, other), agree)


@pytest.mark.parametrize(
    ("ratio", "rms", "head", "limit", "result"),
    [
        (1.0, 1.0, 1.0, 4.0, "ok"),
        (4.0, 2.0, 2.0, 4.0, "ok"),
        (4.1, 1.0, 1.0, 4.0, "differs"),
        (1.0, 2.1, 1.0, 4.0, "differs"),
        (1.0, 1.0, 2.1, 4.0, "differs"),
        (2.1, 1.0, 1.0, 2.0, "differs"),
        (float("inf"), 1.0, 1.0, 4.0, "differs"),
    ],
)
def test_a_result_depends_on_every_error(ratio: float, rms: float, head: float, limit: float, result: str) -> None:
    measured = row("q", ratio, rms, head=head, limit=limit)
    assert measured.result == result
    assert measured.wrong_ranks == (() if result == "ok" else (1,))


def test_the_limits_match_the_document() -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text()
    assert (LIMIT, LARGEST_LIMIT) == (2.0, 4.0)
    assert "at most twice theirs" in page and "at most four times" in page


def test_ranks_that_disagree_are_a_fault_even_within_the_bound() -> None:
    measured = row("o_proj", 1.0, 1.0, agree=False)
    assert measured.result == "ranks disagree"
    assert VerifyResults([row("q", 1, 1), measured]).first_fault is measured


def test_bits_are_compared_and_not_values() -> None:
    nan = torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_the_table_shows_the_worst_of_a_layer_and_all_of_a_faulty_one() -> None:
    right = [row("q", 1.0, 0.5, 0), row("k", 1.5, 0.5, 0), row("v", 1.2, 0.5, 0)]
    faulty = [row("q", 1.0, 0.5), row("k", 90.0, 80.0), row("v", 1.2, 0.5)]
    rows = shown(VerifyResults([row("embedding", 0, 0, None), *right, *faulty, row("logits", 99, 99, None)]))
    assert [one.name for one in rows] == ["embedding", "0.k", "1.q", "1.k", "1.v", "logits"]
    assert table(rows)[4].split() == ["1", "k", "1", "1.00e-06", "90.00", "80.00", "differs"]


def test_parts_of_ranks_cover_every_tensor_and_replicate_kv_heads(tmp_path: Path) -> None:
    spec = read_spec(str(make_tiny(tmp_path, "qwen2", vocab_size=303)))  # 8 heads of 8, 4 KV heads
    assert [columns_of("k", spec, rank, 8).start for rank in range(8)] == [0, 0, 8, 8, 16, 16, 24, 24]
    for tensor, width in (("q", 64), ("attention", 64), ("gate_up", 96), ("logits", 303)):
        parts = [columns_of(tensor, spec, rank, 4) for rank in range(4)]
        assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
        assert (parts[0].start, parts[-1].stop) == (0, width)
    assert len(tensor_names(spec)) == 3 * 13 + 3


def test_known_text_is_fed_as_prompts_and_then_token_by_token() -> None:
    text = Text([[1, 2, 3], [4]], [[5, 6, 7], [8, 9]])
    steps = list(steps_of(text, block_size=2))
    assert [step.token_ids.tolist() for step, _ in steps] == [[1, 2, 3, 4], [5, 8], [6]]
    assert [rows for _, rows in steps][1:] == [[(0, 3), (1, 1)], [(0, 4)]]
    assert steps[1][0].seq_lens.tolist() == [4, 2]
    slots = []
    for step, _ in steps:
        batch = ForwardBatch.from_step(step, BlockTables.of_step(step, 2, torch.device("cpu")))
        slots += batch.slots[0].tolist()
    assert len(set(slots)) == len(slots) and min(slots) >= 2 and max(slots) < 2 * blocks_needed(text, 2)
    pairs = list(steps_of(text, 2, TrialMemory((0,), True)))
    states = [step for step, _ in pairs]
    assert pairs[1][1] == [(0, 1), (0, 2)]  # the end of the first prompt, from a checkpoint after its first token
    assert [step.state_saves.tolist() for step in states] == [[[0, 1, 3]], [], [], []]
    assert [step.state_reads.tolist() for step in states] == [[0, 0], [3], [1, 5], [2]]
    assert [step.state_writes.tolist() for step in states] == [[2, 5], [1], [2, 4], [1]]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> VerifyCase:
    folder = tmp_path_factory.mktemp("model")
    return VerifyCase(make_tiny(folder, "llama", seed=2, dtype=torch.bfloat16), folder / "verify", "bfloat16")


@pytest.mark.slow
def test_a_near_tie_is_no_fault_and_any_other_token_is(case: VerifyCase) -> None:
    case.run(1)
    text = Text.read(case.folder)
    logits = logits_of(case)
    at = len(PROMPTS[0]) - 1
    order = logits[at].argsort(descending=True).tolist()
    assert text.outputs[0][0] == order[0]
    answers = [list(output) for output in text.outputs]
    saved = (case.folder / "truth-ends.safetensors").read_bytes()
    answers[0][0] = order[-1]
    (case.folder / "tokens.json").write_text(json.dumps(answers))
    found = list(compare_tokens(case.folder, "bfloat16"))
    assert [token.result for token in found] == ["differs", "ok", "ok"]
    assert found[0].first_difference == 0 and found[0].gap > found[0].allowed > 0
    make_tie(case, at, order[0], order[-1])
    found = list(compare_tokens(case.folder, "bfloat16"))
    assert [(token.result, token.near_ties) for token in found] == [("ok", 1), ("ok", 0), ("ok", 0)]
    (case.folder / "truth-ends.safetensors").write_bytes(saved)


def logits_of(case: VerifyCase) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(case.folder / "truth-ends.safetensors")["logits"]


def make_tie(case: VerifyCase, at: int, one: int, other: int) -> None:
    from safetensors.torch import load_file, save_file

    path = case.folder / "truth-ends.safetensors"
    tensors = load_file(path)
    tensors["logits"][at, other] = tensors["logits"][at, one] - 1e-6
    save_file(tensors, path)


@pytest.mark.slow
def test_a_report_is_complete_json_and_a_table(case: VerifyCase) -> None:
    comparison, causes = case.run(2)
    report = VerifyReport("tiny", "LlamaForCausalLM", "bfloat16", 2, 24, comparison, causes, {"torch": "2"}, 1.0)
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["ok"] is True and data["first_fault"] is None
    assert [entry["tensor"] for entry in data["tensors"]][:2] == ["embedding", "input_norm"]
    assert len(data["tensors"]) == len(tensor_names(read_spec(str(case.model))))
    assert data["tensors"][2]["ranks"][1]["rank"] == 1
    lines = report.to_text().splitlines()
    assert lines[-1] == "result: ok"
    assert any(line.startswith("ranks: the same bits in all") for line in lines)


def test_a_report_of_a_fault_names_it() -> None:
    comparison = VerifyResults(
        [row("embedding", 0, 0, None), row("k", float("inf"), 80.0)], [CompletionResult(0, 6, 1, 2, 3.0, 0.1)]
    )
    report = VerifyReport("tiny", "LlamaForCausalLM", "float32", 2, 24, comparison, ["k_proj"], {}, 1.0)
    text = report.to_text()
    assert "first difference: layer 1, k" in text and "likely cause: k_proj" in text and "result: differs" in text
    assert "prompt 1 differs at token 2, by a logit gap of 3 where rounding explains 0.1" in text
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["first_fault"] == {"layer": 1, "tensor": "k", "result": "differs", "ranks": [1]}
    assert data["tensors"][1]["ranks"][1]["largest_ratio"] is None


@pytest.mark.parametrize(
    ("halves", "line", "ok"),
    [
        (Halves(6, None), "the same bits after all 6 halves of layers, each in one call as it is served", True),
        (Halves(0, "it rains"), "layers are served by the operations that were compared, as it rains", True),
        (
            Halves(6, None, (HalfDifference(2, "mlp", 1, float("nan")),)),
            "the mlp half of layer 2 on rank 1 differs as it is served, by up to nan from its operations one by one",
            False,
        ),
    ],
)
def test_a_report_says_whether_layers_serve_as_they_were_compared(halves: Halves, line: str, ok: bool) -> None:
    comparison = VerifyResults([row("q", 1.0, 1.0)], [], halves)
    report = VerifyReport("tiny", "X", "float32", 2, 24, comparison, [], {}, 1.0)
    assert comparison.ok is ok
    lines = report.to_text().splitlines()
    assert f"halves: {line}" in lines and lines[-1] == f"result: {'ok' if ok else 'differs'}"
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["ok"] is ok and data["halves"]["compared"] == halves.compared


@pytest.mark.parametrize(("ratio", "code"), [(1.0, 0), (9.0, 1)])
def test_the_exit_code_follows_the_result(ratio: float, code: int, tmp_path: Path, monkeypatch, capsys) -> None:
    report = VerifyReport("tiny", "X", "float32", 2, 24, VerifyResults([row("q", ratio, 1.0)]), [], {}, 1.0)
    monkeypatch.setattr(command, "verify", lambda arguments: report)
    out = tmp_path / "report.json"
    assert command.main(["model", f"--output={out}"]) == code
    assert json.loads(out.read_text())["ok"] is (code == 0)
    assert capsys.readouterr().out.splitlines()[-1] == f"result: {'differs' if code else 'ok'}"


def test_a_report_that_cannot_be_written_is_a_mistake_in_two_lines(tmp_path: Path, monkeypatch, capsys) -> None:
    report = VerifyReport("tiny", "X", "float32", 2, 24, VerifyResults([row("q", 1.0, 1.0)]), [], {}, 1.0)
    monkeypatch.setattr(command, "verify", lambda arguments: report)
    assert command.main(["model", f"--output={tmp_path}"]) == 3
    out, error = capsys.readouterr()
    assert out.splitlines()[-1] == "result: ok"
    assert [line.split(":")[0] for line in error.splitlines()] == ["error", "fix"]
