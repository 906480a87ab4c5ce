"""Tables of results of `peers` and `scaling`: medians, ratios with their range over rounds, shares of the ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.checkpoint import title

Result = dict[str, Any]
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of one figure over rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        """Format the median, followed by the range if the rounds differ at this precision."""
        low, high = number(self.low), number(self.high)
        return number(self.median) if low == high else f"{number(self.median)} ({low} to {high})"


def spread(values: Iterable[float | None]) -> Spread | None:
    """Spread of the figures of all rounds; None where any round has no figure."""
    found = list(values)
    known = [value for value in found if value is not None]
    return Spread(statistics.median(known), min(known), max(known)) if known and len(known) == len(found) else None


def number(value: float) -> str:
    """Format a number: two decimals below ten, one below 100, none above; thousands with a comma."""
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 99.95 else f"{value:,.0f}"


def cell(value: Spread | None) -> str:
    return "-" if value is None else str(value)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ------------------------------------------------------------------ figures of one system in one round
def decode(figures: Figures) -> float | None:
    return figures["decode_tokens_per_s"]


def output(figures: Figures) -> float | None:
    return figures["output_tokens_per_s"]


def first_token(figures: Figures) -> float | None:
    return figures["ttft_ms"]["p50"]


# What is shown of a measure: (phrase behind its name, figure, whether less is better).
CLOSED_LOOP: list[tuple[str, Callable[[Figures], float | None], bool]] = [
    ("decode, tokens/s", decode, False),
    ("output, tokens/s", output, False),
]
FIRST_TOKEN: list[tuple[str, Callable[[Figures], float | None], bool]] = [("tokens of prompt, ms", first_token, True)]


def shown_of(measure: str) -> list[tuple[str, Callable[[Figures], float | None], bool]]:
    return FIRST_TOKEN if measure.startswith("first token") else CLOSED_LOOP


def over_rounds(result: Result, measure: str, system: str, figure: Callable[[Figures], float | None]) -> Spread | None:
    return spread(figure(turn["measures"][measure][system]) for turn in result["rounds"])


def ratio(
    result: Result, measure: str, ours: str, theirs: str, figure: Callable[[Figures], float | None]
) -> Spread | None:
    """Ratio of a figure, ours divided by theirs, round by round."""
    pairs = [
        (figure(turn["measures"][measure][ours]), figure(turn["measures"][measure][theirs]))
        for turn in result["rounds"]
    ]
    return spread(a / b if a is not None and b else None for a, b in pairs)


def is_ours(system: str) -> bool:
    return system.partition("@")[0] == "oarlock"


def label(result: Result, system: str) -> str:
    """The title of a system, with the name of the checkout where there are several of ours."""
    several = sum(map(is_ours, result["systems"])) > 1
    return " ".join([result["systems"][system]["title"], *(system.split("@")[1:] if several else ())])


# ------------------------------------------------------------------ what the machine allowed
def read_rate(turn: dict[str, Any]) -> float:
    """Rate of streaming reads in GB/s: the mean of before and after a round."""
    return statistics.fmean(one["read_gb_s"] for one in turn["ceilings"])


def best_gemm(turn: dict[str, Any], dtype: str) -> float:
    """Rate of the fastest product in GFLOP/s, in `dtype` or in float32: weights of any type can be widened."""
    wanted = {dtype, "float32"}
    return max(
        rate
        for one in turn["ceilings"]
        for name, rate in one["gemm_gflops"].items()
        if name.rpartition(" ")[2] in wanted
    )


def share_of_read(result: Result, system: str) -> Spread | None:
    """Decode at one sequence: bytes of the weights per token, as a share of streaming reads in that round.

    Weights of 4 bits have a scale for each 32 inputs, and the output head has 8 bits.
    """
    if "c=1" not in result["rounds"][0]["measures"]:
        return None
    model = result["model"]
    plain = 4 if model["dtype"] == "float32" else 2
    item, of_head = {"int8": (1, 1), "int4": (0.5625, 1)}.get(
        model.get("quantization", "none"), (plain, plain)
    )  # bytes
    inner = model["inner_parameters"]
    weights = (inner * item + (model["parameters"] - inner) * of_head) / 1e9
    return spread(
        None if (speed := decode(turn["measures"]["c=1"][system])) is None else speed * weights / read_rate(turn)
        for turn in result["rounds"]
    )


def share_of_gemm(result: Result, system: str, measure: str) -> Spread | None:
    """Prefill: the products of one prompt, without those of the output head, as a share of the fastest product."""
    tokens = int(measure.rpartition(" ")[2])
    flops = 2e-9 * result["model"]["inner_parameters"] * tokens
    dtype = result["model"]["dtype"]
    return spread(
        flops / (turn["measures"][measure][system]["ttft_ms"]["p50"] / 1e3) / best_gemm(turn, dtype)
        for turn in result["rounds"]
    )


# ------------------------------------------------------------------ tables
def systems(result: Result) -> str:
    rows = []
    for name, about in result["systems"].items():
        words = [label(result, name), about.get("version", "-"), about["dtype"], about["interface"]]
        rows.append([*words, number(about["start_s"]), number(about["idle_cores"])])
    return table(["system", "version", "dtype of weights", "interface", "start, s", "busy cores when idle"], rows)


def figures(result: Result, beside_chart: bool = False) -> str:
    """Table of every measure of every system, without the figures that a chart shows."""
    names = list(result["systems"])
    rows = []
    for measure in result["rounds"][0]["measures"]:
        for phrase, figure, _ in shown_of(measure):
            if beside_chart and figure is not output:
                continue
            rows.append([f"{measure} {phrase}", *(cell(over_rounds(result, measure, name, figure)) for name in names)])
    return table(["", *(label(result, name) for name in names)], rows)


def ratios(result: Result, ours: str) -> str:
    """Table of the ratios of one of ours to every other system."""
    others = [name for name in result["systems"] if name != ours]
    rows = []
    for measure in result["rounds"][0]["measures"]:
        for phrase, figure, less_is_better in shown_of(measure):
            name = f"{measure} {phrase.partition(', ')[0]}"
            better = "less" if less_is_better else "more"
            rows.append([name, better, *(cell(ratio(result, measure, ours, other, figure)) for other in others)])
    return table([f"{label(result, ours)} divided by", "better", *(label(result, other) for other in others)], rows)


def shares(result: Result) -> str:
    """Table of the shares that each system reaches of the two ceilings."""
    names = list(result["systems"])
    rows = []
    if "c=1" in result["rounds"][0]["measures"]:
        rows.append(["c=1 decode, of streaming reads", *(cell(share_of_read(result, name)) for name in names)])
    for measure in result["rounds"][0]["measures"]:
        if measure.startswith("first token"):
            cells = (cell(share_of_gemm(result, name, measure)) for name in names)
            rows.append([f"{measure} tokens, of the fastest GEMM", *cells])
    return table(["share of the ceiling", *(label(result, name) for name in names)], rows)


def ceilings(result: Result) -> str:
    """Table of the ceilings, each with its range over the run."""
    found = [one for turn in result["rounds"] for one in turn["ceilings"]]
    rows = [["streaming read of memory, GB/s", cell(spread(one["read_gb_s"] for one in found))]]
    for name in found[0]["gemm_gflops"]:
        by, _, dtype = name.partition(" ")
        kernel = "torch" if by == "torch" else "a plain loop compiled for this processor"
        rows.append([f"{dtype} GEMM by {kernel}, GFLOP/s", cell(spread(one["gemm_gflops"][name] for one in found))])
    rows.append(["cores used by other programs during the run", cell(spread(one["other_cores"] for one in found))])
    return table(["ceiling", "median (range)"], rows)


def outside_steps(result: Result, ours: str) -> str:
    """One sentence: wall time beyond the engine's steps, with most clients."""
    measure = max((name for name in result["rounds"][0]["measures"] if name.startswith("c=")), key=lambda n: int(n[2:]))
    added = spread(
        turn["measures"][measure][ours]["duration_s"] / turn["measures"][measure][ours]["step_seconds"] - 1
        for turn in result["rounds"]
    )
    return f"Wall time that {label(result, ours)} adds to the engine's steps at {measure}, as a share: {cell(added)}."


