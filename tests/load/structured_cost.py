"""Cost of binding every answer to a form: decode time with and without, in alternation on one server.

    python -m tests.load.structured_cost [--rounds N] [--concurrency N] [--quick]

The model has the true shape (see `checkpoint`); its tokenizer is replaced by one with a vocabulary of ordinary make:
words with and without a space, numbers, punctuation and pieces of JSON, because a mask costs as much as the vocabulary
makes it. Every form is made so that no answer can end before its last token.
"""

import argparse
import json
import random
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.checkpoint import ensure, prompts
from tests.e2e.running import RunningServer

_STRINGS = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name"],
}
FORMS: dict[str, dict[str, Any]] = {
    "list of objects": {"structured_outputs": {"json": {"type": "array", "items": _STRINGS, "minItems": 999}}},
    "strings of 10 to 60": {
        "structured_outputs": {
            "json": {"type": "array", "items": {"type": "string", "minLength": 10, "maxLength": 60}, "minItems": 999}
        }
    },
    "regular expression": {"structured_outputs": {"regex": r"([A-Z][a-z]+ \d{3}-\d{4}; ){200}"}},
}
_SYLLABLES = "ba be bi bo ca ce co da de di do en er es fa fi ga ge in ion ka la le li lo ma me na ne no or pa pe ra re"
_MARKS = ['{"', '"}', '":', '",', '"', "{", "}", "[", "]", ", ", ": ", '": "', '", "', "]}", "}]", "-", ".", ";", "; "]


def vocabulary(size: int) -> list[str]:
    """`size` pieces in the byte-level spelling: the bytes first, after the end token."""
    from tokenizers import pre_tokenizers

    pieces = dict.fromkeys(["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    pieces |= dict.fromkeys(mark.replace(" ", "Ġ") for mark in _MARKS)
    pieces |= dict.fromkeys(str(number) for number in range(10, 1000))
    draw, syllables = random.Random("vocabulary"), _SYLLABLES.split()
    while len(pieces) < size:
        word = "".join(draw.choices(syllables, k=draw.choice((1, 2, 2, 3, 3, 4))))
        word = draw.choice((word, word, word.capitalize()))
        pieces[draw.choice(("", "Ġ")) + word] = None
    return list(pieces)[:size]


def with_words(model: Path, into: Path) -> Path:
    """A copy of the checkpoint that shares its weights and has another tokenizer."""
    for file in model.iterdir():
        if file.name != "tokenizer.json":
            (into / file.name).symlink_to(file)
    described = json.loads((model / "tokenizer.json").read_text())
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    described["model"]["vocab"] = {piece: number for number, piece in enumerate(vocabulary(size))}
    described["added_tokens"] = [token for token in described["added_tokens"] if token["id"] < size]
    (into / "tokenizer.json").write_text(json.dumps(described))
    return into


def compare(server: RunningServer, args: argparse.Namespace) -> list[str]:
    """One line per form: what a token takes, and how much longer than a free one."""
    lines = []
    for name, form in FORMS.items():
        ratios, costs = [], []
        for turn in range(args.rounds + 1):  # the first compiles the grammar and warms up
            work = prompts(args.concurrency, 16, 1000, turn)
            # Of whole answers: on a machine that is busy with others, all tokens of a short one may be read at once.
            free, bound = (
                load.run(server.url, "load", work, args.concurrency, args.output_tokens, extra).e2el_ms["p50"]
                / args.output_tokens
                for extra in ({}, form)
            )
            if turn:
                ratios.append(bound / free)
                costs.append(bound - free)
        low, high = min(ratios), max(ratios)
        lines.append(
            f"{name:<22} {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}) of a free token's time, "
            f"{statistics.median(costs):+.1f} ms"
        )
        print(lines[-1], flush=True)
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it works")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="oarlock-structured-"))
    try:
        model = with_words(ensure("quick" if args.quick else "0.5b"), folder)
        flags = ("--served-model-name", "load", "--max-num-seqs", str(args.concurrency), "--max-model-len", "512")
        with RunningServer(model, *flags, "--no-enable-prefix-caching") as server:
            compare(server, args)
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
