"""The bound on the full shape of Qwen2.5-0.5B, on real rank processes, with the table of bounds in docs/accuracy.md.

    python -m tests.golden.full_shape            # runs everything and writes the page; about ten minutes on two cores
    python -m tests.golden.full_shape --print    # only prints it; with fewer --greedy tokens, each type and size once
    python -m tests.golden.full_shape --quick    # the same on a model of a second, to try the script

transformers' side, float64 included, is kept beside the checkpoint and made again only when the weights,
transformers or our sources change. Exits with 1 unless the bound is met. Needs about 6 GB of memory.
"""

import argparse
import json
import shutil
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from benchmarks.checkpoint import ensure, prompts
from oarlock.workers.checks.devices import this_cpu
from oarlock.workers.config import WorkerConfig
from oarlock.workers.fingerprint import sources
from oarlock.workers.models.registry import read_spec
from oarlock.workers.preflight import preflight
from oarlock.workers.verify.compare import VerifyResults, compare, compare_tokens
from oarlock.workers.verify.launch import run_ranks, run_reference
from oarlock.workers.verify.request import Text, VerifyRequest
from tests.house.rules import ROOT
from tools.made_parts import filled

PAGE = "docs/accuracy.md"
SIZES = (1, 2)
BOUNDS = {("float32", 1): 2.0, ("float32", 2): 2.0, ("bfloat16", 1): 1.0, ("bfloat16", 2): 1.1}
GREEDY = 256
_LENGTHS, _NEW_TOKENS = (20, 12, 6), 4


def say(line: str) -> None:
    print(f"full shape: {line}", file=sys.stderr, flush=True)


def reference(model: Path, what: str, request: VerifyRequest) -> Path:
    """The folder with transformers' side of `request`, made if it is not there yet."""
    folder = model.with_name(f"{model.name}.reference-{what}")
    weights = (model / "model.safetensors").stat()
    made_of = {"request": asdict(request), "weights": [weights.st_size, weights.st_mtime_ns]}
    made_of["versions"] = [version("torch"), version("transformers")]
    made_of["sources"] = sources()  # which tensors there are, and the files they lie in
    key = folder / "made_of.json"
    if not key.is_file() or json.loads(key.read_text()) != made_of:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        request.write(folder)
        run_reference(folder, say)
        key.write_text(json.dumps(made_of))
    return folder


def ours(model: Path, folder: Path, dtype: str, size: int) -> VerifyResults:
    """Our ranks on the text of `folder`, compared."""
    text = Text.read(folder)
    config = preflight(
        WorkerConfig(
            str(model), device="cpu", dtype=dtype, tensor_parallel_size=size, block_size=16, log_level="WARNING",
            max_model_len=max(map(len, text.inputs())) + 1, max_num_seqs=len(text.prompts),
            max_num_batched_tokens=max(sum(map(len, text.prompts)), len(text.prompts)),
        )
    )  # fmt: skip
    say(f"{dtype}, {size} rank(s)")
    run_ranks(config, folder, say)
    if not VerifyRequest.read(folder).record:
        return VerifyResults([], list(compare_tokens(folder, dtype)))
    comparison = compare(folder, read_spec(str(model)), size, dtype)
    for file in folder.glob("rank-*"):
        file.unlink()
    return comparison


def layer_table(comparisons: dict[tuple[str, int], VerifyResults]) -> list[str]:
    """Errors of the residual after every layer and of the end, ours divided by transformers'; the page omits them."""
    runs = list(comparisons)
    dtypes = list(dict.fromkeys(dtype for dtype, _ in runs))
    heads, columns = ["layer"], []
    for dtype in dtypes:
        heads += [f"theirs, {dtype}", *(f"TP {size}" for other, size in runs if other == dtype)]
    rows = [
        row.name for row in comparisons[runs[0]].rows if row.tensor in ("embedding", "residual", "final_norm", "logits")
    ]
    for name in rows:
        cells = [name.removesuffix(".residual")]
        for dtype in dtypes:
            for position, run in enumerate(run for run in runs if run[0] == dtype):
                ours_error, theirs = largest(comparisons[run], name)
                cells += [f"{theirs:.1e}"] if position == 0 else []
                cells.append(f"{ours_error / theirs:.2f}" if theirs else ("0" if ours_error == 0 else "inf"))
        columns.append(f"| {' | '.join(cells)} |")
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *columns]