def described(result: Result) -> str:
    """Machine, date, model and load in one paragraph."""
    here, model, load = result["machine"], result["model"], result["load"]
    return (
        f"{here['processor']}, {here['cores']} cores, {here['memory_gib']} GiB, torch {here['torch']}, "
        f"{result['measured']}. {title(model['shape'])}'s shape, {model['dtype']}, {load['threads']} threads, "
        f"prompts of {load['input_tokens']} tokens, {load['output_tokens']} out. "
        f"Median (range) of {len(result['rounds'])} rounds."
    )


def peers(result: Result, beside_chart: bool = False) -> str:
    """Everything about one comparison, as Markdown, without the figures that a chart beside it shows."""
    ours = [name for name in result["systems"] if is_ours(name)]
    parts = [described(result), *(ratios(result, name) for name in ours if len(result["systems"]) > 1)]
    parts += [figures(result, beside_chart), ceilings(result), shares(result)]
    if any(name.startswith("c=") for name in result["rounds"][0]["measures"]):
        parts += [outside_steps(result, name) for name in ours]
    return "\n\n".join([*parts, systems(result)])


def forms(results: dict[str, Result]) -> str:
    """Tables of comparisons on one kind of processor: our figure of each measure, and ours divided by each peer's.

    `results`: by shape of the model and format of the weights.
    """
    every = list(results.values())
    measures = dict.fromkeys(measure for result in every for measure in result["rounds"][0]["measures"])
    columns = [(measure, *shown) for measure in measures for shown in shown_of(measure)]
    rows, ceilings = [], []
    for result in every:
        model = result["model"]
        weights = model["dtype"] if model["quantization"] == "none" else model["quantization"]
        named = [title(model["shape"]), weights]
        for name in result["systems"]:
            cells = [_form_cell(result, measure, name, figure) for measure, _, figure, _ in columns]
            rows.append([*named, "Oarlock" if name == "oarlock" else f"divided by {label(result, name)}'s", *cells])
        read = spread(one["read_gb_s"] for turn in result["rounds"] for one in turn["ceilings"])
        version, count = result["systems"]["oarlock"].get("version", "-"), str(len(result["rounds"]))
        share = share_of_read(result, "oarlock")
        ceilings.append([*named, version, result["measured"], count, cell(read), cell(share)])
    here = every[0]["machine"]
    peers = {
        label(result, name): about.get("version", "-")
        for result in every
        for name, about in result["systems"].items()
        if name != "oarlock"
    }
    versions = ", ".join(f"{system} {version}" for system, version in peers.items() if version != "-")
    head = ["model", "weights", "", *(f"{measure} {phrase}" for measure, phrase, *_ in columns)]
    about_runs = ["model", "weights", "commit", "measured", "rounds", "streaming read, GB/s", "share of it at c=1"]
    return "\n\n".join(
        [
            f"{here['processor']}, {here['cores']} cores, {here['memory_gib']} GiB, torch {here['torch']}; {versions}.",
            table(head, rows),
            table(about_runs, ceilings),
        ]
    )


