"""Pictures of docs/ about a model's numbers: shards, their sums, the memory of a plan, and drafts.

Each is computed by the code that serves: `tree_sum`, the shapes of shards, the plan's capacity, the drafter.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from oarlock.engine.config import SpeculativeConfig
from oarlock.engine.spec_decode.drafter import Candidate, Drafter
from oarlock.workers.capacity import Memory, capacity
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.all_reduce import tree_sum
from oarlock.workers.layers.decoder_spec import tensors_of
from oarlock.workers.layers.tensor_spec import Sharding
from oarlock.workers.preflight import open_model
from tests.house.rules import ROOT
from tests.unit.server.cli.test_plan import QWEN_7B
from tools.drawing import WIDTH, cell, svg, text


def sum_tree() -> str:
    """Eight slices of one sum, the tree that adds them, and which of them each rank holds."""
    parts = torch.tensor([2712.765, -1.273, 5026.971, 0.418, -6394.202, -0.661, -1433.144, -0.104])  # [8], float32
    left, width, top, gap = 140.0, (WIDTH - 150) / 8, 12, 46
    drawn, said = [text(8, top + 17, "slices of inputs", "small")], []
    levels = [[float(one) for one in parts]]
    while len(levels[-1]) > 1:
        levels.append([float(tree_sum([torch.tensor(one) for one in pair])) for pair in _pairs(levels[-1])])
    for depth, numbers in enumerate(levels):
        each = width * 2**depth
        for place, number in enumerate(numbers):
            x, y = left + each * (place + 0.5), top + gap * depth
            if depth:
                for side in (-0.25, 0.25):
                    drawn.append(f'<path class="way" d="M {x + each * side:g} {y - gap + 26} L {x:g} {y}"/>')
            drawn += cell(x - 38, y, 76, 26, "empty", f"{number:.3f}")
        if depth:
            ranks = 8 >> depth
            drawn.append(
                text(
                    8,
                    top + gap * depth + 17,
                    f"inside each of {ranks} ranks" if ranks > 1 else "inside one rank",
                    "small",
                )
            )
    y = top + gap * len(levels) + 4
    for ranks in (1, 2, 4, 8):
        of_ranks = [tree_sum(list(parts[8 // ranks * rank : 8 // ranks * (rank + 1)])) for rank in range(ranks)]
        said.append(f"{ranks} rank{'s' if ranks > 1 else ''}: {float(tree_sum(of_ranks)):.6f}")
        for rank in range(ranks):
            span = width * 8 / ranks
            drawn += cell(
                left + span * rank + 2, y, span - 4, 20, f"r{rank % 4}", f"rank {rank}" if ranks < 8 else rank
            )
        drawn.append(text(8, y + 15, said[-1].partition(":")[0], "small"))
        y += 26
    one_by_one = float(sum(parts[1:], start=parts[0]))
    whole = ", ".join(sorted({one.partition(": ")[2] for one in said}))
    drawn.append(
        text(8, y + 16, f"every number of ranks: {whole}; from left to right it would be {one_by_one:.6f}", "")
    )
    said.append(f"one after the other: {one_by_one:.6f}")
    return svg("One sum in one order at every number of ranks", "; ".join(said), int(y) + 28, drawn)


def _pairs(numbers: list[float]) -> list[list[float]]:
    return [numbers[at : at + 2] for at in range(0, len(numbers), 2)]


def shards() -> str:
    """The matrices of one layer of the demo model, divided as two ranks hold them, in the order of a step."""
    spec = open_model(WorkerConfig(str(ROOT / "models" / "oarlock-demo"), load_format="dummy")).spec
    layer = [one for one in tensors_of(spec, range(1, 2)) if one.is_matrix]  # [outputs, inputs] each
    scale, y, drawn, said, x = 0.16, 34.0, [], [], 20.0
    for tensor in layer:
        outputs, inputs = tensor.shape
        name = tensor.name.split(".")[-2]
        height, width = max(24.0, outputs * scale), max(24.0, inputs * scale)
        drawn.append(text(x + width / 2, y - 8, name, "small mid"))
        rows = tensor.sharding is not Sharding.INPUTS and tensor.sharding is not Sharding.WIDTH_INPUTS
        for rank in range(2):
            part = (
                (x, y + height / 2 * rank, width, height / 2) if rows else (x + width / 2 * rank, y, width / 2, height)
            )
            drawn += cell(*part, f"r{rank}", rank)
        held = " x ".join(map(str, tensor.local_shape(2)))
        drawn.append(text(x + width / 2, y + height + 16, held, "small mid"))
        said.append(f"{name} {outputs} x {inputs}, of which each rank holds {held}")
        x += max(width, 56) + 16
        if not rows:
            drawn += cell(x, y, 62, 24, "band", "sum")
            drawn.append(text(x + 31, y + 40, "over ranks", "small mid"))
            x += 74
    bottom = y + max(one.shape[0] for one in layer) * scale
    drawn.append(text(20, bottom + 40, "numbers: the rank; below: outputs x inputs that it holds", "small"))
    return svg("One layer on two ranks", "; ".join(said), int(bottom) + 54, drawn)


FORMS = {
    "bfloat16": {},
    "bfloat16, keys and values in fp8": {"kv_cache_dtype": "fp8"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}


def plan_memory() -> str:
    """Memory of a GPU of 24 GB that serves a model of Qwen2.5-7B's shape, as `oarlock plan` counts it."""
    total, left, drawn, said, y = 24 * 10**9, 230.0, [], [], 12.0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(QWEN_7B))
        for name, form in FORMS.items():
            model = open_model(WorkerConfig(folder, load_format="dummy").with_(**form))
            held = capacity(model, {}, Memory("cuda", total))
            sizes = {"weights": sum(held.weight_bytes), "step": held.step_bytes, "libraries": held.other_bytes}
            sizes |= {"KV": held.kv_bytes}
            drawn.append(text(8, y + 18, name, "small"))
            x = left
            for number, size in enumerate(sizes.values()):
                width = (WIDTH - left - 100) * size / total
                drawn += cell(x, y, width, 26, f"r{number}", f"{size / 1e9:.1f}" if width > 26 else "")
                x += width
            drawn += cell(left, y, WIDTH - left - 100, 26, "empty")
            drawn.append(text(WIDTH - 92, y + 18, f"{held.kv_tokens:,} tokens", "small"))
            parts = ", ".join(f"{what} {size / 1e9:.2f} GB" for what, size in sizes.items())
            said.append(f"{name}: {parts}, {held.kv_tokens:,} tokens")
            y += 34
    for number, what in enumerate(("weights", "largest step", "CUDA and libraries", "keys and values, in GB")):
        drawn += cell(left + 140 * number, y + 4, 12, 12, f"r{number}")
        drawn.append(text(left + 140 * number + 17, y + 14, what, "small"))
    return svg("24 GB of a GPU, by the form of a 7B model's weights", "; ".join(said), int(y) + 26, drawn)


