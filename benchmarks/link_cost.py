"""Cost of a step whose ranks are on two hosts, against the latency and the bandwidth of the link between them.

    python -m benchmarks.link_cost [--shape 0.5b] [--concurrency 1 8] [--delays-ms 0 0.1 0.5 2] [--mbit 1000 100]
    python -m benchmarks.link_cost --ways tp

Both hosts are network namespaces of this machine, and the link a process between them (`tests/multihost`); its own
round trip and throughput are measured first and stand in the table. Each rank computes with one thread on a core of its
own. What runs on one host is measured in the same round as each link. A model of the step stands beside the figures:

    TP 2    one host's step on two ranks + 2 all-reduces per layer x (latency + bytes / bandwidth)
    PP 2    a micro-batch passes through both stages in one host's step on one rank
            + (latency + bytes / bandwidth) for the hidden states + latency for the answer;
            of two micro-batches, each of half the sequences, the last stage runs one after the other: if that takes
            longer, 2 x its share of one host's step, which is that of the weights that it reads

with half of the measured round trip as latency, and the measured throughput as bandwidth. The quotient of both is
printed: what is above 1 is the cost of what the model leaves out. Of several rounds the quickest counts.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks import link_probe as probe
from benchmarks import load
from benchmarks.checkpoint import SHAPES, ensure, parameters, prompts
from benchmarks.peers import progress
from oarlock.workers.layers.stage_layers import layers_of_stage
from tests.e2e.running import free_port
from tests.multihost.group import Group, HostServer
from tests.multihost.hosts import Hosts, why_not

NAME = "load"
SUM_BYTES, HIDDEN_BYTES = 4, 2  # of an element: parts of sums are float32, hidden states bfloat16
ONE, TWO, TP, PP = "one host, 1 rank", "one host, TP 2", "two hosts, TP 2", "two hosts, PP 2"


@dataclass(frozen=True)
class Link:
    """Settings of the emulated link. `mbit` None: as much as the emulation carries."""

    delay_ms: float = 0.0
    mbit: float | None = None

    def __str__(self) -> str:
        return f"{self.delay_ms:g} ms" + (f", {self.mbit:g} Mbit/s" if self.mbit else "")


@dataclass(frozen=True)
class LinkFigures:
    """Measured figures of the emulated link."""

    round_trip_s: float
    bytes_per_s: float

    @property
    def latency_s(self) -> float:
        """Latency of one way."""
        return self.round_trip_s / 2

    def message_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass
class Figures:
    """Figures by way of serving, one entry per round: seconds of a step in which every sequence gets a token, and bytes
    that such a step put on the wire, both directions. The least of the seconds counts: other programs only add to it.
    """

    steps_s: dict[str, list[float]] = field(default_factory=dict)
    bytes: dict[str, list[float]] = field(default_factory=dict)

    def add(self, way: str, step_s: float, num_bytes: float) -> None:
        self.steps_s.setdefault(way, []).append(step_s)
        self.bytes.setdefault(way, []).append(num_bytes)

    def step_s(self, way: str) -> float:
        return min(self.steps_s[way])

    def bytes_per_step(self, way: str) -> float:
        return statistics.median(self.bytes[way])


def tp_step_s(one_host_s: float, link: LinkFigures, layers: int, hidden_size: int, rows: int) -> float:
    """The model's step of TP 2 on two hosts: each sum of a layer waits for a message of all rows' hidden states."""
    return one_host_s + 2 * layers * link.message_s(rows * hidden_size * SUM_BYTES)


def pp_step_s(
    one_rank_s: float, link: LinkFigures, hidden_size: int, rows: int, *, num_batches: int, last_share: float
) -> float:
    """The model's step of PP 2: `one_rank_s` and `rows` are those of one of `num_batches` micro-batches (1 or 2), and
    `last_share` is what the last stage takes of `one_rank_s`, half at least.

    Every micro-batch goes through both stages, over the link and back to the head. Of two, the last stage has one while
    the other is on its way, and never waits if that takes less time.
    """
    on_its_way_s = one_rank_s + link.message_s(rows * hidden_size * HIDDEN_BYTES) + link.latency_s
    return max(on_its_way_s, num_batches * last_share * one_rank_s)


def last_stage_share(shape: str) -> float:
    """Share of the weights that a step reads in the last of two stages: its layers and the output head.

    The head also is the embedding, of which a step reads a few rows.
    """
    everything, inner = parameters(shape)
    num_layers = SHAPES[shape]["num_hidden_layers"]
    return 1 - inner / everything * len(layers_of_stage(num_layers, 0, 2)) / num_layers


def num_micro_batches(concurrency: int) -> int:
    """Number of micro-batches in flight with two stages."""
    return min(concurrency, 2)


def micro_batch(concurrency: int) -> int:
    """Number of sequences of one micro-batch."""
    return concurrency // num_micro_batches(concurrency)


class Bench:
    """The servers, all up at once, idle but for the one that is asked."""

    def __init__(self, args: argparse.Namespace, hosts: Hosts, cleanup: contextlib.ExitStack) -> None:
        self.args = args
        self.hosts = hosts
        self.shape = SHAPES[args.shape]
        self._seed = 0
        self._cleanup = cleanup
        self._servers: dict[str, HostServer] = {}
        with hosts.node.inside():
            self._probe_port = free_port()
            cleanup.enter_context(probe.answering(self._probe_port))
        self._start()

    @property
    def ways(self) -> list[str]:
        return list(self._servers)

    def _start(self) -> None:
        model, args = ensure(self.args.shape), self.args
        most = max(args.concurrency)
        context = args.input_tokens + args.output_tokens + 8
        flags = ("--served-model-name", NAME, "--dtype", "bfloat16", "--max-model-len", context)
        flags += ("--max-num-seqs", most, "--kv-cache-memory", "256MiB", "--log-level", "warning")
        alone = {ONE: ("--cpu-affinity", "0"), TWO: ("-tp", 2, "--cpu-affinity", "0|1")}
        for way, own in alone.items():
            progress(f"starting {way} …")
            self._servers[way] = HostServer(self.hosts.head, model, *flags, *own)
            self._cleanup.enter_context(self._servers[way])
        for way, size in ((TP, "-tp"), (PP, "-pp")):
            if size.lstrip("-") in args.ways:
                progress(f"starting {way} …")
                head, node = ("--cpu-affinity", "0"), ("--cpu-affinity", "1")
                group = Group(self.hosts, model, *flags, size, 2, head_flags=head, node_flags=node)
                self._servers[way] = self._cleanup.enter_context(group).head

    def link_figures(self) -> LinkFigures:
        with self.hosts.head.inside():
            round_trip_s = probe.round_trip_s(self.hosts.node.address, self._probe_port)
            bytes_per_s = probe.bytes_per_s(self.hosts.node.address, self._probe_port)
        return LinkFigures(round_trip_s, bytes_per_s)

    def measure(self, way: str, concurrency: int) -> tuple[float, float]:
        """Seconds of a step while `concurrency` sequences decode, and bytes on the wire for each such step."""
        self._seed += 1
        work = prompts(concurrency, self.args.input_tokens, self.shape["vocab_size"], self._seed)
        server = self._servers[way]
        before = self.hosts.carried()["bytes"]
        with server.host.inside():
            report = load.run(server.url, NAME, work, concurrency, self.args.output_tokens)
        carried = sum(self.hosts.carried()["bytes"]) - sum(before)
        assert report.decode_tokens_per_s is not None, "no time in which all sequences decode: ask for more tokens"
        # A prompt's tokens weigh as much as those of so many steps: the sums are of all rows.
        rows = concurrency * (self.args.input_tokens + self.args.output_tokens)
        return concurrency / report.decode_tokens_per_s, carried * concurrency / rows


def measured(bench: Bench, link: Link) -> tuple[LinkFigures, dict[int, Figures]]:
    """The link's own figures, and those of every way for each concurrency."""
    bandwidth = link.mbit * 1e6 / 8 if link.mbit else None
    bench.hosts.emulate(delay_s=link.delay_ms / 1e3, bytes_per_s=bandwidth)
    own = bench.link_figures()
    sizes = sorted({*bench.args.concurrency, *map(micro_batch, bench.args.concurrency)})
    found = {size: Figures() for size in sizes}
    for turn in range(bench.args.rounds):
        for size, figures in found.items():
            for way in bench.ways:
                if size in bench.args.concurrency or way == ONE:
                    figures.add(way, *bench.measure(way, size))
        progress(f"{link}, round {turn + 1}")
    return own, found


