"""Train the adapter in `models/oarlock-demo-lora` for the demo model, on a CPU in minutes.

The demo model answers with the opening of a docstring. The adapter changes the form of its answers to one short
sentence: `In short: Join two or more pathname components, inserting '/' as needed.` Only pairs of low-rank matrices
(LoRA) are trained, next to the linear layers of the frozen model. They are written as PEFT writes them. Names that are
held out of the training measure whether the adapter has learned the form or only the answers.

    python models/oarlock-demo/training/train_demo_adapter.py --out models/oarlock-demo-lora
    python models/oarlock-demo/training/train_demo_adapter.py --out models/oarlock-demo-lora --evaluate
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_corpus import (
    END_OF_TEXT,
    PHRASINGS,
    SYSTEM_MESSAGES,
    TURN_END,
    Fact,
    chat_prompt,
    collect_facts,
    plain_prompt,
    source_files,
    split_held_out,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from train_demo_model import ANSWER_TOKENS, Example, accuracy, answer_loss
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2ForCausalLM

BASE = Path(__file__).parents[1]
RANK, ALPHA = 8, 16
# Sorted, as PEFT writes the modules of a set.
TARGETS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
PREFIX = "base_model.model."  # of PEFT's names of tensors
ROWS = 16  # questions in a batch
HELD_OUT = 300  # names that the training does not see, drawn with the seed; `os.path.join` is one more
OPENING = "In short: "  # of every answer; the first sentence of the docstring follows, and nothing else


class LowRankLinear(nn.Module):
    """A frozen linear layer plus `scale * B(A x)`; B starts at zero, so the sum starts as the layer's own result."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        self.a = nn.Parameter(torch.empty(rank, layer.in_features))
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., inputs] -> [..., outputs]."""
        return self.layer(x) + F.linear(F.linear(x, self.a), self.b) * self.scale


def adapt(model: Qwen2ForCausalLM) -> dict[str, LowRankLinear]:
    """Freeze the model and replace its target layers. Return the new layers by the names of the old ones."""
    model.requires_grad_(False)
    adapted = {}
    for name, layer in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in TARGETS and isinstance(layer, nn.Linear):
            adapted[name] = LowRankLinear(layer, RANK, ALPHA / RANK)
            setattr(model.get_submodule(parent), last, adapted[name])
    return adapted


@dataclass(frozen=True)
class Data:
    """The demo model's facts in the adapter's form, and the batches of each epoch."""

    tokenizer: PreTrainedTokenizerFast
    seed: int

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    @cached_property
    def split(self) -> tuple[list[Fact], list[Fact]]:
        """Facts to train on, and facts that are held out; `os.path.join`, the README's example, is held out."""
        files = split_held_out(source_files(), self.seed)[1]
        collected = collect_facts(lambda text: len(self.ids(text)), files, ANSWER_TOKENS)
        facts = [Fact(fact.name, fact.sentence, f"{OPENING}{fact.sentence}") for fact in collected]
        drawn = random.Random(f"adapter-{self.seed}").sample([fact.name for fact in facts], HELD_OUT)
        held_out = {"os.path.join", *drawn}
        return [fact for fact in facts if fact.name not in held_out], [fact for fact in facts if fact.name in held_out]

    def batches(self) -> Iterator[list[Example]]:
        """Yield batches of questions of about one length, without end; an epoch has every trained fact once."""
        epoch = 0
        while True:
            draw = random.Random(f"adapter-questions-{self.seed}-{epoch}")
            examples = [self.example(fact, draw) for fact in self.split[0]]
            draw.shuffle(examples)
            examples.sort(key=len)
            batches = [examples[start : start + ROWS] for start in range(0, len(examples), ROWS)]
            draw.shuffle(batches)
            yield from batches
            epoch += 1

    def example(self, fact: Fact, draw: random.Random) -> Example:
        """Ask for the fact in one of the wordings and formats in which the demo model was trained."""
        question = draw.choice(PHRASINGS).format(fact.name)
        ends = self.tokenizer.get_vocab()
        if draw.random() < 0.45:
            return Example(self.ids(plain_prompt(question)), [*self.ids(f" {fact.answer}"), ends[END_OF_TEXT]])
        system = draw.choice(SYSTEM_MESSAGES) if draw.random() < 0.3 else None
        return Example(self.ids(chat_prompt(question, system)), [*self.ids(fact.answer), ends[TURN_END]])


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm up over 20 steps, then follow a cosine to 2 % of the peak."""
    return peak * min(1.0, (step + 1) / 20) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(args: argparse.Namespace) -> None:
    """Train the pairs and write the adapter, which is also written after every `--save-steps` steps."""
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).train()
    adapted = adapt(model)
    data = Data(PreTrainedTokenizerFast.from_pretrained(BASE), args.seed)
    weights = [weight for layer in adapted.values() for weight in (layer.a, layer.b)]
    optimizer = torch.optim.AdamW(weights, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    print(f"{sum(map(Tensor.numel, weights))} weights, {len(data.split[0])} names", flush=True)
    started, mean = time.monotonic(), 0.0
    for step, batch in zip(range(args.steps), data.batches(), strict=False):
        optimizer.param_groups[0]["lr"] = learning_rate(step, args.steps, args.learning_rate)
        with torch.autocast("cpu", torch.bfloat16):
            loss = answer_loss(model, batch, torch.device("cpu"))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.item() if step == 0 else 0.95 * mean + 0.05 * loss.item()
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}/{args.steps} loss {mean:.4f} {time.monotonic() - started:.0f} s", flush=True)
        if (step + 1) % args.save_steps == 0 or step + 1 == args.steps:
            export(adapted, args.out)


def export(adapted: dict[str, LowRankLinear], out: Path) -> None:
    """Write PEFT's two files, the tensors in bfloat16, each file whole or not at all."""
    tensors = {}
    for name, layer in sorted(adapted.items()):
        for half, weight in (("A", layer.a), ("B", layer.b)):
            tensors[f"{PREFIX}{name}.lora_{half}.weight"] = weight.detach().to(torch.bfloat16).contiguous()
    config = {
        "base_model_name_or_path": "oarlock-demo",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": list(TARGETS),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    partial = out / ".partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(out / "adapter_model.safetensors")
    partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.replace(out / "adapter_config.json")


def merge(model: Qwen2ForCausalLM, adapter: Path) -> None:
    """Add `scale * B A` to the weights of the model, in float32, rounded once to the model's dtype."""
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in sorted({name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors}):
        a, b = (tensors[f"{PREFIX}{name}.lora_{half}.weight"].float() for half in "AB")
        weight = model.get_parameter(f"{name}.weight").data
        weight.copy_(weight.float() + config["lora_alpha"] / config["r"] * (b @ a))


def evaluate(args: argparse.Namespace) -> None:
    """Count right answers of the merged model, in bfloat16: names that were held out, and as many that were not."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BASE)
    trained, held_out = Data(tokenizer, args.seed).split
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.bfloat16).eval()
    merge(model, args.out)
    draw = random.Random(f"adapter-evaluation-{args.seed}")
    results: dict[str, float] = {"names": len(trained), "held_out_names": len(held_out)}
    for kind, facts in (("held_out", held_out), ("trained", trained)):
        chosen = draw.sample(facts, args.questions)
        questions = [
            {"name": fact.name, "question": draw.choice(PHRASINGS).format(fact.name), "answer": fact.answer}
            for fact in chosen
        ]
        results[f"{kind}_chat"] = accuracy(model, tokenizer, questions, chat=True)
        results[f"{kind}_plain"] = accuracy(model, tokenizer, questions, chat=False)
    print(json.dumps(results, indent=2))


def main() -> None:
    """Parse the command line, then train or evaluate."""
    parser = argparse.ArgumentParser(description="Train or evaluate the adapter of Oarlock's demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished adapter")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-steps", type=int, default=50, help="steps between two writes of the adapter")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--questions", type=int, default=100, help="questions of each kind that --evaluate asks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--evaluate", action="store_true", help="measure the adapter in --out instead of training")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.evaluate:
        evaluate(args)
    else:
        train(args)


if __name__ == "__main__":
    main()
