"""A quantised checkpoint of the demo model, served: the start names its form, and two ranks answer as one does."""

from pathlib import Path

import pytest

from tests.e2e.running import DEMO, RunningServer
from tests.golden.quantised import CASES, write

QUESTIONS = 12  # the first prompts: the model has learned their answers


@pytest.mark.soak
def test_one_rank_and_two_answer_alike(tmp_path: Path, prompts: list[str], expected: list[str]) -> None:
    path = write(DEMO, tmp_path, CASES["gptq-4-32-asym-act"]).path
    asked, answers, texts = prompts[:QUESTIONS], expected[:QUESTIONS], []
    for ranks in (1, 2):
        with RunningServer(path, "-tp", ranks) as server:
            assert "weights as gptq (4 bits, groups of 32, act-order) " in server.log
            texts.append([server.text(prompt, temperature=0, max_tokens=12) for prompt in asked])
    assert texts[0] == texts[1]
    same = sum(text == answer for text, answer in zip(texts[0], answers, strict=True))
    assert same >= 6, f"{same} of {QUESTIONS} learned answers are left: a weight read wrongly leaves none"
