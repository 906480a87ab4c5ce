"""Cost of grammars for the engine per step: its own time and the delay of events, beside ranks that take a fixed time.

    python -m tests.load.structured_step [--device-ms N] [--sequences N ...] [--rounds N] [--tokens N]

The ranks are a device that runs steps in order for so long each, waits for masks where it samples, and answers with
the tokens of prepared texts: lists of objects that match a JSON schema, in a vocabulary of 151,936 pieces. Free
requests and bound ones, at both pipeline depths, take turns. Figures are medians over rounds: milliseconds of wall time
per step beyond the device's, and from an answer to the moment at which its events are encoded.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np

from oarlock.engine.config import EngineConfig, WorkerConfig
from oarlock.engine.core.engine_core import EngineCore
from oarlock.engine.ipc import messages
from oarlock.engine.sampling_params import Grammar, SamplingParams
from oarlock.engine.simulation.simulated_ranks import replica_info
from oarlock.engine.structured_output.compiler import Compiled, Compiler
from oarlock.engine.structured_output.matcher import GrammarMatcher, MaskBatch
from oarlock.engine.types import Request, TokenEvents
from oarlock.workers.protocol import StepMetadata, StepOutput
from tests.load.structured_cost import FORMS, vocabulary

DEMO = Path(__file__).resolve().parents[2] / "models" / "oarlock-demo" / "tokenizer.json"
VOCAB, PROMPT, END = 151_936, 16, 0
SPIN_S = 0.001  # before the end of a step: a sleep may end late


class ScriptedDevice:
    """Ranks that answer with `texts`, int32 [seed, position - PROMPT]."""

    rank_pids: tuple[int, ...] = ()
    step_times_ns: tuple[int, ...] = ()
    max_in_flight = best_in_flight = 2

    def __init__(self, config: WorkerConfig, step_s: float, texts: np.ndarray) -> None:
        assert config.num_kv_blocks is not None
        self.config = config
        self.info = replica_info(config, config.num_kv_blocks, VOCAB)
        self._step_s = step_s
        self._texts = texts
        self._running: deque[StepMetadata] = deque()
        self._ends: deque[float] = deque()
        self.answered_s = 0.0  # when the last step that was collected ended

    def submit(self, step: StepMetadata, *, masks_follow: bool = False) -> None:
        begins = max(time.monotonic(), self._ends[-1] if self._ends else self.answered_s)
        self._running.append(step)
        self._ends.append(begins + self._step_s)

    def send_masks(self, bits: np.ndarray) -> None:
        self._ends[-1] = max(self._ends[-1], time.monotonic())

    def collect(self) -> StepOutput:
        step, self.answered_s = self._running.popleft(), self._ends.popleft()
        time.sleep(max(0.0, self.answered_s - time.monotonic() - SPIN_S))
        while time.monotonic() < self.answered_s:
            pass
        tokens = self._texts[step.seeds, step.sample_positions - PROMPT]
        return StepOutput(step.step_id, tokens, np.ones(len(tokens), np.uint8))

    def ping(self) -> None:
        return None

    kv_reports = None

    def fileno_for_death(self) -> list[int]:
        return []

    def close(self, failure: Exception | None = None) -> None:
        self._running.clear()


def make_compiler() -> Compiler:
    described = json.loads(DEMO.read_text())
    pieces = vocabulary(VOCAB)
    described["model"] |= {"vocab": {piece: number for number, piece in enumerate(pieces)}, "merges": []}
    end = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    described["added_tokens"] = [{"id": END, "content": pieces[END], **end}]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(described, file)
        file.flush()
        return Compiler(Path(file.name))


def texts_of(compiler: Compiler, count: int, length: int) -> np.ndarray:
    """int32 [count, length]: beginnings of lists of objects."""
    draw, words = (
        random.Random("texts"),
        [piece for piece in vocabulary(9000)[2000:] if piece.isascii() and piece.isalpha()],
    )
    texts = []
    for _ in range(count):
        objects = [
            {"name": " ".join(draw.choices(words, k=draw.randint(1, 6))), "n": draw.randrange(10**6)}
            for _ in range(length // 4)
        ]
        text = json.dumps(objects, separators=(",", ":"))
        texts.append(compiler.tokens.greedy_tokenize(text)[:length])
    return np.array(texts, np.int32)


def encode(outbox: TokenEvents, answered_s: float, num_seqs: int) -> list[float]:
    """Encode events as the engine's loop does; return their delay, if every sequence has one."""
    is_full = len(outbox) == num_seqs
    messages.events(outbox)
    return [time.monotonic() - answered_s] if is_full else []