def table(bench: Bench, found: dict[Link, tuple[LinkFigures, dict[int, Figures]]], concurrency: int) -> str:
    """A row for each link: its own figures, then each way's step and tokens per second beside the model's step."""
    head = ["link, one way", "round trip", "carries", f"{ONE}: step, tokens/s", f"{TWO}: step, tokens/s"]
    distributed = [way for way in (TP, PP) if way in bench.ways]
    for way in distributed:
        head += [f"{way}: step, tokens/s", "model", "step / model", "wire per step"]
    head.append("2 replicas: tokens/s")
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    layers, hidden = bench.shape["num_hidden_layers"], bench.shape["hidden_size"]
    for link, (own, by_size) in found.items():
        figures, half = by_size[concurrency], micro_batch(concurrency)
        model = {
            TP: tp_step_s(figures.step_s(TWO), own, layers, hidden, concurrency),
            PP: pp_step_s(
                by_size[half].step_s(ONE),
                own,
                hidden,
                half,
                num_batches=num_micro_batches(concurrency),
                last_share=last_stage_share(bench.args.shape),
            ),
        }
        cells = [str(link), f"{own.round_trip_s * 1e3:.2f} ms", f"{own.bytes_per_s * 8 / 1e6:.0f} Mbit/s"]
        cells += [step_cell(figures.step_s(way), concurrency) for way in (ONE, TWO)]
        for way in distributed:
            step_s = figures.step_s(way)
            cells += [step_cell(step_s, concurrency), f"{model[way] * 1e3:.1f} ms", f"{step_s / model[way]:.2f}"]
            cells.append(f"{figures.bytes_per_step(way) / 1024:.0f} KiB")
        cells.append(f"{2 * concurrency / figures.step_s(ONE):.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def step_cell(step_s: float, concurrency: int) -> str:
    return f"{step_s * 1e3:.1f} ms, {concurrency / step_s:.0f}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.link_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="sequences at a time")
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[0.0, 0.1, 0.5, 2.0], help="one way")
    parser.add_argument("--mbit", type=float, nargs="*", default=[1000.0, 100.0], help="at the second delay")
    parser.add_argument("--ways", choices=["tp", "pp"], nargs="*", default=["tp", "pp"], help="on two hosts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=48)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if reason := why_not("relay"):
        raise SystemExit(
            f"error: {reason}\nfix: run this as root, where network namespaces and /dev/net/tun are allowed"
        )
    links = [Link(delay) for delay in args.delays_ms]
    links += [Link(args.delays_ms[min(1, len(args.delays_ms) - 1)], mbit) for mbit in args.mbit]
    with contextlib.ExitStack() as cleanup:
        hosts = cleanup.enter_context(Hosts("relay"))
        bench = Bench(args, hosts, cleanup)
        found = {link: measured(bench, link) for link in links}
        for concurrency in args.concurrency:
            print(f"\n{concurrency} sequence{'s' * (concurrency > 1)} at a time, {args.shape}, bfloat16:\n")
            print(table(bench, found, concurrency))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