def largest(comparison: VerifyResults, name: str) -> tuple[float, float]:
    """(ours, transformers') over all ranks."""
    row = next(row for row in comparison.rows if row.name == name)
    return max(error.max_error for error in row.errors), max(error.theirs for error in row.errors)


def bound_table(
    comparisons: dict[tuple[str, int], VerifyResults], greedy: dict[int, VerifyResults]
) -> tuple[list[str], bool]:
    """The bounds, the measured errors, and whether all are within bounds."""
    lines = ["| | transformers | ours | ratio | bound | worst tensor, rms | |", "|---|---|---|---|---|---|---|"]
    all_ok = True
    for (dtype, size), comparison in comparisons.items():
        error, theirs = largest(comparison, "logits")
        bound = BOUNDS[dtype, size]
        ok = error <= bound * theirs and comparison.ok
        worst = max((error.rms_ratio, row.name) for row in comparison.rows for error in row.errors)
        lines.append(
            f"| logits, {dtype}, TP {size} | {theirs:.2e} | {error:.2e} | {error / theirs:.2f} | {bound} | "
            f"{worst[0]:.2f} ({worst[1]}) | {'met' if ok else 'NOT MET'} |"
        )
        all_ok &= ok
    for size, comparison in greedy.items():
        equal = all(token.result == "ok" and token.near_ties == 0 for token in comparison.tokens)
        count = sum(token.count for token in comparison.tokens)
        lines.append(
            f"| greedy, float32, TP {size} | {count} tokens | {'all equal' if equal else 'not equal'} | | | | "
            f"{'met' if equal else 'NOT MET'} |"
        )
        all_ok &= equal
    return lines, all_ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--print", action="store_true", help="leave the page as it is")
    parser.add_argument("--quick", action="store_true", help="a tiny model; leaves the page as it is")
    parser.add_argument("--greedy", type=int, default=GREEDY, help=f"tokens of greedy text (default: {GREEDY})")
    arguments = parser.parse_args()
    dtypes = [dtype for dtype in ("float32", "bfloat16") if this_cpu().multiplies(dtype)]
    if "bfloat16" not in dtypes:  # not what is served there either
        say(f"bfloat16 is skipped: {this_cpu().name}")
    is_whole = len(dtypes) == 2 and arguments.greedy == GREEDY and not arguments.quick
    if not (arguments.print or arguments.quick or is_whole):
        parser.error("the page wants every figure: name --print, or run it whole on a processor that has bfloat16")
    model = ensure("quick" if arguments.quick else "0.5b")
    vocab = read_spec(str(model)).vocab_size
    texts = [prompts(1, length, vocab, seed)[0] for seed, length in enumerate(_LENGTHS)]
    comparisons = {}
    for number, dtype in enumerate(dtypes):
        folder = reference(model, dtype, VerifyRequest(str(model), dtype, "cpu", texts, _NEW_TOKENS))
        for size in SIZES if is_whole or len(dtypes) == 1 else SIZES[::-1][number : number + 1]:
            comparisons[dtype, size] = ours(model, folder, dtype, size)
    folder = reference(
        model, "greedy", VerifyRequest(str(model), "float32", "cpu", texts[:1], arguments.greedy, record=False)
    )
    greedy = {size: ours(model, folder, "float32", size) for size in (SIZES if is_whole else SIZES[-1:])}
    bounds, ok = bound_table(comparisons, greedy)
    layers = ["The residual after every layer (largest error):", "", *layer_table(comparisons)]
    print("\n".join([*bounds, "", *layers]))
    if is_whole and not arguments.print:
        path = ROOT / PAGE
        path.write_text(filled(path.read_text("utf-8"), "full-shape", "\n".join(bounds)), "utf-8")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