def measure(
    device: ScriptedDevice, compiler: Compiler, bound: Compiled | None, depth: int, num_seqs: int, num_tokens: int
) -> tuple[float, float]:
    """Seconds per step in which every sequence decodes, and from its answer until its events are encoded."""
    config = EngineConfig(device.config, enable_prefix_caching=False, pipeline_depth=depth)
    core = EngineCore(config, device, time.monotonic, MaskBatch().fill_masks)
    grammar = None if bound is None else Grammar("json_schema", "{}")
    for number in range(num_seqs):
        params = SamplingParams(max_tokens=num_tokens, seed=number, eos_token_ids=(END,), grammar=grammar)
        matcher = None if bound is None else GrammarMatcher(compiler, bound, (END,))
        core.scheduler.add(Request(number, tuple(range(5, 5 + PROMPT)), params), 0.0, matcher)
    outbox, answered_s = TokenEvents(), 0.0
    ends: list[float] = []
    delays: list[float] = []
    while core.scheduler.has_work or core.num_in_flight:
        output = core.begin()
        outbox.others += core.take_events()
        delays += encode(outbox, answered_s, num_seqs)
        core.send_masks()
        outbox = TokenEvents()
        if core.num_in_flight and (output is None or core.is_full):
            outbox = core.finish()
            answered_s = device.answered_s
            if len(outbox) == num_seqs:
                ends.append(answered_s)
            if core.num_in_flight:
                delays += encode(outbox, answered_s, num_seqs)
                outbox = TokenEvents()
                core.send_masks()
    assert not core.scheduler.stats.num_errors
    return (ends[-1] - ends[0]) / (len(ends) - 1), statistics.median(delays)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-ms", type=float, default=5.0, help="of one step")
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100)
    arguments = parser.parse_args(argv)
    most, device_s = max(arguments.sequences), arguments.device_ms / 1e3
    compiler = make_compiler()
    schema = FORMS["list of objects"]["structured_outputs"]["json"]
    bound = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    config = WorkerConfig(
        "none",
        max_model_len=PROMPT + arguments.tokens + 16,
        max_num_seqs=most,
        max_num_batched_tokens=PROMPT * most,
        num_kv_blocks=most * ((PROMPT + arguments.tokens) // 32 + 3),
    )
    device = ScriptedDevice(config, device_s, texts_of(compiler, most, arguments.tokens))
    ways = [(name, form, depth) for name, form in (("free", None), ("bound", bound)) for depth in (1, 2)]
    names = " | ".join(f"{name}, depth {depth}" for name, _, depth in ways)
    print(f"| sequences | {names} |\n|---:|{'---|' * len(ways)}")
    for num_seqs in arguments.sequences:
        found: dict[tuple, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(arguments.rounds):
            for way in ways:
                found[way].append(measure(device, compiler, way[1], way[2], num_seqs, arguments.tokens))
        cells = []
        for rounds in found.values():
            step_s, delay_s = (statistics.median(column) for column in zip(*rounds, strict=True))
            cells.append(f"{(step_s - device_s) * 1e3:.2f} ms, events {delay_s * 1e3:.2f} ms")
        print(f"| {num_seqs} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
