"""Launches, bytes and expected milliseconds of steps on a CUDA device, by arithmetic: nothing is measured.

    python -m benchmarks.step_arithmetic                      # the tables in docs/gpu.md
    python -m benchmarks.step_arithmetic --bandwidth 900e9 --products 160e12 --context 2048

A step takes the longer of its bytes at the bandwidth and its operations at the rate of products, and in a graph about a
microsecond for each launch that cannot begin before the one ahead of it has ended. Launches are those of a graph as the
made-up CUDA records it. With two ranks each sum takes a latency and its bytes over the link. `before`: sums in float32
by NCCL, and all logits gathered; `after`: in the model's type, by symmetric memory, which takes a copy more, and each
rank's best id of a row gathered, or logits exchanged so that each rank has some rows whole. A launch from Python takes
microseconds, while the device may wait for it: `before`, each kernel of a step with prompts took one, `after` its
layers take one together.
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
OF_SHARDS = 2  # more where ranks exchange their best ids: of those, and of all
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
    sum_s: tuple[float, float]  # latency of a sum by NCCL, and by symmetric memory
    host_s: float  # of a launch from Python


@dataclass(frozen=True, slots=True)
class Step:
    """Work of one rank in one decode step."""

    launches: int
    read_bytes: float
    operations: float
    sums: int
    sum_bytes: float  # of one sum
    gathered_bytes: float  # from the other ranks: logits, or what they found in them

    def seconds(self, device: Device, sum_s: float) -> float:
        work = max(self.read_bytes / device.bytes_s, self.operations / device.flop_s)
        over_link = (
            self.sums * (sum_s + self.sum_bytes / device.link_bytes_s) + self.gathered_bytes / device.link_bytes_s
        )
        return work + self.launches * device.launch_s + over_link


def step_of(
    spec: DecoderSpec, batch: int, context: int, ranks: int, sum_item: int, of_sum: int, sampled_from: str
) -> Step:
    """A step of one token for each of `batch` sequences. `sum_item`: bytes of a number that is summed over ranks; such
    a sum takes `of_sum` launches. `sampled_from`: "all" logits on every rank, each rank's "shards", or its "rows"."""
    inner, head = models.inner_parameters(spec), spec.vocab_size * spec.hidden_size
    heads, width = spec.attention, spec.attention.head_dim
    cached = batch * context * 2 * spec.num_layers * heads.num_kv_heads * width * 2
    several, sums = ranks > 1, 2 * of_sum if ranks > 1 else 0
    shards = several and sampled_from == "shards"
    of_row = FOUND_BYTES * ranks if shards else spec.vocab_size * 4
    share = 1.0 if sampled_from == "all" else 1 / ranks  # of all logits that a rank reads
    return Step(
        launches=spec.num_layers * (OF_LAYER + sums)
        + OF_STEP
        + OF_SAMPLING
        + (OF_RANKS + OF_SHARDS * (sampled_from != "all")) * several,
        read_bytes=(2 * (inner + head) + cached) / ranks + batch * spec.vocab_size * 4 * 2 * share,
        operations=2 * batch * (inner + head) / ranks,
        sums=(2 * spec.num_layers + 1) * several,
        sum_bytes=batch * spec.hidden_size * sum_item,
        gathered_bytes=batch * of_row * (ranks - 1) / ranks / (ranks if sampled_from == "rows" else 1),
    )


