"""What is to be verified, and the text it is verified on, as JSON in the folder that all processes share.

Torch-free.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Request:
    """The same for the reference and for every rank."""

    model: str  # a directory
    dtype: str  # resolved: float32 | bfloat16 | float16
    device: str  # resolved: cpu | cuda
    prompts: list[list[int]]
    new_tokens: int
    record: bool = True  # tensors as well as tokens
    num_threads: int | None = None  # of the reference; None: torch's own choice

    def write(self, folder: Path) -> None:
        (folder / "request.json").write_text(json.dumps(asdict(self)), "utf-8")

    @staticmethod
    def read(folder: Path) -> "Request":
        return Request(**json.loads((folder / "request.json").read_text("utf-8")))


@dataclass(frozen=True, slots=True)
class Text:
    """Prompts and what transformers answers to them, as token ids."""

    prompts: list[list[int]]
    outputs: list[list[int]]

    def fed(self) -> list[list[int]]:
        """What goes into the model: the last token is only ever an answer."""
        return [prompt + output[:-1] for prompt, output in zip(self.prompts, self.outputs, strict=True)]

    @property
    def num_rows(self) -> int:
        return sum(len(sequence) for sequence in self.fed())

    def write(self, folder: Path) -> None:
        (folder / "text.json").write_text(json.dumps(asdict(self)), "utf-8")

    @staticmethod
    def read(folder: Path) -> "Text":
        return Text(**json.loads((folder / "text.json").read_text("utf-8")))