PROMPT = "rename seen to known in : if name in seen : continue ; seen . add ( name ) ; yield name"
ANSWER = "if name in known : continue ; known . add ( name ) ; yield name"


class _Costs:
    """Steps whose rows cost little, as where a step mostly reads weights."""

    def step_and_row_s(self, num_rows: int) -> tuple[float, float]:
        return 0.02, 0.0003


def drafts() -> str:
    """Drafts of each step of an answer that repeats its prompt, and which of them were right."""
    words = sorted({*PROMPT.split(), *ANSWER.split()})
    known, answer = ([words.index(word) for word in words_of.split()] for words_of in (PROMPT, ANSWER))
    config = SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_max=4, prompt_lookup_min=2)
    drafter = Drafter(config, _Costs())
    state, at, step, drawn, said = drafter.new_state(), 0, 0, [text(8, 20, f"prompt: {PROMPT}", "small")], []
    while at < len(answer):
        ((*draft,),) = drafter.choose([Candidate(state, known, len(answer) - at - 1)], 1, 16)
        right = next((n for n, token in enumerate(draft) if token != answer[at + n]), len(draft))
        state.record(len(known), len(draft), right)
        step += 1
        x, y = 70.0, 4 + 30.0 * step
        drawn.append(text(8, y + 17, f"step {step}", "small"))
        for number, token in enumerate([*draft[:right], answer[at + right], *draft[right:]]):
            kind = "r0" if number < right else "r2" if number == right else "wait"
            width = 22 + 7 * len(words[token])
            drawn += cell(x, y, width, 24, kind, words[token])
            x += width + 4
        said.append(f"step {step}: {right} of {len(draft)} drafts right, {right + 1} tokens")
        known, at = [*known, *answer[at : at + right + 1]], at + right + 1
    legend = f"blue: drafts that were right; green: the model's own token; dashed: wrong drafts. {len(answer)} tokens"
    drawn.append(text(8, 58 + 30 * step, f"{legend} in {step} steps", "small"))
    return svg("Drafts that are looked up in the prompt", "; ".join(said), 70 + 30 * step, drawn)
