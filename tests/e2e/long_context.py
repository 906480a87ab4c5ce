"""The demo model with room for sequences that no test outlasts.

A test that acts while a request runs needs one that still runs then, however fast the machine is. The demo's own
context of 2,048 tokens is over in half a second where the kernels are fast.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.running import DEMO

CONTEXT = 65_536  # tokens: some 15 s of decoding at 4,000 tokens/s
LONG = CONTEXT - 1_000  # tokens to ask for, beside a short prompt


def long_context_demo(directory: Path) -> Path:
    """A checkpoint in `directory`: the demo's files, and its configuration with a context of `CONTEXT` tokens."""
    for file in DEMO.iterdir():
        if file.is_file():
            (directory / file.name).symlink_to(file)
    written = directory / "config.json"
    written.unlink()
    config = json.loads((DEMO / "config.json").read_text())
    written.write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return directory
