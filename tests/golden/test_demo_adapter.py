"""The demo model's adapter: PEFT's files, complete and small, and the answers that its card shows."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
BASE, ADAPTER = (ROOT / "models" / name for name in ("oarlock-demo", "oarlock-demo-lora"))
CARD = (ADAPTER / "README.md").read_text("utf-8")
MAX_BYTES = 1_000_000
# The card's first block: a question, the demo model's answer, and the answer with the adapter, continued on more lines.
SHOWN = {who: " ".join(text.split()) for who, text in re.findall(r"^(\w+) {2,}(.*(?:\n {8,}.*)*)", CARD, re.MULTILINE)}


@pytest.fixture(scope="module")
def training() -> ModuleType:
    """The script that trained the adapter, which is not a part of a package."""
    folder = str(BASE / "training")
    sys.path.insert(0, folder)
    try:
        import train_demo_adapter

        return train_demo_adapter
    finally:
        sys.path.remove(folder)


def test_the_files_are_those_of_peft_and_fit_the_demo_model():
    config = json.loads((ADAPTER / "adapter_config.json").read_text("utf-8"))
    rank = config["r"]
    assert (config["peft_type"], config["task_type"], config["bias"]) == ("LORA", "CAUSAL_LM", "none")
    assert config["base_model_name_or_path"] == BASE.name and rank <= 16
    expected = {}
    with safe_open(BASE / "model.safetensors", "pt") as base:
        for name in base.keys():  # noqa: SIM118 - not a dictionary
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in config["target_modules"]:
                outputs, inputs = base.get_slice(name).get_shape()
                expected[f"base_model.model.{module}.lora_A.weight"] = [rank, inputs]
                expected[f"base_model.model.{module}.lora_B.weight"] = [outputs, rank]
    with safe_open(ADAPTER / "adapter_model.safetensors", "pt") as adapter:
        slices = {name: adapter.get_slice(name) for name in adapter.keys()}  # noqa: SIM118
        assert {name: part.get_shape() for name, part in slices.items()} == expected
        assert {part.get_dtype() for part in slices.values()} == {"BF16"} and adapter.metadata() == {"format": "pt"}
    assert len(expected) == 2 * 7 * 8
    assert sum(path.stat().st_size for path in ADAPTER.iterdir()) < MAX_BYTES


@pytest.mark.slow
def test_an_epoch_asks_once_for_every_name_that_is_not_held_out(training, monkeypatch):
    names = [f"module.name{number}" for number in range(340)] + ["os.path.join"]
    facts = [training.Fact(name, f"Do {name}.", f"Do {name}. Then stop.") for name in names]
    monkeypatch.setattr(training, "collect_facts", lambda *_: facts)
    data = training.Data(AutoTokenizer.from_pretrained(BASE), seed=0)
    trained, held_out = data.split
    assert len(trained) + len(held_out) == len(facts) and "os.path.join" in {fact.name for fact in held_out}
    batches = math.ceil(len(trained) / training.ROWS)
    epoch = [example for batch in itertools.islice(data.batches(), batches) for example in batch]
    answers = [data.tokenizer.decode(example.answer, skip_special_tokens=True).strip() for example in epoch]
    assert sorted(answers) == sorted(f"In short: Do {fact.name}." for fact in trained)


@pytest.mark.slow
def test_a_pair_adds_nothing_at_first_and_then_what_merging_adds(training, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    tokens = torch.arange(5, 25)[None]
    with torch.inference_mode():
        untouched = model(tokens).logits
        adapted = training.adapt(model)
        assert torch.equal(model(tokens).logits, untouched)
        for layer in adapted.values():
            layer.a.copy_(layer.a.bfloat16())
            layer.b.normal_(std=0.02).copy_(layer.b.bfloat16())
        (tmp_path / "out").mkdir()
        training.export(adapted, tmp_path / "out")
        merged = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
        training.merge(merged, tmp_path / "out")
        assert (model(tokens).logits - untouched).abs().max() > 0.1
        torch.testing.assert_close(merged(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True])
def test_the_card_shows_the_answers_with_and_without_the_adapter(training, adapted):
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.bfloat16).eval()
    if adapted:
        training.merge(model, ADAPTER)
    question, answer = SHOWN["user"], SHOWN["adapter" if adapted else "assistant"]
    for prompt in (training.plain_prompt(question), training.chat_prompt(question)):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64)[0, ids.shape[1] :]
        assert tokenizer.decode(written, skip_special_tokens=True).strip() == answer
        assert written[-1].item() in model.generation_config.eos_token_id