def _form_cell(result: Result, measure: str, name: str, figure: Callable[[Figures], float | None]) -> str:
    """Return our figure, or for another system the ratio of ours to its figure, or "-" if it was not measured."""
    if measure not in result["rounds"][0]["measures"]:
        return "-"
    if name == "oarlock":
        return cell(over_rounds(result, measure, name, figure))
    return cell(ratio(result, measure, "oarlock", name, figure))


def scaling(result: dict[str, Any], beside_chart: bool = False) -> str:
    """A heading and two tables per model and type, without the columns that a chart beside them shows."""
    parts = []
    for model in result["models"]:
        parts.append(f"**{title(model['shape'])}'s shape, {model['dtype']}**")
        names = list(model["rounds"][0]["points"])
        for what, sweep in (("batch", _batch_table), ("length", _length_table)):
            if chosen := [name for name in names if name.startswith(what)]:
                parts.append(sweep(model, chosen, beside_chart))
    return "\n\n".join(parts)


def values(model: dict[str, Any], point: str, ranks: str, key: str) -> list[float]:
    """A figure of each round; of a distribution its median."""
    figures = [turn["points"][point][ranks] for turn in model["rounds"]]
    return [one[key]["p50"] if isinstance(one[key], dict) else one[key] for one in figures]


def _batch_table(model: dict[str, Any], names: list[str], beside_chart: bool) -> str:
    first, *more = model["rounds"][0]["points"][names[0]]
    rows = []
    for name in names:
        speeds = {ranks: values(model, name, ranks, "output_tokens_per_s") for ranks in (first, *more)}
        ratios = [spread(a / b for a, b in zip(speeds[ranks], speeds[first], strict=True)) for ranks in more]
        charted = [] if beside_chart else [spread(speeds[first])]
        figures = [spread(values(model, name, first, "tpot_ms")), *charted, *ratios]
        rows.append([name.partition(" ")[2], *map(cell, figures)])
    head = ["sequences at a time", "ms per token", *([] if beside_chart else ["output tokens/s"])]
    return table([*head, *(f"output with {ranks} ranks, as a multiple" for ranks in more)], rows)


def _length_table(model: dict[str, Any], names: list[str], beside_chart: bool) -> str:
    first, *more = model["rounds"][0]["points"][names[0]]
    rows = []
    for name in names:
        length = int(name.partition(" ")[2])
        waits = {ranks: values(model, name, ranks, "ttft_ms") for ranks in (first, *more)}
        ratios = [spread(b / a for a, b in zip(waits[ranks], waits[first], strict=True)) for ranks in more]
        rate, tpot = spread(1e3 * length / wait for wait in waits[first]), spread(values(model, name, first, "tpot_ms"))
        charted = [] if beside_chart else [spread(waits[first])]
        rows.append([f"{length:,}", *map(cell, [*charted, rate, tpot, *ratios])])
    head = ["tokens of prompt", *([] if beside_chart else ["first token, ms"]), "prompt tokens/s"]
    head.append("ms per token at that context")
    return table([*head, *(f"prompt speed with {ranks} ranks, as a multiple" for ranks in more)], rows)
