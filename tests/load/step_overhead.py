"""Times what is not arithmetic in a step: Python, torch's dispatch and the calls of kernels that return at once.

    python -m tests.load.step_overhead [--rows N] [--layers N] [--rounds N]

The kernel library is built with the files of `stub_kernels/` in place of those that compute, so what remains is
everything else: the tensors of a step, the attention plan, embedding, layers, final norm and logits. Of the shape of
Qwen2.5-0.5B, with a small vocabulary and without sampling. The two forms of a layer take turns: one call per half, and
its separate operations. Figures are the least of a round's steps, and their median over rounds.
"""

import argparse
import dataclasses
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.checkpoint import SHAPES
from oarlock.workers.attention.block_tables import BlockTables
from oarlock.workers.attention.cpp import CppBackend
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.cpu import build, library
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.models.registry import describe
from oarlock.workers.runner.greedy_step import SequenceChunk, greedy_step

STUBS = Path(__file__).parent / "stub_kernels"
BLOCK_SIZE, CONTEXT, VOCABULARY = 32, 160, 1024
STEPS = 50  # in one round, of each form


class SeparateOperations(CppBackend):
    """A backend that layers are not prepared for."""


class NoWeights:
    """Leaves every tensor as it was allocated: nothing reads them."""

    def has(self, name: str) -> bool:
        return False

    def shape_of(self, name: str) -> None: ...

    def take(self, name: str, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        pass

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        pass


@contextmanager
def stubbed_kernels() -> Generator[None]:
    """Everything that is loaded inside calls kernels that return at once."""
    real = library.level()
    sources, build.SOURCES = build.SOURCES, Path(tempfile.mkdtemp(prefix="oarlock-stubs-"))
    try:
        shutil.copytree(sources, build.SOURCES, dirs_exist_ok=True)
        shutil.copytree(STUBS, build.SOURCES, dirs_exist_ok=True)
        with library.using(dataclasses.replace(real, name=f"{real.name}_stubbed")):
            library.library()
            yield
    finally:
        shutil.rmtree(build.SOURCES)
        build.SOURCES = sources


def model(layers: int, dtype: torch.dtype) -> Decoder:
    shape = SHAPES["0.5b"] | {"num_hidden_layers": layers, "vocab_size": VOCABULARY, "tie_word_embeddings": True}
    spec = describe({"architectures": ["Qwen2ForCausalLM"], **shape})
    decoder = Decoder(spec, TensorParallel.solo(), dtype, torch.device("cpu"))
    decoder.load(NoWeights(), lambda share: None)
    return decoder


def one_step(decoder: Decoder, kind: type[CppBackend], rows: int) -> Callable[[], float]:
    """A function that runs a step of `rows` sequences and returns the seconds it took."""
    backend = kind(decoder.kv_spec(BLOCK_SIZE, torch.device("cpu")))
    kv = backend.allocate(rows * CONTEXT // BLOCK_SIZE + 1)
    per_row = CONTEXT // BLOCK_SIZE
    chunks = [SequenceChunk([1], CONTEXT - 1, range(1 + row * per_row, 1 + (row + 1) * per_row)) for row in range(rows)]
    step = greedy_step(chunks, BLOCK_SIZE, range(rows))

    def run() -> float:
        started = time.perf_counter()
        batch = ForwardBatch.from_step(step, BlockTables.of_step(step, torch.device("cpu")))
        hidden = decoder(batch, kv, backend, backend.prepare(batch))
        decoder.compute_logits(hidden.index_select(0, batch.logits_indices))
        return time.perf_counter() - started

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--layers", type=int, default=SHAPES["0.5b"]["num_hidden_layers"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    arguments = parser.parse_args()
    with stubbed_kernels(), torch.inference_mode():
        decoders = [model(arguments.layers, getattr(torch, arguments.dtype)) for _ in range(2)]
        forms = {
            "one call per half": one_step(decoders[0], CppBackend, arguments.rows),
            "separate operations": one_step(decoders[1], SeparateOperations, arguments.rows),
        }
        times: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(arguments.rounds):
            for name, run in forms.items():
                times[name].append(min(run() for _ in range(STEPS)))
    print(f"{arguments.layers} layers, {arguments.rows} rows, {arguments.dtype}, {torch.get_num_threads()} threads")
    for name, values in times.items():
        median, least, most = (f"{of(values) * 1e3:.3f}" for of in (statistics.median, min, max))
        print(f"{name:20} {median} ms ({least} to {most})")


if __name__ == "__main__":
    main()
