"""One rank of a verification: the serving code, fed known text, every tensor of every layer written down.

`python -m workers.verify.rank '{"rank": 0, ...}'`, started by `launch.py`. What runs is the runner that serves, with
its own pages, sampler and collectives; only taps are added. Judges nothing.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from workers.config import WorkerConfig
from workers.distributed.control_channel import Control
from workers.distributed.parallel_state import TensorParallel
from workers.distributed.shm_ring import ChannelClosedError
from workers.errors import StartupError
from workers.verify.names import LAYER, tensor_names
from workers.verify.request import Request, Text
from workers.verify.steps import blocks_needed, steps_of
from workers.verify.taps import TappedDecoder
from workers.worker.model_runner import ModelRunner
from workers.worker.spawn_ranks import RankArguments
from workers.worker.worker_process import die_with_parent, init_distributed, log_to_stderr

PROBES = ("o_proj_partial", "mlp_partial", "gate_up_mirrored")


def run_rank(config: WorkerConfig, tp: TensorParallel, folder: Path, say: Callable[[str], None]) -> None:
    """Feed the text in `folder` and leave `rank-R-*.safetensors` and, from rank 0, `tokens.json` there."""
    request, text = Request.read(folder), Text.read(folder)
    runner = ModelRunner(config, tp)
    runner.load(lambda fraction: None)
    runner.allocate(blocks_needed(text, config.block_size))
    tapped = TappedDecoder(runner.model, probe=True) if request.record else None
    if tapped is not None:
        runner.model = tapped  # ty: ignore[invalid-assignment]
    rows: list[tuple[int, int]] = []
    chosen: dict[tuple[int, int], int] = {}
    for number, (step, here) in enumerate(steps_of(text, config.block_size)):
        if number % 16 == 0:
            say(f"step {number + 1}")
        output = runner.execute(step)
        rows += here
        if output is not None:
            chosen |= dict(zip(here, output.token_ids.tolist(), strict=True))
    if tp.rank == 0:
        (folder / "tokens.json").write_text(json.dumps(_answers(text, chosen)), "utf-8")
    if tapped is not None:
        tapped.close()
        order = torch.tensor(sorted(range(len(rows)), key=rows.__getitem__))
        _write(tapped.steps, order, runner.spec.num_layers, tp.rank, folder)


def _answers(text: Text, chosen: dict[tuple[int, int], int]) -> list[list[int]]:
    """For each sequence, what this model would have said in place of each token of the known output."""
    return [
        [chosen[seq, len(prompt) - 1 + index] for index in range(len(output))]
        for seq, (prompt, output) in enumerate(zip(text.prompts, text.outputs, strict=True))
    ]


def _write(steps: list[dict[str, Tensor]], order: Tensor, num_layers: int, rank: int, folder: Path) -> None:
    """Sequence by sequence, as the reference has them; one file per layer."""
    files = {str(layer): [f"{layer}.{tensor}" for tensor in (*LAYER, *PROBES)] for layer in range(num_layers)}
    files["ends"] = tensor_names(0)
    for file, names in files.items():
        here = {
            name: torch.cat([step.pop(name).flatten(1) for step in steps]).cpu()[order]
            for name in names
            if name in steps[0]
        }
        save_file(here, folder / f"rank-{rank}-{file}.safetensors")


def main(argv: list[str]) -> int:
    arguments = RankArguments.from_json(argv[0])
    die_with_parent(arguments.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides
    log_to_stderr(arguments.rank, arguments.config.log_level)
    control = Control.from_fd(arguments.control_fd)
    try:
        tp = init_distributed(arguments)
        folder = Path(arguments.extra["folder"])
        run_rank(arguments.config, tp, folder, lambda line: control.send("progress", text=line))
        control.send("done")
        tp.leave()
    except StartupError as error:
        control.send("failed", cause=error.cause, fix=error.fix, exit_code=error.exit_code)
        return error.exit_code
    except ChannelClosedError:
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    # Skips interpreter teardown: a peer may be gone already, and gloo's threads would wait for it.
    os._exit(status)
