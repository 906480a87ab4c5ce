"""Train the demo model in `models/oarlock-demo` from scratch, on a CPU in under an hour.

The model is a 9-million-parameter Qwen2 that has learned the openings of the standard library's docstrings by heart.
Training has two stages under one learning-rate schedule: plain language modelling over the standard library, then
questions and answers with the loss on the answers alone, and one step in twenty still plain text so that
completing code stays sensible. Everything is a function of the seed and the step number, so an interrupted run
started again goes on from its last checkpoint with the very batches it would have seen.

    python models/oarlock-demo/training/train_demo_model.py --out models/oarlock-demo
    python models/oarlock-demo/training/train_demo_model.py --out models/oarlock-demo --evaluate
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_corpus import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    PHRASINGS,
    SYSTEM_MESSAGES,
    TURN_END,
    VOCABULARY,
    Fact,
    builtin_docs,
    chat_prompt,
    collect_facts,
    plain_prompt,
    read_source,
    sample_questions,
    source_files,
    split_held_out,
    topics,
    train_tokenizer,
)
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from oarlock.base.paths import cache_home

ANSWER_TOKENS = 48  # the longest answer, and so the longest first sentence, that is taught
BLOCK = 512  # tokens in one row of plain text
TEXT_ROWS, QUESTION_ROWS = 16, 96  # rows in a batch of plain text, and of questions
TEXT_EVERY = 20  # in stage 2, one step in this many is plain text


@dataclass(frozen=True)
class Example:
    """A prompt with the answer to learn, both as token ids; the answer ends with its end-of-sequence token."""

    prompt: list[int]
    answer: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """A freshly initialised model in float32, its special token ids those of the tokenizer."""
    vocabulary = tokenizer.get_vocab()
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary[TURN_END],
        pad_token_id=vocabulary[END_OF_TEXT],
    )
    return Qwen2ForCausalLM(config)


class Data:
    """The corpus as token ids, and the batch of any given step."""

    def __init__(self, work_dir: Path, seed: int) -> None:
        self.seed = seed
        trained_files, self.held_out = split_held_out(source_files(), seed)
        texts = [read_source(path) for path in trained_files] + topics() + builtin_docs()
        saved = work_dir / "tokenizer"
        if not saved.exists():
            train_tokenizer(texts).save_pretrained(saved)
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(saved)
        self.end_of_text = self.tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        self.turn_end = self.tokenizer.convert_tokens_to_ids(TURN_END)
        self.blocks = self._pack(texts)
        self.facts = collect_facts(lambda text: len(self._ids(text)), self.held_out, ANSWER_TOKENS)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def _pack(self, texts: list[str]) -> torch.Tensor:
        """All the texts in a seeded order, end to end, cut into rows of `BLOCK` tokens."""
        encoded = self.tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        order = random.Random(f"pack-{self.seed}").sample(range(len(texts)), len(texts))
        stream = torch.tensor([token for index in order for token in [*encoded[index].ids, self.end_of_text]])
        return stream[: len(stream) // BLOCK * BLOCK].view(-1, BLOCK)

    @cached_property
    def held_out_rows(self) -> list[torch.Tensor]:
        """The held-out files, each cut by itself, so that no file is predicted from another."""
        rows = []
        for path in self.held_out:
            ids = torch.tensor([*self._ids(read_source(path)), self.end_of_text])
            rows.extend(row for row in ids.split(BLOCK) if len(row) > 1)
        return rows

    def text_batch(self, index: int) -> torch.Tensor:
        """The `index`-th batch of plain text; the rows come round in a new order each time."""
        per_epoch = len(self.blocks) // TEXT_ROWS
        epoch, position = divmod(index, per_epoch)
        order = random.Random(f"text-{self.seed}-{epoch}").sample(range(len(self.blocks)), len(self.blocks))
        return self.blocks[order[position * TEXT_ROWS : (position + 1) * TEXT_ROWS]]

    def question_batches(self, epoch: int) -> list[list[Example]]:
        """Every fact once, each asked in some way, in batches of questions of about one length."""
        draw = random.Random(f"questions-{self.seed}-{epoch}")
        examples = [self.example(fact, draw) for fact in self.facts]
        draw.shuffle(examples)
        examples.sort(key=len)
        batches = [examples[start : start + QUESTION_ROWS] for start in range(0, len(examples), QUESTION_ROWS)]
        draw.shuffle(batches)
        return batches

    def example(self, fact: Fact, draw: random.Random) -> Example:
        """The fact asked as a bare completion, or in a chat with or without a system message."""
        question = draw.choice(PHRASINGS).format(fact.name)
        if draw.random() < 0.45:
            return Example(self._ids(plain_prompt(question)), [*self._ids(f" {fact.answer}"), self.end_of_text])
        system = draw.choice(SYSTEM_MESSAGES) if draw.random() < 0.3 else None
        return Example(self._ids(chat_prompt(question, system)), [*self._ids(fact.answer), self.turn_end])


def text_loss(model: Qwen2ForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """The mean loss of predicting each next token of plain text."""
    hidden = model.model(input_ids=rows, use_cache=False).last_hidden_state[:, :-1]
    return F.cross_entropy(model.lm_head(hidden).flatten(0, 1).float(), rows[:, 1:].flatten())


def answer_loss(model: Qwen2ForCausalLM, batch: list[Example], device: torch.device) -> torch.Tensor:
    """The mean loss over the answers' tokens; the head runs at those positions alone, which saves half its cost.

    Rows are padded on the right, where a causal model's real positions cannot see the padding: no mask is needed.
    """
    width = max(map(len, batch))
    rows = torch.zeros((len(batch), width), dtype=torch.long)
    answers = torch.zeros((len(batch), width), dtype=torch.bool)
    for row, example in enumerate(batch):
        rows[row, : len(example)] = torch.tensor(example.prompt + example.answer)
        answers[row, len(example.prompt) : len(example)] = True
    rows, answers = rows.to(device), answers.to(device)
    hidden = model.model(input_ids=rows, use_cache=False).last_hidden_state[:, :-1]
    return F.cross_entropy(model.lm_head(hidden[answers[:, 1:]]).float(), rows[:, 1:][answers[:, 1:]])


def make_optimizers(model: Qwen2ForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding, the biases and the norms.

    One learning rate serves both: Muon's updates are scaled to the size that AdamW's have.
    """
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    rest = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Trainer:
    """One training run: the state that a checkpoint holds, and the loop."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.work_dir: Path = args.work_dir
        self.work_dir.mkdir(parents=True, exist_ok=True)
        self.data = Data(self.work_dir, args.seed)
        torch.manual_seed(args.seed)
        self.model = new_model(self.data.tokenizer).to(device)
        self.optimizers = make_optimizers(self.model, args.learning_rate)
        self.step, self.seconds = 0, 0.0
        self.losses: dict[str, float] = {}  # running means by kind of batch
        self.total = args.text_steps + args.question_steps
        self._load()

    @property
    def _checkpoint(self) -> Path:
        return self.work_dir / "checkpoint.pt"

    def _load(self) -> None:
        if not self._checkpoint.exists():
            return
        state = torch.load(self._checkpoint, map_location=self.device, weights_only=True)  # noqa: TID251 - its own file
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds, self.losses = state["step"], state["seconds"], state["losses"]
        print(f"resumed at step {self.step}", flush=True)

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "losses": self.losses,
        }
        temporary = self._checkpoint.with_suffix(".partial")
        torch.save(state, temporary)
        temporary.replace(self._checkpoint)

    def _learning_rate(self, step: int) -> float:
        """Warm-up, level through stage 1 and a fifth of stage 2, then a cosine down to nearly nothing."""
        level = self.args.text_steps + self.args.question_steps // 5
        if step < level:
            return self.args.learning_rate * min(1.0, (step + 1) / 40)
        progress = (step - level) / max(1, self.total - level)
        return self.args.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))

    def _batches(self) -> Iterator[tuple[str, torch.Tensor | list[Example]]]:
        """The batches from the current step on, each with its kind."""
        epoch, batches = -1, []
        for step in range(self.step, self.total):
            asked = step - self.args.text_steps
            if asked < 0 or asked % TEXT_EVERY == 0:
                yield "text", self.data.text_batch(step if asked < 0 else self.args.text_steps + asked // TEXT_EVERY)
                continue
            per_epoch = math.ceil(len(self.data.facts) / QUESTION_ROWS)
            wanted, position = divmod(asked - asked // TEXT_EVERY - 1, per_epoch)
            if wanted != epoch:
                epoch, batches = wanted, self.data.question_batches(wanted)
            yield "answer", batches[position]

    def run(self) -> None:
        """Train to the last step, reporting, checkpointing and writing snapshots of the model on the way."""
        self.model.train()
        saved_at = time.monotonic()
        for kind, batch in self._batches():
            started = time.monotonic()
            loss = self._update(batch)
            self.losses[kind] = 0.98 * self.losses.get(kind, loss) + 0.02 * loss
            self.step += 1
            self.seconds += time.monotonic() - started
            if self.step % 20 == 0:
                self._report(batch, time.monotonic() - started)
            if time.monotonic() - saved_at > self.args.save_minutes * 60:
                self._save()
                export(self.model, self.data.tokenizer, self.args.out)
                saved_at = time.monotonic()
        self._save()
        export(self.model, self.data.tokenizer, self.args.out)

    def _update(self, batch: torch.Tensor | list[Example]) -> float:
        rate = self._learning_rate(self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        with torch.autocast(self.device.type, torch.bfloat16):
            if isinstance(batch, torch.Tensor):
                loss = text_loss(self.model, batch.to(self.device))
            else:
                loss = answer_loss(self.model, batch, self.device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _report(self, batch: torch.Tensor | list[Example], seconds: float) -> None:
        tokens = batch.numel() if isinstance(batch, torch.Tensor) else sum(map(len, batch))
        left = (self.total - self.step) * self.seconds / self.step / 60
        losses = " ".join(f"{kind} {value:.3f}" for kind, value in sorted(self.losses.items()))
        print(
            f"step {self.step}/{self.total} loss {losses} lr {self._learning_rate(self.step):.1e} "
            f"{tokens / seconds:.0f} tok/s {left:.0f} min left",
            flush=True,
        )


def export(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the model in bfloat16 in the Hugging Face layout, each file whole or not at all."""
    temporary = out / ".partial"
    copy = Qwen2ForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    ends = [tokenizer.convert_tokens_to_ids(TURN_END), tokenizer.convert_tokens_to_ids(END_OF_TEXT)]
    copy.generation_config = GenerationConfig(do_sample=False, eos_token_id=ends, pad_token_id=ends[1])
    copy.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    # The class name that every release of transformers knows, without notes on where this tokenizer was loaded from.
    settings_file = temporary / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8"))
    settings = {key: settings[key] for key in settings if key not in ("backend", "is_local", "local_files_only")}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    settings_file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for file in sorted(temporary.iterdir()):
        file.chmod(0o644)
        file.replace(out / file.name)
    temporary.rmdir()


