"""The table of errors of every family and dtype, as multiples of transformers' own, in docs/accuracy.md.

    python -m tests.golden.accuracy_table            # writes the page
    python -m tests.golden.accuracy_table --print    # only prints it

Tiny models in one process, ranks as threads. Exits with 1 when anything differs.
"""

import argparse
import random
import tempfile
from pathlib import Path

import torch

from oarlock.workers.verify.compare import VerifyResults
from tests.golden.cases import CASES, FAMILY_CASES
from tests.golden.tiny_models import DESCRIBED, FAMILIES, make_tiny
from tests.house.rules import ROOT
from tests.unit.workers.verify.cases import VerifyCase
from tools.made_parts import filled

PAGE = "docs/accuracy.md"
DTYPES = ("float32", "bfloat16", "float16")
_LENGTHS = (31, 24, 18)  # all beyond the length that the LongRoPE case was trained for
# The first case of each family without experts: transformers' matmul in 16 bits refuses experts as narrow as tiny ones.
# InternLM 3's rotation changes with the length of the text, which grows here.
_FIRST = {case.family: name for name, case in reversed(CASES.items()) if case.family in (*FAMILIES, *DESCRIBED)}
del _FIRST["internlm3"]
ROWS = tuple(dict.fromkeys([*FAMILY_CASES, *reversed(_FIRST.values())]))


def family_row(name: str, folder: Path) -> tuple[str, bool]:
    """Return the line of one family, and whether all of it is within the bounds.

    For each dtype: the largest error of a logit and the largest rms error of any tensor, divided by transformers'.
    """
    case = CASES[name]
    cells, ok = [name], True
    draw = random.Random(11)
    prompts = [[draw.randrange(300) for _ in range(length)] for length in _LENGTHS]
    for dtype in DTYPES:
        model = make_tiny(folder, case.family, seed=7, dtype=getattr(torch, dtype), **case.special)
        verify_case = VerifyCase(model, folder / f"{dtype}-verify", dtype, 6, prompts, case.max_model_len or 64)
        logits, worst = 0.0, 0.0
        for size in case.sizes:
            comparison, causes = verify_case.run(size)
            ours, theirs = logit_errors(comparison)
            logits = max(logits, ours / theirs)
            worst = max([worst, *(error.rms_ratio for row in comparison.rows for error in row.errors)])
            if not comparison.ok:
                ok = False
                print(f"{name} {dtype} size {size}: {comparison.first_fault}, {causes}", flush=True)
        cells += [f"{logits:.2f}", f"{worst:.2f}"]
    return f"| {' | '.join(cells)} |", ok


def logit_errors(comparison: VerifyResults) -> tuple[float, float]:
    """The largest error of any logit: ours, transformers'."""
    errors = comparison.rows[-1].errors
    return max(error.max_error for error in errors), max(error.theirs for error in errors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--print", action="store_true", help="leave the page as it is")
    only_print = parser.parse_args().print
    torch.set_num_threads(1)
    heads = ["family", *(f"{dtype}: {error}" for dtype in DTYPES for error in ("logits", "any tensor"))]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    all_ok = True
    for name in ROWS:
        with tempfile.TemporaryDirectory(prefix="oarlock-accuracy-") as folder:
            row, ok = family_row(name, Path(folder))
        lines.append(row)
        all_ok &= ok
        print(row, flush=True)
    if not only_print:
        path = ROOT / PAGE
        path.write_text(filled(path.read_text("utf-8"), "families", "\n".join(lines)), "utf-8")
    return 0 if all_ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
