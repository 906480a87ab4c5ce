"""Time per output token with and without drafts, on answers that repeat their prompt and on answers that do not.

    python -m benchmarks.speculation [--together N ...] [--rounds N] [--ranks N] [--shape 0.5b] [--config JSON]

Speed depends on which drafts are right, and the checkpoints of benchmarks have random weights: what they would write
means nothing. So the answers are given: each text in `benchmarks/speculation_texts` is a request and an answer, written
by hand as a good model would write it. A grammar that allows one text alone makes the model sample it, token by token,
from its own logits and by its own steps; drafts are looked up in the text so far, as always, and are right or wrong as
they would be. With and without drafts the same rows have such a mask, so both ways do the same work for a row.

    edits    code with a rename, a summary with quotations, records turned into JSON: the answer repeats the request
    chat     advice and an explanation: nothing is repeated but words

A token is a word with the space before it, a run of punctuation, a line end with its indentation or a digit, about as
large vocabularies cut text. Ids are given to them in the order in which they come first.

The two ways take turns in each round, on ranks that are loaded once, in the same order of texts. Figures are
milliseconds from a request's first token to its last, divided by the tokens between: the mean over the texts of a set,
then the median over rounds; and the ratio of the two ways in the same round, its median and range. With `--together N`
the texts of a set run N at a time.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.checkpoint import ensure
from oarlock.engine.config import EngineConfig, SpeculativeConfig
from oarlock.engine.core.engine_core import EngineCore
from oarlock.engine.types import Grammar, Request, SamplingParams
from oarlock.server.config.json_options import parse_speculative_config
from oarlock.workers.config import WorkerConfig
from oarlock.workers.executor import Executor, start_executor

TEXTS = Path(__file__).parent / "speculation_texts"
SETS = {"edits": "edit_*.txt", "chat": "chat_*.txt"}
_PIECE = re.compile(r" ?[^\W\d_]+|\d| ?[^\s\w]+|_|\s*\n[ ]*|\s")
_FIRST_ID = 300
_ALL = 0xFFFFFFFF


class Text(NamedTuple):
    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class OneText:
    """A grammar that allows one text (`GrammarMatcherProtocol`)."""

    expected_s = 0.0

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._num_accepted = 0

    def fill_masks(self, drafts: Sequence[int], into: np.ndarray) -> int | None:
        for row, mask in enumerate(into):
            place = self._num_accepted + row
            if place == len(self._token_ids):
                into[row:] = _ALL
                return row
            token = self._token_ids[place]
            mask[:] = 0
            mask[token // 32] = np.uint32(1 << token % 32)
            if row < len(drafts) and drafts[row] != token:
                into[row + 1 :] = _ALL
                break
        return None

    def accept(self, token_ids: Sequence[int]) -> bool:
        self._num_accepted += len(token_ids)
        return self.only_end_is_left()

    def only_end_is_left(self) -> bool:
        return self._num_accepted == len(self._token_ids)


def read_texts(pattern: str, ids: dict[str, int]) -> list[Text]:
    """Read the texts as token ids. `ids`: of the pieces so far, to which new ones are added."""
    texts = []
    for path in sorted(TEXTS.glob(pattern)):
        prompt, answer = path.read_text().split("\n=====\n")
        pieces = [_PIECE.findall(part) for part in (prompt, answer)]
        assert ["".join(part) for part in pieces] == [prompt, answer], f"{path.name}: a piece is lost"
        one, other = (tuple(ids.setdefault(piece, _FIRST_ID + len(ids)) for piece in part) for part in pieces)
        texts.append(Text(path.stem, one, other))
    return texts


class Run(NamedTuple):
    """Figures of one run of a set of texts."""

    token_ms: float
    num_steps: int
    accepted: float  # share of the drafts
    wrong: int  # drafts


def run(executor: Executor, config: SpeculativeConfig | None, texts: list[Text], together: int) -> Run:
    """Generate every text, which must come out as it is given."""
    engine_config = EngineConfig(executor.config, enable_prefix_caching=False, speculative=config)
    core = EngineCore(engine_config, executor, time.monotonic)
    waiting = list(enumerate(texts))
    got: list[list[int]] = [[] for _ in texts]
    times: list[list[float]] = [[] for _ in texts]
    while waiting or core.scheduler.has_work or core.num_in_flight:
        while waiting and core.scheduler.num_running + core.scheduler.num_waiting < together:
            number, text = waiting.pop(0)
            params = SamplingParams(len(text.answer), temperature=0.0, grammar=Grammar("choice", "[]"))
            core.scheduler.add(Request(number, text.prompt, params), time.monotonic(), OneText(text.answer))
        output = core.begin()
        events = list(core.take_events())
        if core.num_in_flight and (output is None or core.is_full):
            events += core.finish()
        now = time.monotonic()
        for event in events:
            got[event.request_id] += event.token_ids
            times[event.request_id] += [now] * len(event.token_ids)
    assert [tuple(tokens) for tokens in got] == [text.answer for text in texts], "another text"
    stats = core.scheduler.stats
    accepted = stats.num_accepted_draft_tokens
    return Run(
        statistics.mean((some[-1] - some[0]) / (len(some) - 1) for some in times) * 1e3,
        stats.step_id,
        accepted / max(1, stats.num_draft_tokens),
        stats.num_draft_tokens - accepted,
    )


HEAD = """| texts | without, ms | with, ms | without / with | drafts right | steps |
|---|---:|---:|---:|---:|---:|"""


def row_of(name: str, turns: list[dict[str, Run]]) -> str:
    """Row of the table in Markdown."""
    plain, drafted = ([turn[way] for turn in turns] for way in ("without", "with"))
    ratios = [one.token_ms / other.token_ms for one, other in zip(plain, drafted, strict=True)]
    cells = [f"{statistics.median(one.token_ms for one in some):.2f}" for some in (plain, drafted)]
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    right = f"{statistics.median(one.accepted for one in drafted):.0%}"
    steps = f"{plain[0].num_steps} -> {statistics.median(one.num_steps for one in drafted):.0f}"
    return f"| {name} | {' | '.join(cells)} | {ratio} | {right} | {steps} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--together", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--config", default="{}", help="as --speculative-config")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    arguments = parser.parse_args()
    config = parse_speculative_config(arguments.config)
    ids: dict[str, int] = {}
    sets = {name: read_texts(pattern, ids) for name, pattern in SETS.items()}
    longest = max(len(text.prompt) + len(text.answer) for texts in sets.values() for text in texts)
    most = max(arguments.together)
    worker = WorkerConfig(
        str(ensure(arguments.shape)),
        tensor_parallel_size=arguments.ranks,
        max_model_len=longest + 1,
        max_num_seqs=most,
        num_speculative_tokens=config.num_speculative_tokens,
        num_kv_blocks=most * (longest // 32 + 2) + 1,
        num_threads=arguments.threads,
        log_level="WARNING",
    )
    executor = start_executor(worker, on_progress=lambda *progress: None)
    found: dict[str, list[dict[str, Run]]] = {}
    print(HEAD)
    try:
        for together in arguments.together:
            for name, texts in sets.items():
                key = f"{name}, {together} at a time"
                for number in range(arguments.rounds):
                    ways = {"without": None, "with": config}
                    order = list(ways) if number % 2 == 0 else list(ways)[::-1]
                    turn = {way: run(executor, ways[way], texts, together) for way in order}
                    found.setdefault(key, []).append(turn)
                print(row_of(key, found[key]), flush=True)
    finally:
        executor.close()
    if arguments.json is not None:
        rounds = {
            key: [{way: one._asdict() for way, one in turn.items()} for turn in some] for key, some in found.items()
        }
        arguments.json.write_text(json.dumps({"config": arguments.config, "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