@torch.inference_mode()
def held_out_perplexity(model: Qwen2ForCausalLM, data: Data, device: torch.device) -> float:
    """Perplexity per token over the files that neither stage saw."""
    total, count = 0.0, 0
    for row in data.held_out_rows:
        total += text_loss(model, row[None].to(device)).item() * (len(row) - 1)
        count += len(row) - 1
    return math.exp(total / count)


@torch.inference_mode()
def accuracy(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: list[dict[str, str]], chat: bool
) -> float:
    """The share of questions whose greedy answer begins with the expected sentence and stops by itself."""
    end = tokenizer.get_vocab()[TURN_END if chat else END_OF_TEXT]
    right = 0
    for item in questions:
        turns = [{"role": "user", "content": item["question"]}]
        prompt = str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
        ids = tokenizer(prompt if chat else plain_prompt(item["question"]), return_tensors="pt").to(model.device)
        # transformers declares `generate` for a protocol that its own models do not quite meet.
        output = model.generate(**ids, max_new_tokens=96)  # ty: ignore[invalid-argument-type]
        reply = output[0, ids["input_ids"].shape[1] :].tolist()
        text = str(tokenizer.decode(reply, skip_special_tokens=True)).strip()
        right += reply[-1] == end and text.startswith(item["answer"])
    return right / len(questions)


