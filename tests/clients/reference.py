"""transformers' log-likelihoods of the endings of the lm-eval task, which the server must give as well.

    python -m tests.clients.reference OUT.json

A program of its own, so that torch and the model do not stay in memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.e2e.running import DEMO

QUESTIONS = Path(__file__).resolve().parent / "scripts" / "lm_eval_questions.jsonl"


def main(out: str) -> int:
    """Write for each ending of each question the sum of its log-probabilities, and whether greedy decoding gives it."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    scores = []
    for line in QUESTIONS.read_text().splitlines():
        question = json.loads(line)
        context = tokenizer.encode(question["question"], add_special_tokens=False).ids
        of_question = []
        for ending in question["endings"]:
            whole = tokenizer.encode(f"{question['question']} {ending}", add_special_tokens=False).ids
            ids = torch.tensor(whole[len(context) :])  # [E]
            with torch.inference_mode():
                logits = model(torch.tensor([whole])).logits[0, len(context) - 1 : -1]  # [E, V]
            logprobs = logits.double().log_softmax(-1)
            picked = logprobs.gather(1, ids[:, None]).sum().item()
            of_question.append([picked, bool((logits.argmax(-1) == ids).all())])
        scores.append(of_question)
    Path(out).write_text(json.dumps(scores))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