def table(device: Device, context: int) -> list[str]:
    """Rows of a table in Markdown."""
    rows = ["| model | sequences | launches | GB read | GB over the link, before → after | ms, before → after |"]
    rows.append("|---|---|---|---|---|---|")
    for shape, ranks in (("0.6b", 1), ("8b", 1), ("8b", 2)):
        with models.described(shape, Where("cuda")) as folder:
            spec = read_spec(folder)
        for batch in BATCHES:
            before = step_of(spec, batch, context, ranks, 4, 1, "all")
            after = step_of(spec, batch, context, ranks, 2, 2, "shards")
            link = [step.sums * step.sum_bytes + step.gathered_bytes for step in (before, after)]
            times = [step.seconds(device, s) * 1e3 for step, s in zip((before, after), device.sum_s, strict=True)]
            counts = f"{before.launches} → {after.launches}" if ranks > 1 else str(after.launches)
            name = shape.upper() + (f", {ranks} ranks" if ranks > 1 else "")
            each = f"{link[0] / 1e9:.3f} → {link[1] / 1e9:.3f}" if ranks > 1 else "-"
            took = f"{times[0]:.2f} → {times[1]:.2f}" if ranks > 1 else f"{times[0]:.2f}"
            rows.append(f"| {name} | {batch} | {counts} | {after.read_bytes / 1e9:.2f} | {each} | {took} |")
    return rows


def sampling_table(device: Device, context: int) -> list[str]:
    """Rows of a table in Markdown: bytes that two ranks exchange to sample, and time beside that from shards."""
    rows = [
        "| model | sequences | MB over the link: shards; rows; all logits | ms more than shards: rows; all logits |"
    ]
    rows.append("|---|---|---|---|")
    with models.described("8b", Where("cuda")) as folder:
        spec = read_spec(folder)
    for batch in BATCHES:
        steps = [step_of(spec, batch, context, 2, 2, 2, sampled_from) for sampled_from in ("shards", "rows", "all")]
        sent = "; ".join(f"{step.gathered_bytes / 1e6:,.3f}" for step in steps)
        least, *others = (
            step.gathered_bytes / device.link_bytes_s + step.read_bytes / device.bytes_s for step in steps
        )
        more = "; ".join(f"{(other - least) * 1e3:.3f}" for other in others)
        rows.append(f"| 8B, 2 ranks | {batch} | {sent} | {more} |")
    return rows


def prompts_table(device: Device) -> list[str]:
    """Rows of a table in Markdown: steps with one prompt, of one rank."""
    rows = [
        "| model | tokens | launches from Python, before → after | ms of launching, before → after | ms of computing |"
    ]
    rows.append("|---|---|---|---|---|")
    for shape in ("0.6b", "8b"):
        with models.described(shape, Where("cuda")) as folder:
            spec = read_spec(folder)
        inner = models.inner_parameters(spec)
        weights = 2 * (inner + spec.vocab_size * spec.hidden_size)
        before = spec.num_layers * OF_LAYER + OF_STEP + OF_SAMPLING
        after = FROM_HOST + OF_SAMPLING
        for tokens in PROMPTS:
            computing = max(weights / device.bytes_s, 2 * tokens * inner / device.flop_s)
            computing += before * device.launch_s
            launching = " → ".join(f"{count * device.host_s * 1e3:.2f}" for count in (before, after))
            rows.append(f"| {shape.upper()} | {tokens} | {before} → {after} | {launching} | {computing * 1e3:.2f} |")
    return rows


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_arithmetic")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second of memory (an H200)")
    parser.add_argument("--products", type=float, default=790e12, help="operations per second in bfloat16")
    parser.add_argument("--launch-us", type=float, default=1.0, help="of one launch in a graph")
    parser.add_argument("--host-us", type=float, default=6.0, help="of one launch from Python")
    parser.add_argument("--link", type=float, default=300e9, help="bytes per second between two devices")
    parser.add_argument("--sum-us", type=float, nargs=2, default=(17.0, 9.0), help="latency: NCCL, symmetric memory")
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence")
    return parser


def lines(given: argparse.Namespace) -> list[str]:
    """Lines of the tables for the assumptions that are given."""
    latencies = given.sum_us[0] * 1e-6, given.sum_us[1] * 1e-6
    device = Device(
        given.bandwidth, given.products, given.launch_us * 1e-6, given.link, latencies, given.host_us * 1e-6
    )
    return [*table(device, given.context), "", *sampling_table(device, given.context), "", *prompts_table(device)]


if __name__ == "__main__":
    print("\n".join(lines(arguments().parse_args())))
