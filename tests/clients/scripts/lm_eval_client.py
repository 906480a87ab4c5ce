"""lm-eval: scores of a small local task through `local-completions`, which must be transformers' own numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
from reporter import Report, arguments, expect

QUESTIONS = Path(__file__).with_name("lm_eval_questions.jsonl")
TOLERANCE = 1e-4  # of a sum of natural logarithms
TASK: dict[str, Any] = {
    "task": "oarlock_tiny",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(QUESTIONS)}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "num_fewshot": 0,
}
CHOICE = TASK | {
    "output_type": "multiple_choice",
    "doc_to_choice": "endings",
    "doc_to_target": "likely",
    "target_delimiter": " ",
}
GENERATE = TASK | {
    "task": "oarlock_tiny_text",
    "output_type": "generate_until",
    "doc_to_target": "likely",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}


def evaluate(kind: str, url: str, given: Any, task: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """The samples of one run, in the order of the questions."""
    model = {
        "model": given.model,
        "base_url": url,
        "tokenizer": given.tokenizer,
        "tokenizer_backend": "huggingface",
        "max_length": 2047,
        "max_retries": 1,
        **more,
    }
    chat = kind == "local-chat-completions"
    found = lm_eval.simple_evaluate(
        kind, model_args=model, tasks=[task], log_samples=True, bootstrap_iters=0, apply_chat_template=chat
    )
    return sorted(found["samples"][task["task"]], key=lambda sample: sample["doc_id"])


def compare(samples: list[dict[str, Any]], reference: list[list[list[Any]]]) -> float:
    """The largest difference of any score; whether an ending is the greedy one must be equal exactly."""
    worst = 0.0
    for sample, expected in zip(samples, reference, strict=True):
        for answer, (score, is_greedy) in zip(sample["filtered_resps"], expected, strict=True):
            worst = max(worst, abs(float(answer[0]) - score))
            expect((answer[1] in (True, "True")) == is_greedy, (sample["doc"], answer, score, is_greedy))
    return worst


def main() -> int:
    given = arguments()
    report = Report()
    reference = json.loads(Path(given.reference).read_text())
    completions = f"{given.url}/v1/completions"
    for label, more in (("one at a time", {}), ("batches of 8, 4 at a time", {"num_concurrent": 4, "batch_size": 8})):
        with report.exercise(f"local-completions, log-likelihoods within {TOLERANCE:g} of transformers, {label}"):
            worst = compare(evaluate("local-completions", completions, given, CHOICE, **more), reference)
            print(f"largest difference: {worst:.2e}")
            expect(worst <= TOLERANCE, f"largest difference {worst}")
    with report.exercise("local-completions, generate_until"):
        samples = evaluate("local-completions", completions, given, GENERATE)
        texts = [sample["filtered_resps"][0] for sample in samples]
        expect(any(texts) and all("\n" not in text for text in texts), texts)
    with report.exercise("local-chat-completions, generate_until"):
        samples = evaluate("local-chat-completions", f"{given.url}/v1/chat/completions", given, GENERATE)
        expect(any(sample["filtered_resps"][0] for sample in samples), samples)
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
