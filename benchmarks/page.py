"""The made parts of docs/performance.md: charts and tables for each kind of processor, from `benchmarks/results.json`.

python -m benchmarks.page result.json scaling.json    # take these in, then write the pages, as `make docs` does
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import charts, machine, tables
from benchmarks.environments import HERE, ROOT

RESULTS = HERE / "results.json"
SECTIONS = {"peers": (tables.peers, charts.peers), "scaling": (tables.scaling, charts.scaling)}
ALTERNATIVES = {
    "peers": "Bars: decode speed and time to the first token of Oarlock and other programs",
    "scaling": "Bars: output speed and time to the first token by sequences, length of prompt and ranks",
}
# Of each run's figures: those that tables and charts read.
KEPT = {"decode_tokens_per_s", "output_tokens_per_s", "ttft_ms", "tpot_ms", "duration_s", "step_seconds"}
LONGEST_LINE = 250


def take_in(path: Path) -> str:
    """Store what is shown of a result under its kind of processor; it replaces the one before. Returns its name.

    Comparisons on other shapes than the first, or with rounded weights, are kept together, by shape and form.
    """
    result = json.loads(path.read_text())
    kind, model = result["machine"]["kind"], result.get("model", {})
    name, kept = f"{result['what']}-{kind}", shown(result)
    stored = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    form = (model.get("shape", "0.5b"), model.get("quantization", "none"))
    if result["what"] == "peers" and form != ("0.5b", "none"):
        name = f"forms-{kind}"
        kept = stored.get(name, {}) | {" ".join(form): kept}
    RESULTS.write_text(compact(dict(sorted((stored | {name: kept}).items()))) + "\n")
    return name


def shown(value: Any) -> Any:
    """Round floats to four significant digits; of a run's figures keep those that are shown, of distributions p50."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        if "p50" in value:
            return {"p50": shown(value["p50"])}
        is_run = "output_tokens_per_s" in value
        return {key: shown(inner) for key, inner in value.items() if not is_run or key in KEPT}
    return [shown(inner) for inner in value] if isinstance(value, list) else value


def compact(value: Any, indent: str = "") -> str:
    """JSON with one line for the figures of each run: whatever fits on a line stands on one."""
    line = json.dumps(value)
    if len(line) <= LONGEST_LINE or not isinstance(value, dict | list):
        return line
    inner = indent + " "
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + compact(one, inner) for one in value) + f"\n{indent}]"
    rows = [f"{inner}{json.dumps(key)}: {compact(one, inner)}" for key, one in value.items()]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def forms() -> str:
    """A section per kind of processor with the comparisons on other shapes and forms of weights."""
    parts = [f"### {machine.TITLES[kind]}\n\n{tables.forms(results)}" for kind, results in _results("forms").items()]
    return "\n\n".join(parts) or "Not measured yet."


def sections(what: str) -> str:
    """One section per kind of processor that a result is there from."""
    parts = []
    for kind, result in _results(what).items():
        picture = f"![{ALTERNATIVES[what]}]({picture_name(what, kind)})"
        parts += [f"### {machine.TITLES[kind]}", f"```text\n{result['command']}\n```", picture]
        parts.append(SECTIONS[what][0](result, True))
    return "\n\n".join(parts) or "Not measured yet."


def pictures() -> dict[str, str]:
    """Charts by the name of their files in docs/."""
    return {
        picture_name(what, kind): chart(result)
        for what, (_, chart) in SECTIONS.items()
        for kind, result in _results(what).items()
    }


def picture_name(what: str, kind: str) -> str:
    return f"performance-{what}-{kind}.svg"


def _results(what: str) -> dict[str, dict[str, Any]]:
    """Stored results of this form by kind of processor, in the order of the kinds."""
    stored = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    return {kind: stored[f"{what}-{kind}"] for kind in machine.TITLES if f"{what}-{kind}" in stored}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="results to store first")
    for path in parser.parse_args(argv).files:
        print(f"stored {take_in(path)} in {RESULTS.relative_to(ROOT)}")
    from tools import documents  # which imports this file

    return documents.main()


if __name__ == "__main__":
    raise SystemExit(main())
