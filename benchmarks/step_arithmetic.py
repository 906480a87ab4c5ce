"""Launches, bytes and expected milliseconds of steps on a CUDA device, by arithmetic: nothing is measured.

    python -m benchmarks.step_arithmetic                      # the tables in docs/gpu.md
    python -m benchmarks.step_arithmetic --bandwidth 900e9 --products 160e12 --context 2048

A step takes the longer of its bytes at the bandwidth and its operations at the rate of matmuls, and in a graph about
a microsecond for each launch that cannot begin before the previous one has ended. The number of launches is the one
that the made-up CUDA of the tests records. With two ranks each all-reduce takes a latency and its bytes over the link,
in the model's type by symmetric memory, and ranks exchange the best id of each row. A launch from Python takes
microseconds, while the device may wait for it: if the layers of a step with prompts are a graph, they take one launch.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from benchmarks.gpu_check import models
from benchmarks.gpu_check.part import Where
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.models.registry import read_spec

BATCHES = (1, 32, 256)
PROMPTS = (32, 128, 512)  # tokens
OF_LAYER, OF_STEP = 10, 14  # launches of a graph on one rank: of each layer, and before and behind all layers
OF_SAMPLING = 5  # of tokens that are drawn
OF_SUMS = 4  # of a layer's two all-reduces: each takes a copy more
OF_SHARDS = 2  # in which ranks exchange their best ids
FOUND_BYTES = 32  # that a rank has of a row: its best id, with its score
FROM_HOST = 10  # launches and copies of a step with prompts in a graph, beside sampling
OF_RANKS = 8  # beside the sums of layers: ids of other ranks are masked, rows are summed, logits are gathered


@dataclass(frozen=True, slots=True)
class Device:
    """A device as it is assumed to be, and the link between two."""

    bytes_s: float
    flop_s: float
    launch_s: float
    link_bytes_s: float
    sum_s: float  # latency of an all-reduce by symmetric memory
    host_s: float  # of a launch from Python


@dataclass(frozen=True, slots=True)
class Step:
    """Work of one rank in one decode step."""

    launches: int
    read_bytes: float
    operations: float
    sums: int
    sum_bytes: float  # of one sum
    gathered_bytes: float  # from the other ranks: their best ids

    def seconds(self, device: Device) -> float:
        work = max(self.read_bytes / device.bytes_s, self.operations / device.flop_s)
        over_link = (
            self.sums * (device.sum_s + self.sum_bytes / device.link_bytes_s)
            + self.gathered_bytes / device.link_bytes_s
        )
        return work + self.launches * device.launch_s + over_link


def step_of(spec: DecoderSpec, batch: int, context: int, ranks: int) -> Step:
    """Return a step of one token for each of `batch` sequences of `context` tokens."""
    inner, head = models.inner_parameters(spec), spec.vocab_size * spec.hidden_size
    cached = batch * context * spec.cached_values * 2
    several = ranks > 1
    return Step(
        launches=spec.num_layers * (OF_LAYER + OF_SUMS * several)
        + OF_STEP
        + OF_SAMPLING
        + (OF_RANKS + OF_SHARDS) * several,
        read_bytes=(2 * (inner + head) + cached + batch * spec.vocab_size * 4 * 2) / ranks,
        operations=2 * batch * (inner + head) / ranks,
        sums=(2 * spec.num_layers + 1) * several,
        sum_bytes=batch * spec.hidden_size * 2,
        gathered_bytes=batch * FOUND_BYTES * (ranks - 1),
    )


def table(device: Device, context: int) -> list[str]:
    """Rows of a table in Markdown."""
    rows = ["| model | sequences | launches | GB read | GB over the link | ms |", "|---|---|---|---|---|---|"]
    for shape, ranks in (("0.6b", 1), ("8b", 1), ("8b", 2)):
        with models.described(shape, Where("cuda")) as folder:
            spec = read_spec(folder)
        for batch in BATCHES:
            step = step_of(spec, batch, context, ranks)
            name = shape.upper() + (f", {ranks} ranks" if ranks > 1 else "")
            link = f"{(step.sums * step.sum_bytes + step.gathered_bytes) / 1e9:.3f}" if ranks > 1 else "-"
            took = f"{step.seconds(device) * 1e3:.2f}"
            rows.append(f"| {name} | {batch} | {step.launches} | {step.read_bytes / 1e9:.2f} | {link} | {took} |")
    return rows


def prompts_table(device: Device) -> list[str]:
    """Rows of a table in Markdown: steps with one prompt, of one rank."""
    rows = ["| model | tokens | launches; with a graph | ms of launching; with a graph | ms of computing |"]
    rows.append("|---|---|---|---|---|")
    for shape in ("0.6b", "8b"):
        with models.described(shape, Where("cuda")) as folder:
            spec = read_spec(folder)
        inner = models.inner_parameters(spec)
        weights = 2 * (inner + spec.vocab_size * spec.hidden_size)
        single, graph = spec.num_layers * OF_LAYER + OF_STEP + OF_SAMPLING, FROM_HOST + OF_SAMPLING
        for tokens in PROMPTS:
            computing = max(weights / device.bytes_s, 2 * tokens * inner / device.flop_s)
            computing += single * device.launch_s
            launching = "; ".join(f"{count * device.host_s * 1e3:.2f}" for count in (single, graph))
            rows.append(f"| {shape.upper()} | {tokens} | {single}; {graph} | {launching} | {computing * 1e3:.2f} |")
    return rows


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_arithmetic")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second of memory (an H200)")
    parser.add_argument("--products", type=float, default=790e12, help="operations per second in bfloat16")
    parser.add_argument("--launch-us", type=float, default=1.0, help="of one launch in a graph")
    parser.add_argument("--host-us", type=float, default=6.0, help="of one launch from Python")
    parser.add_argument("--link", type=float, default=300e9, help="bytes per second between two devices")
    parser.add_argument("--sum-us", type=float, default=9.0, help="latency of an all-reduce by symmetric memory")
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence")
    return parser


def lines(given: argparse.Namespace) -> list[str]:
    """Lines of the tables for the assumptions that are given."""
    device = Device(
        given.bandwidth, given.products, given.launch_us * 1e-6, given.link, given.sum_us * 1e-6, given.host_us * 1e-6
    )
    return [*table(device, given.context), "", *prompts_table(device)]


if __name__ == "__main__":
    print("\n".join(lines(arguments().parse_args())))