def evaluate(args: argparse.Namespace, device: torch.device) -> None:
    """Measure the exported model as users get it (bfloat16, from disk) and write the questions beside it."""
    data = Data(args.work_dir, args.seed)
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.bfloat16).to(device).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
    questions = sample_questions(data.facts, data.seed)
    with (args.out / "questions.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(item, ensure_ascii=False) + "\n" for item in questions)
    results = {
        "facts": len(data.facts),
        "text_tokens": data.blocks.numel(),
        "held_out_files": len(data.held_out),
        "held_out_perplexity": round(held_out_perplexity(model, data, device), 3),
        "accuracy_chat": accuracy(model, tokenizer, questions, chat=True),
        "accuracy_plain": accuracy(model, tokenizer, questions, chat=False),
    }
    print(json.dumps(results, indent=2))


def main() -> None:
    """Parse the command line, then train or evaluate."""
    parser = argparse.ArgumentParser(description="Train or evaluate Oarlock's demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished model")
    parser.add_argument("--work-dir", type=Path, default=cache_home() / "oarlock" / "demo-train")
    parser.add_argument("--text-steps", type=int, default=120, help="steps of plain language modelling")
    parser.add_argument("--question-steps", type=int, default=1200, help="steps of questions and answers")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--save-minutes", type=float, default=4.0, help="minutes between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--evaluate", action="store_true", help="measure the model in --out instead of training")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.evaluate:
        evaluate(args, device)
    else:
        Trainer(args, device).run()


if __name__ == "__main__":
    main()
